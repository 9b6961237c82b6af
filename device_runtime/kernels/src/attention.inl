#pragma once
#include "math.inl"
namespace edgellm { namespace {
void append(const Attention&, int64_t) {}
void attend_chunk(const Attention&, int64_t, int64_t) {}
void attend_rows(const Attention&, int64_t, int64_t, int64_t) {}
void merge(const Attention&, int64_t) {}
}}

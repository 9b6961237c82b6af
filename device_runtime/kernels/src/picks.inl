#pragma once
#include "math.inl"
namespace edgellm { namespace {
Best survey(const float*, int64_t, bool) { return {}; }
}}

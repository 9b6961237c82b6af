// Attention to rows of 4 bits, from their codes: scores are products of codes, values are codes times weights.
#pragma once

#include "attention_query.h"
#include "int4_rows.h"
#include "kernels.h"
#include "vector_math.h"

namespace edgellm {
namespace {

constexpr int64_t kInt4Keys = 32;  // whose values are added together

// ---------------------------------------------------------------------------------------- scores
// Of 16 keys as `score_int4` takes them: [blocks, 4] words of 4 bytes of each key, then scales of each block.
constexpr int64_t int4_strip_floats(int64_t dim) { return (dim / 8 + dim / kInt4Block) * kStrip; }

// Transposes 16 rows, whose codes become numbers from 0 to 15, and prefetches the next 16 from `ahead` on.
template <class Isa>
void turn_int4(const Int4* rows, int64_t count, int64_t dim, float* turned, const Int4* ahead = nullptr) {
  using Floats = typename Isa::Floats;
  using Ints = typename Isa::Ints;
  constexpr int kLanes = Isa::kLanes, kAtOnce = 4 * kLanes;  // bytes of a key
  const Int4* places[kStrip];
  for (int i = 0; i < kStrip; i++) places[i] = rows + least(i, count - 1) * int4_row_bytes(dim);
  for (int64_t byte = 0; ahead && byte < kStrip * int4_row_bytes(dim); byte += 64) __builtin_prefetch(ahead + byte);
  for (int64_t from = 0; from < dim / 2; from += kAtOnce) {
    const int64_t rest = least(kAtOnce, dim / 2 - from);
    for (int key = 0; key < kStrip; key += kLanes) {
      Floats block[kLanes];
      for (int i = 0; i < kLanes; i++) {
        Int4 bytes[kAtOnce] = {};
        const Int4* own = places[key + i] + from;
        if (rest < kAtOnce) own = static_cast<Int4*>(__builtin_memcpy(bytes, own, rest));
        block[i] = Isa::template read<Floats>(own);
      }
      Isa::transpose(block);
      for (int i = 0; i < rest / 4; i++)
        Isa::write(turned + (from / 4 + i) * kStrip + key, Ints(block[i]) ^ int32_t(0x88888888));
    }
  }
  for (int64_t b = 0; b < dim / kInt4Block; b++) {
    uint16_t halves[kStrip];
    for (int i = 0; i < kStrip; i++) __builtin_memcpy(halves + i, places[i] + dim / 2 + 2 * b, 2);
    Isa::store(turned + (dim / 8 + b) * kStrip, Isa::load_half(halves));
  }
}

// Scores of 16 keys from `at` on: sums over blocks of the exact sum of their products of codes, times both scales.
template <class Isa>
void score_int4(const Attention& a, const Query* queries, int count, const float* turned, int64_t at) {
  using Floats = typename Isa::Floats;
  using Ints = typename Isa::Ints;
  using Bytes = typename Isa::Bytes;
  const int64_t dim = a.padded_dim();
  for (int64_t b = 0; b < dim / kInt4Block; b++)
    for (int key = 0; key < kStrip; key += Isa::kLanes) {
      Bytes codes[8];
#pragma GCC unroll 4
      for (int word = 0; word < 4; word++) {
        const Ints both = Isa::template read<Ints>(turned + (4 * b + word) * kStrip + key);
        codes[word] = Bytes(both & 0x0f0f0f0f);
        codes[4 + word] = Bytes(both >> 4 & 0x0f0f0f0f);
      }
      const Floats scale = Isa::template read<Floats>(turned + (dim / 8 + b) * kStrip + key);
      for (int i = 0; i < count; i++) {
        const Int4Query query(queries[i].q + dim, dim);
        float* const scores = queries[i].scores + at + key;
        const Ints products = Isa::sum_nibbles(codes, query.codes + b * kInt4Block);
        const Floats steps = (__builtin_convertvector(products, Floats) + query.middles[b]) * query.scales[b];
        Isa::write(scores, Isa::fma(steps, scale, b ? Isa::template read<Floats>(scores) : Floats{}));
      }
    }
  for (int i = 0; a.rules.softcap > 0 && i < count; i++)
    Isa::store(queries[i].scores + at, capped<Isa>(a, Isa::load(queries[i].scores + at)));
}

// ---------------------------------------------------------------------------------------- values
using Int4Weights = float[kInt4Keys];  // of keys, for a query and a block: times the block's scales

// Adds strips from `strip` to the last of a block of keys' values to those of Q queries.
template <class Isa, int Q, int kFirst, int kLast>
void add_int4_strips(const Query* queries, const Int4* codes, int64_t stride, int64_t count, int64_t d,
                     const Int4Weights* weights) {
  using Floats = typename Isa::Floats;
  constexpr int kParts = Isa::kParts, kRegisters = (kLast - kFirst) * kParts;
  Floats sums[Q][kRegisters];
  const int64_t from = d + kFirst * kStrip;
#pragma GCC unroll 8
  for (int q = 0; q < Q; q++)
#pragma GCC unroll 8
    for (int i = 0; i < kRegisters; i++)
      sums[q][i] = Isa::template read<Floats>(queries[q].values + from + i * Isa::kLanes);
  for (int64_t key = 0; key < count; key++) {
    const auto add = [&](auto strip) EDGELLM_LAMBDA {
      constexpr int at = (decltype(strip)::value - kFirst) * kParts;
      const F<Isa> numbers = Isa::template load_signed_nibbles<decltype(strip)::value == 1>(codes + key * stride);
#pragma GCC unroll 8
      for (int q = 0; q < Q; q++) {
        const Floats weight = weights[q][key] - Floats{};
#pragma GCC unroll 4
        for (int i = 0; i < kParts; i++) sums[q][at + i] = Isa::fma(Isa::part(numbers, i), weight, sums[q][at + i]);
      }
    };
    if constexpr (kFirst == 0) add(std::integral_constant<int, 0>{});
    if constexpr (kLast == 2) add(std::integral_constant<int, 1>{});
  }
#pragma GCC unroll 8
  for (int q = 0; q < Q; q++)
#pragma GCC unroll 8
    for (int i = 0; i < kRegisters; i++) Isa::write(queries[q].values + from + i * Isa::kLanes, sums[q][i]);
}

template <class Isa, int Q>
void add_int4_block(const Query* queries, int num_queries, const Int4* codes, int64_t stride, int64_t count, int64_t d,
                    const Int4Weights* weights) {
  if (num_queries == Q) {
    if constexpr (2 * Q * Isa::kParts <= Isa::kSumRegisters) {
      add_int4_strips<Isa, Q, 0, 2>(queries, codes, stride, count, d, weights);
    } else {
      add_int4_strips<Isa, Q, 0, 1>(queries, codes, stride, count, d, weights);
      add_int4_strips<Isa, Q, 1, 2>(queries, codes, stride, count, d, weights);
    }
  } else if constexpr (Q > 1) {
    add_int4_block<Isa, Q - 1>(queries, num_queries, codes, stride, count, d, weights);
  }
}

// Adds the values of up to 32 contiguous rows, one after the other; their scores stand from `at` on.
template <class Isa>
void add_values(const Query* queries, int all, const Int4* rows, int64_t at, int64_t count, int64_t dim,
                const Int4* ahead = nullptr) {
  const int64_t stride = int4_row_bytes(dim);
  for (int64_t byte = 0; ahead && byte < kInt4Keys * stride; byte += 64) __builtin_prefetch(ahead + byte);
  const int tiles = (all + Isa::kValueQueries - 1) / Isa::kValueQueries;
  for (int64_t b = 0; b < dim / kInt4Block; b++) {
    uint16_t halves[kInt4Keys] = {};
    for (int64_t i = 0; i < count; i++) __builtin_memcpy(halves + i, rows + i * stride + dim / 2 + 2 * b, 2);
    const F<Isa> scales[] = {Isa::load_half(halves), Isa::load_half(halves + kStrip)};
    for (int tile = 0; tile < tiles; tile++) {
      const int first = all * tile / tiles, some = all * (tile + 1) / tiles - first;
      alignas(64) Int4Weights weights[Isa::kValueQueries];
      for (int i = 0; i < some; i++)
        for (int strip = 0; strip < 2; strip++)
          Isa::store(weights[i] + strip * kStrip,
                     Isa::mul(Isa::load(queries[first + i].scores + at + strip * kStrip), scales[strip]));
      add_int4_block<Isa, Isa::kValueQueries>(queries + first, some, rows + b * kStrip, stride, count, b * kInt4Block,
                                              weights);
    }
  }
}

}  // namespace
}  // namespace edgellm

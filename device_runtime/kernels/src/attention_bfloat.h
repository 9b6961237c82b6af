// Attention to rows of bfloat16, by products of pairs: of numbers 2i and 2i + 1 of a key, of values of keys 2i and 2i + 1.
//
// Queries and weights are rounded to bfloat16, sums are floats. `dot_pairs` adds the odd product of a pair first. x86's
// instruction has the same bits, but for numbers below 2^-126, which it takes as zeros.
#pragma once

#include "attention_query.h"
#include "kernels.h"
#include "kv_cache.h"
#include "vector_math.h"

namespace edgellm {
namespace {

constexpr int kFewQueries = 16;  // for which a strip of keys is turned when it is scored

// A pair in all lanes.
template <class Isa>
EDGELLM_INLINE typename Isa::Ints pair_of(const void* pairs, int64_t at) {
  int32_t pair;
  __builtin_memcpy(&pair, static_cast<const char*>(pairs) + at * sizeof pair, sizeof pair);
  return pair + typename Isa::Ints{};
}

// ---------------------------------------------------------------------------------------- scores
// Up to `count` numbers of a row from `at` on; zeros follow its `size`.
template <class V>
EDGELLM_INLINE V read_bfloats(const BFloat16* row, int64_t at, int64_t size) {
  constexpr int64_t kCount = sizeof(V) / 2;
  V out{};
  if (at + kCount <= size)
    __builtin_memcpy(&out, row + at, sizeof out);
  else if (at < size)
    __builtin_memcpy(&out, row + at, 2 * (size - at));
  return out;
}

// Transposes 16 rows of `size` numbers to pairs [dim / 2][16 keys], and prefetches the next 16 from `ahead` on.
template <class Isa>
void turn_pairs(const BFloat16* rows, int64_t count, int64_t size, int64_t dim, int32_t* turned,
                const BFloat16* ahead = nullptr) {
  using Floats = typename Isa::Floats;
  constexpr int kLanes = Isa::kLanes;
  for (int64_t d = 0; d < dim; d += 2 * kLanes) {
    for (int64_t i = kStrip * d / dim; ahead && i < least(kStrip, kStrip * (d + 2 * kLanes) / dim); i++)
      fetch(ahead + i * size, size);
    for (int key = 0; key < kStrip; key += kLanes) {
      Floats block[kLanes];
      const auto place = [&](int i) { return rows + least(key + i, count - 1) * size; };
      int32_t* const out = turned + d / 2 * kStrip + key;
      if (d + 2 * kLanes <= size) {
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; i++) block[i] = Isa::template read<Floats>(place(i) + d);
        Isa::transpose(block);
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; i++) Isa::write(out + i * kStrip, block[i]);
      } else {
        for (int i = 0; i < kLanes; i++) block[i] = read_bfloats<Floats>(place(i), d, size);
        Isa::transpose(block);
        for (int64_t i = 0; i < least(kLanes, (dim - d) / 2); i++) Isa::write(out + i * kStrip, block[i]);
      }
    }
  }
}

// Scores of Q queries with R registers of turned keys.
template <class Isa, int Q, int R>
void score_pairs(const Query* queries, const int32_t* turned, int64_t dim, int64_t at) {
  using Floats = typename Isa::Floats;
  using Ints = typename Isa::Ints;
  Floats sums[Q][R] = {};
  const int64_t strip = kStrip * dim / 2;
  const float* pairs[Q];  // see `round_query`
  for (int q = 0; q < Q; q++) pairs[q] = queries[q].q + dim;
  for (int64_t pair = 0; pair < dim / 2; pair++) {
    Ints keys[R];
#pragma GCC unroll 16
    for (int i = 0; i < R; i++) {
      const int64_t key = i * Isa::kLanes;
      keys[i] = Isa::template read<Ints>(turned + key / kStrip * strip + pair * kStrip + key % kStrip);
    }
#pragma GCC unroll 8
    for (int q = 0; q < Q; q++) {
      const Ints query = pair_of<Isa>(pairs[q], pair);
#pragma GCC unroll 16
      for (int i = 0; i < R; i++) sums[q][i] = Isa::dot_pairs(sums[q][i], keys[i], query);
    }
  }
#pragma GCC unroll 8
  for (int q = 0; q < Q; q++)
#pragma GCC unroll 16
    for (int i = 0; i < R; i++) Isa::write(queries[q].scores + at + i * Isa::kLanes, sums[q][i]);
}

template <class Isa>
void score_strip_of_pairs(const Attention& a, const Query* queries, int count, const int32_t* turned, int64_t at) {
  constexpr int R = Isa::kParts;
  for (int i = 0; i < count; i++) {
    score_pairs<Isa, 1, R>(queries + i, turned, a.padded_dim(), at);
    Isa::store(queries[i].scores + at, capped<Isa>(a, Isa::load(queries[i].scores + at)));
  }
}

// ---------------------------------------------------------------------------------------- values
// The values of two rows as pairs [dim]; without `odd` its numbers are zeros. Prefetches two rows from `ahead` on.
template <class Isa>
void pair_rows(const BFloat16* even, const BFloat16* odd, int64_t size, int64_t dim, int32_t* pairs,
               const BFloat16* ahead = nullptr) {
  using Halves = typename Isa::Halves;
  if (ahead) fetch(ahead, 2 * size);
  int64_t d = 0;
  if constexpr (Isa::kInterleaves)
    for (; odd && d + 2 * Isa::kLanes <= size; d += 2 * Isa::kLanes) Isa::interleave(even + d, odd + d, pairs + d);
  for (; d < dim; d += Isa::kLanes) {
    const Halves high = odd ? read_bfloats<Halves>(odd, d, size) : Halves{};
    Isa::write(pairs + d, Isa::to_ints(read_bfloats<Halves>(even, d, size)) | Isa::to_ints(high) << 16);
  }
}

// Adds V registers of values of `count` pairs, weighted for Q queries; the weights stand from pair `at` on. `kept`: bits
// of pairs that count.
template <class Isa, int Q, int V, bool kIsWhole>
void add_pair_tile(const Query* queries, const int32_t* values, int64_t dim, int64_t at, int64_t count, int64_t d,
                   int32_t kept) {
  using Floats = typename Isa::Floats;
  using Ints = typename Isa::Ints;
  Floats sums[Q][V];
  const float* weights[Q];  // see `weigh`
#pragma GCC unroll 8
  for (int q = 0; q < Q; q++) {
    weights[q] = queries[q].scores + at;
#pragma GCC unroll 8
    for (int i = 0; i < V; i++) sums[q][i] = Isa::template read<Floats>(queries[q].values + d + i * Isa::kLanes);
  }
  for (int64_t pair = 0; pair < count; pair++) {
    Ints own[V];
#pragma GCC unroll 8
    for (int i = 0; i < V; i++) {
      own[i] = Isa::template read<Ints>(values + pair * dim + d + i * Isa::kLanes);
      if constexpr (!kIsWhole) own[i] &= kept;
    }
#pragma GCC unroll 8
    for (int q = 0; q < Q; q++) {
      const Ints weight = pair_of<Isa>(weights[q], pair);
#pragma GCC unroll 8
      for (int i = 0; i < V; i++) sums[q][i] = Isa::dot_pairs(sums[q][i], own[i], weight);
    }
  }
#pragma GCC unroll 8
  for (int q = 0; q < Q; q++)
#pragma GCC unroll 8
    for (int i = 0; i < V; i++) Isa::write(queries[q].values + d + i * Isa::kLanes, sums[q][i]);
}

template <class Isa, int Q, bool kIsWhole>
void add_some_pairs(const Query* queries, int num_queries, const int32_t* values, int64_t dim, int64_t at,
                    int64_t count, int32_t kept) {
  if (num_queries == Q) {
    constexpr int kRegisters = int(least(4, most(1, Isa::kPairSums / Q)));
    int64_t d = 0;
    for (; d + kRegisters * Isa::kLanes <= dim; d += kRegisters * Isa::kLanes)
      add_pair_tile<Isa, Q, kRegisters, kIsWhole>(queries, values, dim, at, count, d, kept);
    for (; d < dim; d += Isa::kLanes) add_pair_tile<Isa, Q, 1, kIsWhole>(queries, values, dim, at, count, d, kept);
  } else if constexpr (Q > 1) {
    add_some_pairs<Isa, Q - 1, kIsWhole>(queries, num_queries, values, dim, at, count, kept);
  }
}

template <class Isa, bool kIsWhole>
void add_pairs_of_all(const Query* queries, int all, const int32_t* values, int64_t dim, int64_t at, int64_t count,
                      int32_t kept) {
  const int tiles = (all + Isa::kPairQueries - 1) / Isa::kPairQueries;
  for (int tile = 0; tile < tiles; tile++) {
    const int first = all * tile / tiles, some = all * (tile + 1) / tiles - first;
    add_some_pairs<Isa, Isa::kPairQueries, kIsWhole>(queries + first, some, values, dim, at, count, kept);
  }
}

// Adds the values of keys [from, to) of a chunk, which may begin or end within a pair. `values`: that of key `from`.
template <class Isa>
void add_pair_values(const Query* queries, int all, const int32_t* values, int64_t dim, int64_t from, int64_t to) {
  constexpr int32_t kEven = 0xffff, kOdd = ~kEven;
  if (from >= to) return;
  if (from % 2) {
    add_pairs_of_all<Isa, false>(queries, all, values, dim, from / 2, 1, kOdd);
    values += dim;
    from++;
  }
  const int64_t whole = (to - from) / 2;
  if (whole > 0) add_pairs_of_all<Isa, true>(queries, all, values, dim, from / 2, whole, -1);
  if (from < to && to % 2) add_pairs_of_all<Isa, false>(queries, all, values + whole * dim, dim, to / 2, 1, kEven);
}

}  // namespace
}  // namespace edgellm

// Scores of queries with the keys of a chunk.
#pragma once

#include "attention_bfloat.h"
#include "attention_int4.h"
#include "attention_query.h"
#include "kernels.h"
#include "kv_cache.h"
#include "vector_math.h"

namespace edgellm {
namespace {

// Scores of 16 keys; each is summed in 16 lanes along the head, then over the lanes. `kParts`: strips of the head, 0 if
// known only at run time. `ahead`: the next 16 keys, of which it prefetches `share`.
template <class Isa, int kParts, class E>
F<Isa> score(const float* q, const E* const* rows, int64_t dim, const E* ahead, PrefetchRange share) {
  constexpr int kHeld = kParts ? kParts : 1;
  F<Isa> query[kHeld], all[kStrip];
  for (int part = 0; part < kParts; part++) query[part] = Isa::load(q + part * kStrip);
  for (int i = 0; i < kStrip; i++) {
    const E* row = rows[i];
    if (ahead && i >= share.first && i < share.last) fetch(ahead + i * dim, dim);
    F<Isa> sum = Isa::set(0);
    if constexpr (kParts > 0)
      for (int part = 0; part < kParts; part++) sum = Isa::fma(numbers<Isa>(row + part * kStrip), query[part], sum);
    else
      for (int64_t d = 0; d < dim; d += kStrip) sum = Isa::fma(numbers<Isa>(row + d), Isa::load(q + d), sum);
    all[i] = sum;
  }
  return Isa::sums(all);
}

// Scores from `at` on of up to 16 keys in `rows`; writes a whole strip.
template <class Isa, class E>
void score_rows(const Attention& a, const Query* queries, int count, const E* rows, int64_t num_rows, const E* ahead,
                int64_t at) {
  const int64_t dim = a.padded_dim();
  const E* places[kStrip];
  for (int i = 0; i < kStrip; i++) places[i] = rows + least(i, num_rows - 1) * dim;
  for (int i = 0; i < count; i++) {
    const float* q = queries[i].q;
    const PrefetchRange share = {kStrip * i / count, kStrip * (i + 1) / count};
    const F<Isa> scores = dim == 64    ? score<Isa, 4>(q, places, dim, ahead, share)
                          : dim == 128 ? score<Isa, 8>(q, places, dim, ahead, share)
                                       : score<Isa, 0>(q, places, dim, ahead, share);
    Isa::store(queries[i].scores + at, capped<Isa>(a, scores));
  }
}

// Transposes [16 keys][padded_dim] to [padded_dim][16 keys], and prefetches the next 16 keys from `ahead` on. Used from
// `kTurnFrom` queries on; 0: never.
template <class Isa, class E>
void turn(const E* rows, int64_t count, int64_t dim, float* turned, const E* ahead) {
  for (int64_t d = 0; d < dim; d += kStrip) {
    F<Isa> block[kStrip];
    for (int64_t i = 0; i < kStrip; i++) block[i] = numbers<Isa>(rows + least(i, count - 1) * dim + d);
    for (int64_t i = kStrip * d / dim; ahead && i < kStrip * (d + kStrip) / dim; i++) fetch(ahead + i * dim, dim);
    Isa::store_transposed(block, turned + d * kStrip);
  }
}

// The sums of `score` for R registers of turned keys, of the processor's own vectors: compilers keep arrays of others in
// memory. `kStep`: sums[q][i] is that of lanes `lane`, `lane` + kStep, ... in the order of `Isa::sum`.
template <class Isa, int Q, int R, int kParts, int kStep>
EDGELLM_INLINE void sum_lanes(const Query* queries, const float* turned, int64_t dim, int lane,
                              typename Isa::Floats (&sums)[Q][R]) {
  using Floats = typename Isa::Floats;
  if constexpr (kStep < kStrip) {
    Floats others[Q][R];
    sum_lanes<Isa, Q, R, kParts, 2 * kStep>(queries, turned, dim, lane, sums);
    sum_lanes<Isa, Q, R, kParts, 2 * kStep>(queries, turned, dim, lane + kStep, others);
#pragma GCC unroll 16
    for (int q = 0; q < Q; q++)
#pragma GCC unroll 16
      for (int i = 0; i < R; i++) sums[q][i] += others[q][i];
  } else {
    for (auto& some : sums)
      for (Floats& one : some) one = Floats{};
    const int64_t end = kParts ? kParts * kStrip : dim;
#pragma GCC unroll 8
    for (int64_t d = lane; d < end; d += kStrip) {
      Floats keys[R];
#pragma GCC unroll 16
      for (int i = 0; i < R; i++) {
        const int64_t key = i * Isa::kLanes;
        keys[i] = Isa::template read<Floats>(turned + key / kStrip * kStrip * end + d * kStrip + key % kStrip);
      }
#pragma GCC unroll 16
      for (int q = 0; q < Q; q++) {
        const Floats value = queries[q].q[d] - Floats{};
#pragma GCC unroll 16
        for (int i = 0; i < R; i++) sums[q][i] = Isa::fma(keys[i], value, sums[q][i]);
      }
    }
  }
}

template <class Isa, int Q, int R, int kParts>
void score_turned(const Query* queries, const float* turned, int64_t dim, int64_t at) {
  typename Isa::Floats sums[4][Q][R];
#pragma GCC unroll 1  // all lanes unrolled would be more than caches of instructions hold
  for (int lane = 0; lane < 4; lane++)
    sum_lanes<Isa, Q, R, kParts, 4>(queries, turned, dim, lane, sums[lane]);
#pragma GCC unroll 16
  for (int q = 0; q < Q; q++)
#pragma GCC unroll 16
    for (int i = 0; i < R; i++) {
      const auto even = sums[0][q][i] + sums[2][q][i], odd = sums[1][q][i] + sums[3][q][i];
      Isa::write(queries[q].scores + at + i * Isa::kLanes, even + odd);
    }
}

// Scores from `at` on of R registers of turned keys, floats or pairs.
template <class Isa, int Q, int R, class T>
void score_some(const Query* queries, int count, const T* keys, int64_t dim, int64_t at) {
  if (count != Q) {
    if constexpr (Q > 1) score_some<Isa, Q - 1, R>(queries, count, keys, dim, at);
  } else if constexpr (std::is_same_v<T, int32_t>) {
    score_pairs<Isa, Q, R>(queries, keys, dim, at);
  } else {
    switch (dim) {
      case 64:
        return score_turned<Isa, Q, R, 4>(queries, keys, dim, at);
      case 128:
        return score_turned<Isa, Q, R, 8>(queries, keys, dim, at);
      default:
        return score_turned<Isa, Q, R, 0>(queries, keys, dim, at);
    }
  }
}

// Scores of keys [at, end) of a chunk, whole strips in `turned`. kQ queries share a read of R registers.
template <class Isa, int kQ, int R, class T>
void score_all_turned(const Attention& a, const Query* queries, int all, const T* turned, int64_t at, int64_t end) {
  constexpr int kOfStrip = R < Isa::kParts ? R : Isa::kParts, kKeys = R * Isa::kLanes;
  const int tiles = (all + kQ - 1) / kQ;
  const int64_t begin = at, dim = a.padded_dim(), width = std::is_same_v<T, int32_t> ? dim / 2 : dim;
  const auto keys = [&](int64_t key) {
    return turned + (key - begin) / kStrip * kStrip * width + (key - begin) % kStrip;
  };
  for (; at < end; at += kKeys)
    for (int tile = 0; tile < tiles; tile++) {
      const int first = all * tile / tiles, some = all * (tile + 1) / tiles - first;
      if (at + kKeys <= end)
        score_some<Isa, kQ, R>(queries + first, some, keys(at), dim, at);
      else
        for (int64_t rest = at; rest < end; rest += kOfStrip * Isa::kLanes)
          score_some<Isa, kQ, kOfStrip>(queries + first, some, keys(rest), dim, rest);
    }
  for (int i = 0; a.rules.softcap > 0 && i < all; i++)
    for (float* s = queries[i].scores + begin; s < queries[i].scores + end; s += kStrip)
      Isa::store(s, capped<Isa>(a, Isa::load(s)));
}

// Keys and values of slots that lie straight, of one chunk, for all rows that are computed together.
template <class Isa, class E>
struct Chunk {
  int64_t base, first, count;  // slots [first, count) of the chunk are read; `first` begins a strip
  Slots<Isa, E> keys, values;
  float* turned;  // [strips, padded_dim, 16], or nullptr; of rows with 4 bits see `turn_int4`, of bfloat16 `turn_pairs`
  int32_t* pairs = nullptr;  // of bfloat16: values of keys 2i and 2i + 1, [i, padded_dim]; nullptr for few queries
  static constexpr bool is_int4 = std::is_same_v<E, Int4>, is_bfloat = std::is_same_v<E, BFloat16>;

  // Slots of [begin, end). `work`: [3, kChunk, padded_dim].
  Chunk(const Attention& a, int64_t kv_head, int64_t index, int64_t begin, int64_t end, int64_t queries, float* work)
      : base(index * kChunk),
        first(most(0, begin - base) / kStrip * kStrip),
        count(most(0, least(end - base, kChunk))),
        keys(a, a.cache.keys, kv_head, base, first, count, work),
        values(a, a.cache.values, kv_head, base, first, count, work + kChunk * a.padded_dim()) {
    const int64_t dim = a.padded_dim();
    if constexpr (is_int4) {
      turned = work;
      for (int64_t key = first; key < count; key += kStrip)
        turn_int4<Isa>(keys.row(key), count - key, dim, strip(key), keys.row(key + kStrip));
    } else if constexpr (is_bfloat) {
      turned = work;
      if (queries <= kFewQueries) return;
      pairs = reinterpret_cast<int32_t*>(work + kChunk * dim);
      for (int64_t key = first; key < count; key += kStrip) {
        turn_strip(key, turned_pairs(key));
        pair_strip(key, key + kStrip, pairs + key / 2 * dim);
      }
    } else {
      turned = Isa::kTurnFrom > 0 && queries >= Isa::kTurnFrom ? work + 2 * kChunk * dim : nullptr;
      if constexpr (Isa::kTurnFrom > 0)
        for (int64_t key = first; turned && key < count; key += kStrip)
          turn<Isa>(keys.row(key), count - key, dim, turned + key * dim, keys.row(key + kStrip));
    }
  }

  // Adds the values of keys [from, to) in bfloat16.
  void add_pairs(const Query* queries, int all, int64_t from, int64_t to) const {
    if (pairs) return add_pair_values<Isa>(queries, all, pairs + from / 2 * keys.dim, keys.dim, from, to);
    alignas(64) int32_t strip_pairs[kStrip / 2 * kMostDim];
    for (int64_t key = from, end; key < to; key = end) {
      end = least(to, (key / kStrip + 1) * kStrip);
      pair_strip(key - key % 2, end, strip_pairs);
      add_pair_values<Isa>(queries, all, strip_pairs, keys.dim, key, end);
    }
  }

  // Of keys [from, to), and of the others in their strips.
  void score_keys(const Attention& a, const Query* queries, int all, int64_t from, int64_t to) const {
    int64_t at = (from - base) / kStrip * kStrip;
    if (from >= to) return;
    if constexpr (is_int4) {
      for (; at < to - base; at += kStrip) score_int4<Isa>(a, queries, all, strip(at), at);
    } else if constexpr (is_bfloat) {
      const int64_t together = pairs ? kChunk : most(kStrip, Isa::kPairRegisters * Isa::kLanes);
      for (const int64_t end = strips_end(to); at < end; at += together) {
        const int64_t stop = least(end, at + together);
        for (int64_t key = at; !pairs && key < stop; key += kStrip) turn_strip(key, turned_pairs(key - at));
        score_all_turned<Isa, Isa::kPairQueries, Isa::kPairRegisters>(a, queries, all, turned_pairs(pairs ? at : 0), at,
                                                                      stop);
      }
    } else {
      for (; !turned && at < to - base; at += kStrip)
        score_rows<Isa, E>(a, queries, all, keys.row(at), to - base - at, keys.row(at + kStrip), at);
      if constexpr (Isa::kTurnFrom > 0)
        if (turned)
          score_all_turned<Isa, Isa::kScoreQueries, Isa::kScoreRegisters>(a, queries, all, turned + at * keys.dim, at,
                                                                          strips_end(to));
    }
  }

 private:
  float* strip(int64_t key) const { return turned + key / kStrip * int4_strip_floats(keys.dim); }
  int32_t* turned_pairs(int64_t key) const { return reinterpret_cast<int32_t*>(turned) + key * keys.dim / 2; }
  void turn_strip(int64_t key, int32_t* out) const {
    turn_pairs<Isa>(keys.row(key), count - key, keys.stride, keys.dim, out, ahead(key, keys, &values));
  }
  // Of keys from the even `key` to `end` in a strip.
  void pair_strip(int64_t key, int64_t end, int32_t* out) const {
    const int64_t some = least(end, count) - key, size = values.stride;
    const BFloat16 *rows = values.row(key), *next = ahead(key, values);
    for (int64_t i = 0; i < some; i += 2, rows += 2 * size, out += values.dim) {
      const bool is_whole = key + i + 1 < count;
      pair_rows<Isa>(rows, is_whole ? rows + size : nullptr, size, values.dim, out, next ? next + i * size : nullptr);
    }
  }
  // What is read two strips later, where `others` follow these rows; nullptr: it is not known.
  const BFloat16* ahead(int64_t key, const Slots<Isa, E>& rows, const Slots<Isa, E>* others = nullptr) const {
    const int64_t later = key + 2 * kStrip, end = strips_end(base + count);
    return later < end ? rows.row(later) : others ? others->row(first + later - end) : nullptr;
  }
  int64_t strips_end(int64_t to) const { return (to - base + kStrip - 1) / kStrip * kStrip; }
};

}  // namespace
}  // namespace edgellm

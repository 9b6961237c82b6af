// Scores of queries with the keys of a chunk.
#pragma once

#include "kernels.h"
#include "kv_cache.h"
#include "vector_math.h"

namespace edgellm {
namespace {

struct Query {
  int64_t row, first, end, straight;  // the keys [first, end) of a chunk; slots are keys below `straight`
  const float* q;
  float* values;  // [padded_dim]
  float top, total;
  float* scores;  // [kChunk], of the chunk's keys
};

template <class Isa>
F<Isa> capped(const Attention& a, F<Isa> scores) {
  if (a.rules.softcap <= 0) return scores;
  return Isa::mul(tanh<Isa>(Isa::div(scores, Isa::set(a.rules.softcap))), Isa::set(a.rules.softcap));
}

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

// Transposes [16 keys][padded_dim] to [padded_dim][16 keys], by four perfect shuffles of each 16 x 16 block. Used from
// `kTurnFrom` queries on; 0: never.
template <class Isa, class E>
void turn(const E* rows, int64_t count, int64_t dim, float* turned) {
  for (int64_t d = 0; d < dim; d += kStrip) {
    F<Isa> now[kStrip], next[kStrip];
    for (int i = 0; i < kStrip; i++) now[i] = numbers<Isa>(rows + least(i, count - 1) * dim + d);
    for (int step = 0; step < 4; step++) {
      for (int i = 0; i < kStrip / 2; i++) Isa::zip(now[i], now[i + kStrip / 2], next[2 * i], next[2 * i + 1]);
      for (int i = 0; i < kStrip; i++) now[i] = next[i];
    }
    for (int i = 0; i < kStrip; i++) Isa::store(turned + (d + i) * kStrip, now[i]);
  }
}

// The sums of `score` for S strips of turned keys. `kStep`: sums[q][s] is that of lanes `lane`,
// `lane` + kStep, ... in the order of `Isa::sum`.
template <class Isa, int Q, int S, int kParts, int kStep>
EDGELLM_INLINE void sum_lanes(const Query* queries, const float* turned, int64_t dim, int lane, F<Isa> (&sums)[Q][S]) {
  if constexpr (kStep < kStrip) {
    F<Isa> others[Q][S];
    sum_lanes<Isa, Q, S, kParts, 2 * kStep>(queries, turned, dim, lane, sums);
    sum_lanes<Isa, Q, S, kParts, 2 * kStep>(queries, turned, dim, lane + kStep, others);
    for (int q = 0; q < Q; q++)
      for (int s = 0; s < S; s++) sums[q][s] = Isa::add(sums[q][s], others[q][s]);
  } else {
    for (auto& some : sums)
      for (F<Isa>& one : some) one = Isa::set(0);
    const int64_t end = kParts ? kParts * kStrip : dim;
#pragma GCC unroll 8
    for (int64_t d = lane; d < end; d += kStrip) {
      F<Isa> keys[S];
      for (int s = 0; s < S; s++) keys[s] = Isa::load(turned + (s * end + d) * kStrip);
      for (int q = 0; q < Q; q++)
        for (int s = 0; s < S; s++) sums[q][s] = Isa::fma(keys[s], Isa::set(queries[q].q[d]), sums[q][s]);
    }
  }
}

template <class Isa, int Q, int S, int kParts>
void score_turned(const Attention& a, const Query* queries, const float* turned, int64_t at) {
  F<Isa> sums[4][Q][S];
#pragma GCC unroll 1  // all lanes unrolled would be more than caches of instructions hold
  for (int lane = 0; lane < 4; lane++)
    sum_lanes<Isa, Q, S, kParts, 4>(queries, turned, a.padded_dim(), lane, sums[lane]);
  for (int q = 0; q < Q; q++)
    for (int s = 0; s < S; s++) {
      const F<Isa> even = Isa::add(sums[0][q][s], sums[2][q][s]), odd = Isa::add(sums[1][q][s], sums[3][q][s]);
      Isa::store(queries[q].scores + at + s * kStrip, capped<Isa>(a, Isa::add(even, odd)));
    }
}

template <class Isa, int Q, int S>
void score_some(const Attention& a, const Query* queries, int count, const float* turned, int64_t at) {
  if (count == Q) switch (a.padded_dim()) {
      case 64:
        return score_turned<Isa, Q, S, 4>(a, queries, turned, at);
      case 128:
        return score_turned<Isa, Q, S, 8>(a, queries, turned, at);
      default:
        return score_turned<Isa, Q, S, 0>(a, queries, turned, at);
    }
  else if constexpr (Q > 1)
    score_some<Isa, Q - 1, S>(a, queries, count, turned, at);
}

// Keys and values of slots that lie straight, of one chunk, for all rows that are computed together.
template <class Isa, class E>
struct Chunk {
  int64_t base, first, count;  // slots [first, count) of the chunk are read; `first` begins a strip
  Slots<Isa, E> keys, values;
  float* turned;  // [strips, padded_dim, 16], or nullptr

  // Slots of [begin, end). `work`: [3, kChunk, padded_dim].
  Chunk(const Attention& a, int64_t kv_head, int64_t index, int64_t begin, int64_t end, int64_t queries, float* work)
      : base(index * kChunk),
        first(most(0, begin - base) / kStrip * kStrip),
        count(most(0, least(end - base, kChunk))),
        keys(a, a.cache.keys, kv_head, base, first, count, work),
        values(a, a.cache.values, kv_head, base, first, count, work + kChunk * a.padded_dim()) {
    const int64_t dim = a.padded_dim();
    turned = Isa::kTurnFrom > 0 && queries >= Isa::kTurnFrom ? work + 2 * kChunk * dim : nullptr;
    if constexpr (Isa::kTurnFrom > 0)
      for (int64_t key = first; turned && key < count; key += kStrip)
        turn<Isa>(keys.row(key), count - key, dim, turned + key * dim);
  }

  // Of keys [from, to), and of those beside them in their strips.
  void score_keys(const Attention& a, const Query* queries, int all, int64_t from, int64_t to) const {
    const int64_t dim = a.padded_dim();
    int64_t at = (from - base) / kStrip * kStrip;
    if (from >= to) return;
    for (; !turned && at < to - base; at += kStrip)
      score_rows<Isa, E>(a, queries, all, keys.row(at), to - base - at, keys.row(at + kStrip), at);
    if (!turned) return;
    if constexpr (Isa::kTurnFrom > 0) {
      const int tiles = (all + Isa::kQueries - 1) / Isa::kQueries;
      for (; at < to - base; at += 2 * kStrip)
        for (int tile = 0; tile < tiles; tile++) {
          const int first = all * tile / tiles, some = all * (tile + 1) / tiles - first;
          if (at + kStrip < count)
            score_some<Isa, Isa::kQueries, 2>(a, queries + first, some, turned + at * dim, at);
          else
            score_some<Isa, Isa::kQueries, 1>(a, queries + first, some, turned + at * dim, at);
        }
    }
  }
};

}  // namespace
}  // namespace edgellm

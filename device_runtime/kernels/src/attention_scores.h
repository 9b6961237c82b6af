// Scores of queries with the keys of a chunk. Included by `instruction_set.h` with `Set`.
#pragma once

#include "kv_cache.h"

namespace edgellm {
namespace {

struct Query {
  int64_t row, first, end, straight;  // the keys [first, end) of a chunk; slots are keys below `straight`
  const float* q;
  float* values;  // [padded_dim]
  float top, total;
  float* scores;  // [kChunk], of the chunk's keys
};

F capped(const Attention& a, F scores) {
  if (a.softcap <= 0) return scores;
  return Set::mul(tanh(Set::div(scores, Set::set(a.softcap))), Set::set(a.softcap));
}

// Scores of 16 keys; each is summed in 16 lanes along the head, then over the lanes. `kParts`: of
// the head, in lanes; 0 if it is known only at run time. `ahead`: 16 keys of which it fetches a share.
template <int kParts, class E>
F score(const float* q, const E* const* rows, int64_t dim, const E* ahead, Share share) {
  constexpr int kHeld = kParts ? kParts : 1;
  F query[kHeld], all[kStrip];
  for (int part = 0; part < kParts; part++) query[part] = Set::load(q + part * kStrip);
  for (int i = 0; i < kStrip; i++) {
    const E* row = rows[i];
    if (ahead && i >= share.first && i < share.last) fetch(ahead + i * dim, dim);
    F sum = Set::set(0);
    if constexpr (kParts > 0)
      for (int part = 0; part < kParts; part++) sum = Set::fma(numbers(row + part * kStrip), query[part], sum);
    else
      for (int64_t d = 0; d < dim; d += kStrip) sum = Set::fma(numbers(row + d), Set::load(q + d), sum);
    all[i] = sum;
  }
  return Set::sums(all);
}

// Scores from `at` on of up to 16 keys in `rows`; writes a whole strip.
template <class E>
void score_rows(const Attention& a, const Query* queries, int count, const E* rows, int64_t num_rows, const E* ahead,
                int64_t at) {
  const int64_t dim = a.padded_dim();
  const E* places[kStrip];
  for (int i = 0; i < kStrip; i++) places[i] = rows + least(i, num_rows - 1) * dim;
  for (int i = 0; i < count; i++) {
    const float* q = queries[i].q;
    const Share share = {kStrip * i / count, kStrip * (i + 1) / count};
    const F scores = dim == 64    ? score<4>(q, places, dim, ahead, share)
                     : dim == 128 ? score<8>(q, places, dim, ahead, share)
                                  : score<0>(q, places, dim, ahead, share);
    Set::store(queries[i].scores + at, capped(a, scores));
  }
}

// For sets of which `kTurnFrom` queries pay for it: [16 keys][padded_dim] -> [padded_dim][16 keys];
// four times the halves of a pack of cards.
template <class S = Set, class E>
void turn(const E* rows, int64_t count, int64_t dim, float* turned) {
  for (int64_t d = 0; d < dim; d += kStrip) {
    F now[kStrip], next[kStrip];
    for (int i = 0; i < kStrip; i++) now[i] = numbers(rows + least(i, count - 1) * dim + d);
    for (int step = 0; step < 4; step++) {
      for (int i = 0; i < kStrip / 2; i++) S::zip(now[i], now[i + kStrip / 2], next[2 * i], next[2 * i + 1]);
      for (int i = 0; i < kStrip; i++) now[i] = next[i];
    }
    for (int i = 0; i < kStrip; i++) Set::store(turned + (d + i) * kStrip, now[i]);
  }
}

// The sums of `score` for S strips of turned keys. `kStep`: sums[q][s] is that of lanes `lane`,
// `lane` + kStep, ... in the order of `Set::sum`.
template <int Q, int S, int kParts, int kStep>
inline __attribute__((always_inline)) void sum_lanes(const Query* queries, const float* turned, int64_t dim, int lane,
                                                     F (&sums)[Q][S]) {
  if constexpr (kStep < kStrip) {
    F others[Q][S];
    sum_lanes<Q, S, kParts, 2 * kStep>(queries, turned, dim, lane, sums);
    sum_lanes<Q, S, kParts, 2 * kStep>(queries, turned, dim, lane + kStep, others);
    for (int q = 0; q < Q; q++)
      for (int s = 0; s < S; s++) sums[q][s] = Set::add(sums[q][s], others[q][s]);
  } else {
    for (auto& some : sums)
      for (F& one : some) one = Set::set(0);
    const int64_t end = kParts ? kParts * kStrip : dim;
#pragma GCC unroll 8
    for (int64_t d = lane; d < end; d += kStrip) {
      F keys[S];
      for (int s = 0; s < S; s++) keys[s] = Set::load(turned + (s * end + d) * kStrip);
      for (int q = 0; q < Q; q++)
        for (int s = 0; s < S; s++) sums[q][s] = Set::fma(keys[s], Set::set(queries[q].q[d]), sums[q][s]);
    }
  }
}

template <int Q, int S, int kParts>
void score_turned(const Attention& a, const Query* queries, const float* turned, int64_t at) {
  F sums[4][Q][S];
#pragma GCC unroll 1  // all lanes unrolled would be more than caches of instructions hold
  for (int lane = 0; lane < 4; lane++) sum_lanes<Q, S, kParts, 4>(queries, turned, a.padded_dim(), lane, sums[lane]);
  for (int q = 0; q < Q; q++)
    for (int s = 0; s < S; s++) {
      const F even = Set::add(sums[0][q][s], sums[2][q][s]), odd = Set::add(sums[1][q][s], sums[3][q][s]);
      Set::store(queries[q].scores + at + s * kStrip, capped(a, Set::add(even, odd)));
    }
}

template <int Q, int S>
void score_some(const Attention& a, const Query* queries, int count, const float* turned, int64_t at) {
  if (count == Q) switch (a.padded_dim()) {
      case 64:
        return score_turned<Q, S, 4>(a, queries, turned, at);
      case 128:
        return score_turned<Q, S, 8>(a, queries, turned, at);
      default:
        return score_turned<Q, S, 0>(a, queries, turned, at);
    }
  else if constexpr (Q > 1)
    score_some<Q - 1, S>(a, queries, count, turned, at);
}

// Keys and values of slots that lie straight, of one chunk, for all rows that are computed together.
template <class E>
struct Chunk {
  int64_t base, first, count;  // slots [first, count) of the chunk are read; `first` begins a strip
  Slots<E> keys, values;
  float* turned;  // [strips, padded_dim, 16], or nullptr

  // Slots of [begin, end). `work`: [3, kChunk, padded_dim].
  Chunk(const Attention& a, int64_t kv_head, int64_t index, int64_t begin, int64_t end, int64_t queries, float* work)
      : base(index * kChunk),
        first(most(0, begin - base) / kStrip * kStrip),
        count(most(0, least(end - base, kChunk))),
        keys(a, a.keys, kv_head, base, first, count, work),
        values(a, a.values, kv_head, base, first, count, work + kChunk * a.padded_dim()) {
    const int64_t dim = a.padded_dim();
    turned = Set::kTurnFrom > 0 && queries >= Set::kTurnFrom ? work + 2 * kChunk * dim : nullptr;
    if constexpr (Set::kTurnFrom > 0)
      for (int64_t key = first; turned && key < count; key += kStrip)
        turn(keys.row(key), count - key, dim, turned + key * dim);
  }

  // Of keys [from, to), and of those beside them in their strips.
  void score(const Attention& a, const Query* queries, int all, int64_t from, int64_t to) const {
    const int64_t dim = a.padded_dim();
    int64_t at = (from - base) / kStrip * kStrip;
    if (from >= to) return;
    for (; !turned && at < to - base; at += kStrip)
      score_rows<E>(a, queries, all, keys.row(at), to - base - at, keys.row(at + kStrip), at);
    if (!turned) return;
    if constexpr (Set::kTurnFrom > 0) {
      const int tiles = (all + Set::kQueries - 1) / Set::kQueries;
      for (; at < to - base; at += 2 * kStrip)
        for (int tile = 0; tile < tiles; tile++) {
          const int first = all * tile / tiles, some = all * (tile + 1) / tiles - first;
          if (at + kStrip < count)
            score_some<Set::kQueries, 2>(a, queries + first, some, turned + at * dim, at);
          else
            score_some<Set::kQueries, 1>(a, queries + first, some, turned + at * dim, at);
        }
    }
  }
};

}  // namespace
}  // namespace edgellm

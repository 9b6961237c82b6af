// Attention over a cache that is written in place.
//
// A row's keys are indexed in attention order: in a tree its ancestors have the indices that they
// would have without siblings. Softmax and values are summed by chunks of `kChunk` such keys from
// 0, and the chunks in order, independent of threads.
#pragma once

#include "attention_scores.h"
#include "kernels.h"
#include "kv_cache.h"
#include "vector_math.h"

namespace edgellm {
namespace {

// Scores become weights, exponentials below the largest: floats, or bfloat16 that begins where the scores begin. Those
// outside of the query's keys are zero in whole strips. The sum of floats has lanes by place in the chunk.
template <class Isa, class E>
void weigh(Query& query, int64_t base) {
  const int64_t first = query.first - base, end = query.end - base;
  const int64_t begin = first / kStrip * kStrip, stop = (end + kStrip - 1) / kStrip * kStrip;
  float* s = query.scores;
  F<Isa> largest = Isa::set(kNothing), total = Isa::set(0);
  for (int64_t i = begin; i < first; i++) s[i] = kNothing;
  for (int64_t i = end; i < stop; i++) s[i] = kNothing;
  for (int64_t i = begin; i < stop; i += kStrip) largest = Isa::max(largest, Isa::load(s + i));
  query.top = Isa::largest(largest);
  for (int64_t i = begin; i < stop; i += kStrip) {
    F<Isa> weights = exp<Isa>(Isa::sub(Isa::load(s + i), Isa::set(query.top)));
    if (i < first || i + kStrip > end) {
      Isa::store(s + i, weights);
      for (int64_t key = i; key < first; key++) s[key] = 0;
      for (int64_t key = end; key < i + kStrip; key++) s[key] = 0;
      weights = Isa::load(s + i);
    }
    total = Isa::add(total, weights);
    if constexpr (std::is_same_v<E, BFloat16>)
      Isa::store_bfloat(reinterpret_cast<uint16_t*>(s) + i, weights);
    else
      Isa::store(s + i, weights);
  }
  query.total = Isa::sum(total);
}

// -------------------------------------------------------------------------------------- values
constexpr int64_t kTogether = 32;  // keys whose values stay near while all queries take them
constexpr const uint16_t* kNoHalves = nullptr;

// Adds V strips of keys' values, weighted for Q queries. Registers are of the processor's own vectors: compilers keep
// arrays of others in memory.
template <class Isa, int Q, int V, class E>
void add_tile(const Query* queries, const E* rows, int64_t dim, int64_t at, int64_t count, int64_t d, const E* ahead) {
  using Floats = typename Isa::Floats;
  constexpr int kRegisters = V * Isa::kParts;
  Floats sums[Q][kRegisters];
#pragma GCC unroll 8
  for (int q = 0; q < Q; q++)
#pragma GCC unroll 32
    for (int i = 0; i < kRegisters; i++)
      sums[q][i] = Isa::template read<Floats>(queries[q].values + d + i * Isa::kLanes);
  for (int64_t key = 0; key < count; key++) {
    Floats part[kRegisters];
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) {
      const F<Isa> strip = numbers<Isa>(rows + key * dim + d + v * kStrip);
      Isa::for_each([&](int i) { part[v * Isa::kParts + i] = Isa::part(strip, i); });
      if (ahead) __builtin_prefetch(ahead + key * dim + d + v * kStrip);
    }
#pragma GCC unroll 8
    for (int q = 0; q < Q; q++) {
      const Floats weight = queries[q].scores[at + key] - Floats{};
#pragma GCC unroll 32
      for (int i = 0; i < kRegisters; i++) sums[q][i] = Isa::fma(part[i], weight, sums[q][i]);
    }
  }
#pragma GCC unroll 8
  for (int q = 0; q < Q; q++)
#pragma GCC unroll 32
    for (int i = 0; i < kRegisters; i++) Isa::write(queries[q].values + d + i * Isa::kLanes, sums[q][i]);
}

template <class Isa, int Q, class E>
void add_some(const Query* queries, int num_queries, const E* rows, int64_t at, int64_t count, int64_t dim,
              const E* ahead) {
  if (num_queries == Q) {
    constexpr int kStrips = int(least(4, most(1, Isa::kValueTile / Q)));  // fewer queries leave registers for more
    int64_t d = 0;
    for (; d + kStrips * kStrip <= dim; d += kStrips * kStrip)
      add_tile<Isa, Q, kStrips>(queries, rows, dim, at, count, d, ahead);
    for (; d < dim; d += kStrip) add_tile<Isa, Q, 1>(queries, rows, dim, at, count, d, ahead);
  } else if constexpr (Q > 1) {
    add_some<Isa, Q - 1>(queries, num_queries, rows, at, count, dim, ahead);
  }
}

// Adds the values of up to 32 keys, one after the other; their scores stand from `at` on. `kValueQueries` queries share
// a read of values.
template <class Isa, class E>
void add_values(const Query* queries, int all, const E* rows, int64_t at, int64_t count, int64_t dim,
                const E* ahead = nullptr) {
  const int tiles = (all + Isa::kValueQueries - 1) / Isa::kValueQueries;
  for (int tile = 0; tile < tiles; tile++) {
    const int first = all * tile / tiles, some = all * (tile + 1) / tiles - first;
    add_some<Isa, Isa::kValueQueries>(queries + first, some, rows, at, count, dim, tiles == 1 ? ahead : nullptr);
  }
}

// Those of slots [from, to) of a chunk.
template <class Isa, class E>
void add_slots(const Query* queries, int all, const Slots<Isa, E>& values, int64_t from, int64_t to) {
  for (int64_t count; from < to; from += count) {
    count = least(kTogether, values.together(from, to));
    add_values<Isa>(queries, all, values.row(from), from, count, values.dim, values.row(from + count));
  }
}

// The first key of a row's window, which ends at the row itself: keys after it are of the same image.
int64_t first_key(const Attention& a, int64_t row) {
  return a.rules.window ? most(0, a.scratch.seen[kSeen * row + 2] - a.rules.window) : 0;
}

// The first key that a row attends to in float16, of a cache of 4 bits.
int64_t first_recent(const Attention& a, int64_t row) {
  return most(0, a.scratch.seen[kSeen * row + 2] - kRecent);
}

// One chunk of keys for `rows` rows from `row` on, `group` heads of each from `head` on.
// What all rows see alike is read once.
template <class Isa>
struct Tile {
  Query queries[kMostQueries];
  int rows, group;
  alignas(64) float scores[kMostQueries][kChunk + 2 * kStrip];  // strips may start anywhere

  Tile(const Attention& a, int64_t row, int num_rows, int64_t head, int num_heads) : rows(num_rows), group(num_heads) {
    for (int i = 0; i < rows * group; i++) {
      const int64_t own = row + i / group;
      queries[i].row = own;
      queries[i].q = a.scratch.queries + (own * a.shape.heads + head + i % group) * a.query_floats();
      queries[i].scores = scores[i];
    }
  }

  template <class E>
  void run(const Attention& a, int64_t kv_head, const Chunk<Isa, E>& chunk) {
    const int64_t base = chunk.base;
    int64_t lowest = base + kChunk, highest = 0, last_first = 0, first_end = base + kChunk;
    bool is_shared = rows > 1;
    for (int i = 0; i < rows * group; i++) {
      Query& q = queries[i];
      const int64_t end = a.scratch.seen[kSeen * q.row];
      q.straight = a.scratch.seen[kSeen * q.row + 1];
      q.first = most(base, first_key(a, q.row));
      q.end = most(q.first, least(end, base + kChunk));
      q.top = kNothing;
      q.total = 0;
      __builtin_memset(q.values, 0, a.padded_dim() * sizeof(float));
      if (q.first == q.end) {
        is_shared = false;
        continue;
      }
      lowest = least(lowest, q.first);
      last_first = most(last_first, q.first);
      first_end = least(first_end, least(q.end, q.straight));
      if constexpr (std::is_same_v<E, Int4>) first_end = least(first_end, most(base, first_recent(a, q.row)));
      highest = most(highest, least(q.end, q.straight));
    }
    if constexpr (std::is_same_v<E, BFloat16>) {  // values are added in pairs
      last_first += last_first % 2;
      first_end -= first_end % 2;
    }
    is_shared = is_shared && last_first < first_end;
    // Masked keys of a row are scored too, and their scores are ignored.
    chunk.score_keys(a, queries, rows * group, lowest, highest);
    for (int r = 0; r < rows; r++) {
      Query* own = queries + r * group;
      score_slots<E>(a, kv_head, base, own);
      if (own->first < own->end)
        for (int i = 0; i < group; i++) weigh<Isa, E>(own[i], base);
      add_keys(a, kv_head, chunk, own, own->first, is_shared ? last_first : own->end);
    }
    if (!is_shared) return;
    if constexpr (std::is_same_v<E, BFloat16>)
      chunk.add_pairs(queries, rows * group, last_first - base, first_end - base);
    else
      add_slots<Isa>(queries, rows * group, chunk.values, last_first - base, first_end - base);
    for (int r = 0; r < rows; r++) add_keys(a, kv_head, chunk, queries + r * group, first_end, queries[r * group].end);
  }

 private:
  // Scores of keys that `Chunk` has not scored.
  template <class E>
  void score_slots(const Attention& a, int64_t kv_head, int64_t base, const Query* own) const {
    const int64_t first = most(own->first, own->straight);
    if constexpr (std::is_same_v<E, Int4>) {
      const int64_t recent = most(own->first, first_recent(a, own->row));
      score_seen<Int4>(a, a.cache.keys, kv_head, base, own, first, least(recent, own->end));
      each_recent(a, kv_head, a.cache.recent_keys, recent, least(own->end, own->straight), kStrip,
                  [&](const uint16_t* rows, int64_t key, int64_t count) {
                    score_rows<Isa>(a, own, group, rows, count, kNoHalves, key - base);
                  });
      score_seen<uint16_t>(a, a.cache.recent_keys, kv_head, base, own, most(first, recent), own->end);
    } else {
      using Seen = std::conditional_t<std::is_same_v<E, BFloat16>, E, float>;
      score_seen<Seen>(a, a.cache.keys, kv_head, base, own, first, own->end);
    }
  }

  // Of those that follow contiguous ones.
  template <class E>
  void score_seen(const Attention& a, const void* keys, int64_t kv_head, int64_t base, const Query* own, int64_t from,
                  int64_t to) const {
    alignas(64) E memory[kStrip * kMostDim];
    const E* const no_rows = nullptr;
    for (int64_t key = from; key < to; key += kStrip) {
      const int64_t count = least(kStrip, to - key);
      const E* rows = read_seen<Isa>(a, keys, kv_head, own->row, key, count, memory);
      if constexpr (std::is_same_v<E, Int4>) {
        alignas(64) float turned[int4_strip_floats(kMostDim)];
        turn_int4<Isa>(rows, count, a.padded_dim(), turned);
        score_int4<Isa>(a, own, group, turned, key - base);
      } else if constexpr (std::is_same_v<E, BFloat16>) {
        alignas(64) int32_t turned[kStrip * kMostDim / 2];
        turn_pairs<Isa>(rows, count, a.shape.head_dim, a.padded_dim(), turned);
        score_strip_of_pairs<Isa>(a, own, group, turned, key - base);
      } else {
        score_rows<Isa>(a, own, group, rows, count, no_rows, key - base);
      }
    }
  }

  // Calls function(rows, key, count) for contiguous rows of float16, at most `together`.
  template <class Function>
  static void each_recent(const Attention& a, int64_t kv_head, const uint16_t* cache, int64_t from, int64_t to,
                          int64_t together, Function function) {
    for (int64_t key = from, count; key < to; key += count) {
      count = least(least(together, to - key), a.cache.page_rows - key % a.cache.page_rows);
      function(cache + a.recent_place(kv_head, key), key, count);
    }
  }

  template <class E>
  void add_keys(const Attention& a, int64_t kv_head, const Chunk<Isa, E>& chunk, const Query* own, int64_t from,
                int64_t to) const {
    if constexpr (std::is_same_v<E, Int4>) {
      const int64_t recent = least(to, most(from, first_recent(a, own->row)));
      add_own(a, kv_head, chunk, own, from, recent);
      add_recent(a, kv_head, chunk.base, own, recent, to);
    } else if constexpr (std::is_same_v<E, BFloat16>) {
      add_own_pairs(a, kv_head, chunk, own, from, to);
    } else {
      add_own(a, kv_head, chunk, own, from, to);
    }
  }

  void add_recent(const Attention& a, int64_t kv_head, int64_t base, const Query* own, int64_t from, int64_t to) const {
    alignas(64) uint16_t memory[kStrip * kMostDim];
    const int64_t dim = a.padded_dim();
    each_recent(a, kv_head, a.cache.recent_values, from, least(to, own->straight), kTogether,
                [&](const uint16_t* rows, int64_t key, int64_t count) {
                  add_values<Isa>(own, group, rows, key - base, count, dim);
                });
    for (int64_t key = most(from, own->straight); key < to; key += kStrip) {
      const int64_t count = least(kStrip, to - key);
      add_values<Isa>(own, group,
                      read_seen<Isa>(a, a.cache.recent_values, kv_head, own->row, key, count, memory), key - base,
                      count, dim);
    }
  }

  // Pairs are those of the keys' indices, so one may be partly of contiguous keys.
  void add_own_pairs(const Attention& a, int64_t kv_head, const Chunk<Isa, BFloat16>& chunk, const Query* own,
                     int64_t from, int64_t to) const {
    alignas(64) BFloat16 memory[kStrip * kMostDim];
    alignas(64) int32_t pairs[kStrip / 2 * kMostDim];
    const int64_t base = chunk.base, dim = a.padded_dim(), size = a.shape.head_dim;
    const int64_t straight = to <= own->straight ? to : own->straight - own->straight % 2;
    chunk.add_pairs(own, group, from - base, straight - base);
    for (int64_t key = most(from, straight), count; key < to; key += count) {
      const int64_t odd = key % 2;  // then its pair is not whole
      count = least(kStrip - odd, to - key);
      __builtin_memset(memory, 0, kStrip * size * sizeof(BFloat16));
      read_seen<Isa>(a, a.cache.values, kv_head, own->row, key, count, memory + odd * size);
      for (int64_t i = 0; i < odd + count; i += 2)
        pair_rows<Isa>(memory + i * size, memory + (i + 1) * size, size, dim, pairs + i / 2 * dim);
      add_pair_values<Isa>(own, group, pairs, dim, key - base, key + count - base);
    }
  }

  template <class E>
  void add_own(const Attention& a, int64_t kv_head, const Chunk<Isa, E>& chunk, const Query* own, int64_t from,
               int64_t to) const {
    alignas(64) std::conditional_t<std::is_same_v<E, Int4>, Int4, float> memory[kStrip * kMostDim];
    const int64_t base = chunk.base, dim = a.padded_dim(), straight = least(to, own->straight);
    add_slots<Isa>(own, group, chunk.values, from - base, straight - base);
    for (int64_t key = most(from, own->straight); key < to; key += kStrip) {
      const int64_t count = least(kStrip, to - key);
      add_values<Isa>(own, group, read_seen<Isa>(a, a.cache.values, kv_head, own->row, key, count, memory), key - base,
                      count, dim);
    }
  }
};

// ------------------------------------------------------------------------------ chunks in order
// A sum over chunks as `partials` hold it: largest score, sum of exponentials, from `kStrip` on values.
void begin_sum(const Attention& a, int64_t head, float* sum) {
  __builtin_memset(sum, 0, a.partial_floats() * sizeof(float));
  sum[0] = a.inputs.sinks ? a.inputs.sinks[head] : kNothing;
  sum[1] = a.inputs.sinks ? 1 : 0;
}

template <class Isa>
void add_chunk(int64_t dim, float* sum, float top, float total, const float* values) {
  if (total == 0) return;
  const float above = sum[0] > top ? sum[0] : top;
  const float keeps = above == sum[0] ? 1 : exp<Isa>(sum[0] - above), takes = above == top ? 1 : exp<Isa>(top - above);
  sum[0] = above;
  sum[1] = sum[1] * keeps + total * takes;
  for (float* out = sum + kStrip; out < sum + kStrip + dim; out += kStrip, values += kStrip)
    Isa::store(out, Isa::fma(Isa::load(values), Isa::set(takes), Isa::mul(Isa::load(out), Isa::set(keeps))));
}

void finish_sum(const Attention& a, int64_t row, int64_t head, const float* sum) {
  float* y = a.y + (row * a.shape.heads + head) * a.shape.head_dim;
  const float factor = sum[1] > 0 ? (a.cache.type == CacheType::kInt8 ? a.cache.v_scale : 1) / sum[1] : 0;
  for (int64_t d = 0; d < a.shape.head_dim; d++) y[d] = sum[kStrip + d] * factor;
  if (a.cache.type == CacheType::kInt4) hadamard(a.shape.head_dim, y);  // values are rotated
}

// Calls function(row, rows, head, heads) for the tiles of some rows and the heads of one key head.
template <class Function>
void each_tile(const Attention& a, int64_t kv_head, int64_t first_row, int64_t last_row, Function function) {
  const int64_t group = a.shape.heads / a.shape.kv_heads, taken = least(group, kMostGroup), rows = kMostQueries / taken;
  for (int64_t row = first_row; row < last_row; row += rows)
    for (int64_t head = 0; head < group; head += taken)
      function(row, int(least(rows, last_row - row)), kv_head * group + head, int(least(taken, group - head)));
}

struct Span {
  int64_t first, straight, end;  // of some rows: what they see
  Span(const Attention& a, int64_t first_row, int64_t last_row) : first(a.end_slot()), straight(0), end(0) {
    for (int64_t row = first_row; row < last_row; row++) {
      first = least(first, first_key(a, row));
      straight = most(straight, a.scratch.seen[kSeen * row + 1]);
      end = most(end, a.scratch.seen[kSeen * row]);
    }
  }
};

// One chunk of all rows, counted from the first that a row can see; `merge` puts them together.
template <class Isa, class E>
void attend_chunk_of(const Attention& a, int64_t kv_head, int64_t at, float* work) {
  const Span span(a, 0, a.shape.rows);
  const Chunk<Isa, E> chunk(a, kv_head, a.first_chunk() + at, span.first, span.straight,
                            a.shape.rows * a.shape.heads / a.shape.kv_heads, work);
  each_tile(a, kv_head, 0, a.shape.rows, [&](int64_t row, int rows, int64_t head, int heads) {
    Tile<Isa> tile(a, row, rows, head, heads);
    float* places[kMostQueries];
    for (int i = 0; i < rows * heads; i++) {
      places[i] = a.scratch.partials +
                  ((at * a.shape.rows + row + i / heads) * a.shape.heads + head + i % heads) * a.partial_floats();
      tile.queries[i].values = places[i] + kStrip;
    }
    tile.run(a, kv_head, chunk);
    for (int i = 0; i < rows * heads; i++) {
      places[i][0] = tile.queries[i].top;
      places[i][1] = tile.queries[i].total;
    }
  });
}

template <class Isa>
void attend_chunk(const Attention& a, int64_t kv_head, int64_t at, float* work) {
  with_elements(a, [&](auto e) { attend_chunk_of<Isa, decltype(e)>(a, kv_head, at, work); });
}

template <class Isa>
void merge(const Attention& a, int64_t row) {
  alignas(64) float sum[kMostDim + kStrip];
  for (int64_t head = 0; head < a.shape.heads; head++) {
    begin_sum(a, head, sum);
    for (int64_t chunk = first_key(a, row) / kChunk; chunk * kChunk < a.scratch.seen[kSeen * row]; chunk++) {
      const float* part =
          a.scratch.partials +
          (((chunk - a.first_chunk()) * a.shape.rows + row) * a.shape.heads + head) * a.partial_floats();
      add_chunk<Isa>(a.padded_dim(), sum, part[0], part[1], part + kStrip);
    }
    finish_sum(a, row, head, sum);
  }
}

// All chunks of some rows, put together at once.
template <class Isa, class E>
void attend_rows_of(const Attention& a, int64_t kv_head, int64_t first_row, int64_t last_row, float* work) {
  alignas(64) float parts[kMostQueries][kMostDim];
  const int64_t group = a.shape.heads / a.shape.kv_heads;
  float* sums = work + 3 * kChunk * a.padded_dim();
  const auto sum_of = [&](int64_t row, int64_t head) {
    return sums + ((row - first_row) * group + head - kv_head * group) * a.partial_floats();
  };
  const auto each = [&](auto function) {
    for (int64_t row = first_row; row < last_row; row++)
      for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head++) function(row, head);
  };
  each([&](int64_t row, int64_t head) { begin_sum(a, head, sum_of(row, head)); });
  const Span span(a, first_row, last_row);
  for (int64_t index = span.first / kChunk; index * kChunk < span.end; index++) {
    const Chunk<Isa, E> chunk(a, kv_head, index, span.first, span.straight, (last_row - first_row) * group, work);
    each_tile(a, kv_head, first_row, last_row, [&](int64_t row, int rows, int64_t head, int heads) {
      Tile<Isa> tile(a, row, rows, head, heads);
      for (int i = 0; i < rows * heads; i++) tile.queries[i].values = parts[i];
      tile.run(a, kv_head, chunk);
      for (int i = 0; i < rows * heads; i++)
        add_chunk<Isa>(a.padded_dim(), sum_of(row + i / heads, head + i % heads), tile.queries[i].top,
                       tile.queries[i].total, parts[i]);
    });
  }
  each([&](int64_t row, int64_t head) { finish_sum(a, row, head, sum_of(row, head)); });
}

template <class Isa>
void attend_rows(const Attention& a, int64_t kv_head, int64_t first_row, int64_t last_row, float* work) {
  with_elements(a, [&](auto e) { attend_rows_of<Isa, decltype(e)>(a, kv_head, first_row, last_row, work); });
}

}  // namespace
}  // namespace edgellm

// Attention over a cache that is written in place. Included by `set.inl` with `Set`.
//
// A row's keys are counted in the order in which it sees them: in a tree, too, its ancestors stand
// where they would stand without their siblings. Softmax and values are summed by chunks of
// `kChunk` such keys from 0, and the chunks in their order, whoever computes them.
#pragma once

#include "math.inl"

namespace edgellm {
namespace {

constexpr int kMostQueries = 32;  // heads of rows that share what is read of the cache
constexpr int kMostDim = 256;     // head_dim
constexpr int kMostGroup = 16;    // heads of one key head that are taken at once
constexpr float kNothing = -1e30f;

// ---------------------------------------------------------------- new rows: norm, rope and cache
void rotate(const Attention& a, int64_t row, float* x) {
  const int64_t half = a.rotary_dim / 2, table = (a.positions ? a.positions[row] : row) * half;
  const int64_t step = a.is_interleaved ? 2 : 1, second = a.is_interleaved ? 1 : half;
  for (int64_t i = 0; i < half; i++) {
    const float cos = a.cos[table + i], sin = a.sin[table + i];
    float &p = x[i * step], &q = x[i * step + second];
    const float turned = p * cos - q * sin;
    q = q * cos + p * sin;
    p = turned;
  }
}

// A head as attention takes it: [padded_dim], zeros behind.
void take_head(const Attention& a, int64_t row, const float* x, const float* gamma, bool turns, float* out) {
  const int64_t dim = a.head_dim;
  const float factor = gamma ? inverse_rms(x, dim, a.epsilon) : 1;
  for (int64_t d = 0; d < a.padded_dim(); d++) out[d] = d < dim ? gamma ? x[d] * factor * gamma[d] : x[d] : 0;
  if (turns && a.cos) rotate(a, row, out);
}

void store_row(const Attention& a, void* cache, float scale, int64_t index, const float* x) {
  const int64_t dim = a.head_dim, at = index * dim;
  for (int64_t d = 0; d < dim; d += kStrip) {
    const int64_t count = dim - d < kStrip ? dim - d : kStrip;
    uint16_t halves[kStrip];
    int8_t codes[kStrip];
    switch (a.cache_type) {
      case CacheType::kFloat32:
        store_up_to(static_cast<float*>(cache) + at + d, Set::load(x + d), count);
        break;
      case CacheType::kFloat16:
        Set::store_half(halves, Set::load(x + d));
        __builtin_memcpy(static_cast<uint16_t*>(cache) + at + d, halves, count * 2);
        break;
      case CacheType::kInt8: {
        const F steps = Set::div(Set::load(x + d), Set::set(scale));
        Set::store_codes(codes, Set::to_int(Set::max(Set::min(steps, Set::set(127)), Set::set(-128))));
        __builtin_memcpy(static_cast<int8_t*>(cache) + at + d, codes, count);
      }
    }
  }
}

void list_seen(const Attention& a, int64_t row) {
  int32_t* seen = a.seen + 2 * row;
  if (!a.mask) {
    seen[0] = seen[1] = int32_t(a.write_index + row + 1);
    return;
  }
  const int64_t base = a.write_index + a.rows - a.mask_columns;
  int32_t *slots = a.slots + row * a.mask_columns, count = 0, straight = 0;
  for (int64_t i = 0; i < a.mask_columns; i++)
    if (a.mask[row * a.mask_columns + i]) {
      straight += count == straight && i == count;
      slots[count++] = int32_t(base + i);
    }
  seen[0] = int32_t(base) + count;
  seen[1] = int32_t(base) + straight;
}

void append(const Attention& a, int64_t row) {
  float head[kMostDim];
  const float scale = a.cache_type == CacheType::kInt8 ? a.scale * a.k_scale : a.scale;
  for (int64_t h = 0; h < a.heads; h++) {
    float* query = a.queries + (row * a.heads + h) * a.padded_dim();
    take_head(a, row, a.q + row * a.q_stride + h * a.head_dim, a.q_norm, true, query);
    for (int64_t d = 0; d < a.head_dim; d++) query[d] *= scale;
  }
  for (int64_t h = 0; h < a.kv_heads; h++) {
    const int64_t index = h * a.capacity + a.write_index + row;
    take_head(a, row, a.k + row * a.k_stride + h * a.head_dim, a.k_norm, true, head);
    store_row(a, a.keys, a.k_scale, index, head);
    take_head(a, row, a.v + row * a.v_stride + h * a.head_dim, nullptr, false, head);
    store_row(a, a.values, a.v_scale, index, head);
  }
  list_seen(a, row);
}

// ----------------------------------------------------------------------------- reading the cache
struct Query {
  int64_t row, first, end, straight;  // the keys [first, end) of a chunk; slots are keys below `straight`
  const float* q;
  float* values;                      // [padded_dim]
  float top, total;
  float* scores;                      // [kChunk], of the chunk's keys
};

// Up to 16 rows of a cache as floats; the last is repeated. Keys from `straight` on have the slots of
// `row`; `scratch` is [16, padded_dim].
void read_rows(const Attention& a, const void* cache, int64_t kv_head, int64_t row, int64_t straight, int64_t key,
               int64_t count, float* scratch, const float** rows) {
  const int64_t dim = a.head_dim, padded = a.padded_dim();
  const int64_t ruled = a.write_index + a.rows - a.mask_columns;
  for (int64_t i = 0; i < kStrip; i++) {
    if (i >= count) {
      rows[i] = rows[count - 1];
      continue;
    }
    const int64_t j = key + i, slot = j < straight ? j : a.slots[row * a.mask_columns + j - ruled];
    const int64_t at = (kv_head * a.capacity + slot) * dim;
    if (a.cache_type == CacheType::kFloat32 && padded == dim) {
      rows[i] = static_cast<const float*>(cache) + at;
      continue;
    }
    float* out = scratch + i * padded;
    rows[i] = out;
    for (int64_t d = 0; d < padded; d += kStrip) {
      const int64_t rest = dim - d < kStrip ? dim - d : kStrip;
      uint16_t halves[kStrip] = {};
      int8_t codes[kStrip] = {};
      switch (a.cache_type) {
        case CacheType::kFloat32:
          Set::store(out + d, load_up_to(static_cast<const float*>(cache) + at + d, rest));
          break;
        case CacheType::kFloat16:
          __builtin_memcpy(halves, static_cast<const uint16_t*>(cache) + at + d, rest * 2);
          Set::store(out + d, Set::load_half(halves));
          break;
        case CacheType::kInt8:
          __builtin_memcpy(codes, static_cast<const int8_t*>(cache) + at + d, rest);
          Set::store(out + d, Set::load_codes(codes));
      }
    }
  }
}

// Scores of 16 keys; each is summed in 16 lanes along the head, then over the lanes. `kParts`: of
// the head, in lanes; 0 if it is known only at run time.
template <int kParts>
F score(const float* q, const float* const* rows, int64_t dim) {
  constexpr int kHeld = kParts ? kParts : 1;
  F query[kHeld], all[kStrip];
  for (int part = 0; part < kParts; part++) query[part] = Set::load(q + part * kStrip);
  for (int i = 0; i < kStrip; i++) {
    const float* row = rows[i];
    F sum = Set::set(0);
    if constexpr (kParts > 0)
      for (int part = 0; part < kParts; part++) sum = Set::fma(Set::load(row + part * kStrip), query[part], sum);
    else
      for (int64_t d = 0; d < dim; d += kStrip) sum = Set::fma(Set::load(row + d), Set::load(q + d), sum);
    all[i] = sum;
  }
  return Set::sums(all);
}

// For sets of which `kTurnFrom` queries pay for it: [16 keys][padded_dim] -> [padded_dim][16 keys]; four times the halves of a pack of cards.
template <class S = Set>
void turn(const float* const* rows, int64_t dim, float* turned) {
  for (int64_t d = 0; d < dim; d += kStrip) {
    F now[kStrip], next[kStrip];
    for (int i = 0; i < kStrip; i++) now[i] = Set::load(rows[i] + d);
    for (int step = 0; step < 4; step++) {
      for (int i = 0; i < kStrip / 2; i++) S::zip(now[i], now[i + kStrip / 2], next[2 * i], next[2 * i + 1]);
      for (int i = 0; i < kStrip; i++) now[i] = next[i];
    }
    for (int i = 0; i < kStrip; i++) Set::store(turned + (d + i) * kStrip, now[i]);
  }
}

// The same sums for more queries than a turn costs: lanes 4 apart at a time.
template <int Q>
void score_turned(const Query* queries, const float* turned, int64_t dim, F* out) {
  F lanes[4][Q];
  for (int lane = 0; lane < 4; lane++) {
    F some[4][Q];
    for (auto& sums : some)
      for (F& one : sums) one = Set::set(0);
    for (int64_t d = lane; d < dim; d += kStrip)
      for (int i = 0; i < 4; i++) {
        const F keys = Set::load(turned + (d + 4 * i) * kStrip);
        for (int q = 0; q < Q; q++) some[i][q] = Set::fma(keys, Set::set(queries[q].q[d + 4 * i]), some[i][q]);
      }
    for (int q = 0; q < Q; q++) lanes[lane][q] = Set::add(Set::add(some[0][q], some[2][q]), Set::add(some[1][q], some[3][q]));
  }
  for (int q = 0; q < Q; q++) out[q] = Set::add(Set::add(lanes[0][q], lanes[2][q]), Set::add(lanes[1][q], lanes[3][q]));
}

// Scores of keys [from, to); from `straight` on they are those of the first query's row.
void score_keys(const Attention& a, int64_t kv_head, int64_t base, const Query* queries, int count, int64_t straight,
                int64_t from, int64_t to) {
  alignas(64) float scratch[kStrip * kMostDim], turned[kStrip * kMostDim], some[kStrip];
  const float* rows[kStrip];
  const int64_t dim = a.padded_dim();
  for (int64_t key = from; key < to; key += kStrip) {
    const int64_t n = to - key < kStrip ? to - key : kStrip;
    const auto put = [&](const Query& query, F scores) {
      if (a.softcap > 0) scores = Set::mul(tanh(Set::div(scores, Set::set(a.softcap))), Set::set(a.softcap));
      Set::store(some, scores);
      __builtin_memcpy(query.scores + key - base, some, n * sizeof(float));
    };
    read_rows(a, a.keys, kv_head, queries[0].row, straight, key, n, scratch, rows);
    if constexpr (Set::kTurnFrom > 0)
      if (count >= Set::kTurnFrom) {
        turn(rows, dim, turned);
        for (int i = 0; i < count;) {
          F scores[Set::kQueries];
          const int some = count - i < Set::kQueries ? 1 : Set::kQueries;
          some == 1 ? score_turned<1>(queries + i, turned, dim, scores) : score_turned<Set::kQueries>(queries + i, turned, dim, scores);
          for (int q = 0; q < some; q++) put(queries[i++], scores[q]);
        }
        continue;
      }
    for (int i = 0; i < count; i++)
      put(queries[i], dim == 64 ? score<4>(queries[i].q, rows, dim) : dim == 128 ? score<8>(queries[i].q, rows, dim) : score<0>(queries[i].q, rows, dim));
  }
}

// Scores become exponentials below the largest; their sum has lanes by place in the chunk.
void weigh(Query& query, int64_t base) {
  const int64_t first = query.first - base, end = query.end - base;
  const int64_t begin = first / kStrip * kStrip, stop = (end + kStrip - 1) / kStrip * kStrip;
  float* s = query.scores;
  F largest = Set::set(kNothing), total = Set::set(0);
  for (int64_t i = begin; i < first; i++) s[i] = kNothing;
  for (int64_t i = end; i < stop; i++) s[i] = kNothing;
  for (int64_t i = begin; i < stop; i += kStrip) largest = Set::max(largest, Set::load(s + i));
  query.top = Set::largest(largest);
  for (int64_t i = begin; i < stop; i += kStrip) Set::store(s + i, exp(Set::sub(Set::load(s + i), Set::set(query.top))));
  for (int64_t i = begin; i < first; i++) s[i] = 0;
  for (int64_t i = end; i < stop; i++) s[i] = 0;
  for (int64_t i = begin; i < stop; i += kStrip) total = Set::add(total, Set::load(s + i));
  query.total = Set::sum(total);
}

template <int Q, int V>
void add_tile(const Query* queries, const float* const* rows, int64_t at, int64_t count, int64_t d) {
  F sums[Q][V];
  for (int q = 0; q < Q; q++)
    for (int v = 0; v < V; v++) sums[q][v] = Set::load(queries[q].values + d + v * kStrip);
  for (int64_t i = 0; i < count; i++) {
    F part[V];
    for (int v = 0; v < V; v++) part[v] = Set::load(rows[i] + d + v * kStrip);
    for (int q = 0; q < Q; q++) {
      const F weight = Set::set(queries[q].scores[at + i]);
      for (int v = 0; v < V; v++) sums[q][v] = Set::fma(part[v], weight, sums[q][v]);
    }
  }
  for (int q = 0; q < Q; q++)
    for (int v = 0; v < V; v++) Set::store(queries[q].values + d + v * kStrip, sums[q][v]);
}

template <int Q>
void add_some(const Query* queries, const float* const* rows, int64_t at, int64_t count, int64_t dim) {
  int64_t d = 0;
  for (; d + Set::kWide * kStrip <= dim; d += Set::kWide * kStrip) add_tile<Q, Set::kWide>(queries, rows, at, count, d);
  for (; d < dim; d += kStrip) add_tile<Q, 1>(queries, rows, at, count, d);
}

// Adds the values of keys [from, to), one after the other.
void add_values(const Attention& a, int64_t kv_head, int64_t base, const Query* queries, int count, int64_t from, int64_t to) {
  alignas(64) float scratch[kStrip * kMostDim];
  const float* rows[kStrip];
  for (int64_t key = from; key < to; key += kStrip) {
    const int64_t n = to - key < kStrip ? to - key : kStrip;
    read_rows(a, a.values, kv_head, queries[0].row, queries[0].straight, key, n, scratch, rows);
    int i = 0;
    for (; i + Set::kQueries <= count; i += Set::kQueries) add_some<Set::kQueries>(queries + i, rows, key - base, n, a.padded_dim());
    for (; i < count; i++) add_some<1>(queries + i, rows, key - base, n, a.padded_dim());
  }
}

inline int64_t least(int64_t x, int64_t y) { return x < y ? x : y; }
inline int64_t most(int64_t x, int64_t y) { return x > y ? x : y; }

// One chunk of keys for `rows` rows from `row` on, `group` heads of each from `head` on.
// What all rows see alike is read once.
struct Tile {
  Query queries[kMostQueries];
  int rows, group;
  alignas(64) float scores[kMostQueries][kChunk];

  Tile(const Attention& a, int64_t row, int num_rows, int64_t head, int num_heads) : rows(num_rows), group(num_heads) {
    for (int i = 0; i < rows * group; i++) {
      const int64_t own = row + i / group;
      queries[i].row = own;
      queries[i].q = a.queries + (own * a.heads + head + i % group) * a.padded_dim();
      queries[i].scores = scores[i];
    }
  }

  void run(const Attention& a, int64_t kv_head, int64_t chunk) {
    const int64_t base = chunk * kChunk;
    int64_t lowest = base + kChunk, highest = 0, last_first = 0, first_end = base + kChunk;
    bool is_shared = rows > 1;
    for (int i = 0; i < rows * group; i++) {
      Query& q = queries[i];
      const int64_t end = a.seen[2 * q.row];
      q.straight = a.seen[2 * q.row + 1];
      q.first = most(base, a.window ? most(0, end - a.window) : 0);
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
      highest = most(highest, least(q.end, q.straight));
    }
    is_shared = is_shared && last_first < first_end;
    // Keys that one row does not see are scored for it in vain, and read by nobody.
    score_keys(a, kv_head, base, queries, rows * group, highest, lowest, highest);
    for (int r = 0; r < rows; r++) {
      Query* own = queries + r * group;
      score_keys(a, kv_head, base, own, group, own->straight, most(own->first, own->straight), own->end);
      if (own->first < own->end)
        for (int i = 0; i < group; i++) weigh(own[i], base);
      add_values(a, kv_head, base, own, group, own->first, is_shared ? last_first : own->end);
    }
    if (!is_shared) return;
    add_values(a, kv_head, base, queries, rows * group, last_first, first_end);
    for (int r = 0; r < rows; r++) {
      const Query* own = queries + r * group;
      add_values(a, kv_head, base, own, group, first_end, own->end);
    }
  }
};

// ------------------------------------------------------------------------------ chunks in order
struct Running {
  float top, total;
  float* values;  // [padded_dim]

  void begin(const Attention& a, int64_t head, float* memory) {
    top = a.sinks ? a.sinks[head] : kNothing;
    total = a.sinks ? 1 : 0;
    values = memory;
    __builtin_memset(values, 0, a.padded_dim() * sizeof(float));
  }

  void add(int64_t dim, float chunk_top, float chunk_total, const float* chunk_values) {
    if (chunk_total == 0) return;
    const float above = top > chunk_top ? top : chunk_top;
    const float keeps = exp(top - above), takes = exp(chunk_top - above);
    total = total * keeps + chunk_total * takes;
    for (int64_t d = 0; d < dim; d += kStrip)
      Set::store(values + d, Set::fma(Set::load(chunk_values + d), Set::set(takes), Set::mul(Set::load(values + d), Set::set(keeps))));
    top = above;
  }

  void finish(const Attention& a, int64_t row, int64_t head) const {
    float* y = a.y + (row * a.heads + head) * a.head_dim;
    const float factor = total > 0 ? (a.cache_type == CacheType::kInt8 ? a.v_scale : 1) / total : 0;
    for (int64_t d = 0; d < a.head_dim; d++) y[d] = values[d] * factor;
  }
};

int64_t first_chunk(const Attention& a, int64_t row) { return a.window ? most(0, a.seen[2 * row] - a.window) / kChunk : 0; }

// Calls function(row, rows, head, heads) for the tiles of some rows and the heads of one key head.
template <class Function>
void each_tile(const Attention& a, int64_t kv_head, int64_t first_row, int64_t last_row, Function function) {
  const int64_t group = a.heads / a.kv_heads, taken = least(group, kMostGroup), rows = kMostQueries / taken;
  for (int64_t row = first_row; row < last_row; row += rows)
    for (int64_t head = 0; head < group; head += taken)
      function(row, int(least(rows, last_row - row)), kv_head * group + head, int(least(taken, group - head)));
}

// One chunk of all rows, which `merge` puts together.
void attend_chunk(const Attention& a, int64_t kv_head, int64_t chunk) {
  each_tile(a, kv_head, 0, a.rows, [&](int64_t row, int rows, int64_t head, int heads) {
    Tile tile(a, row, rows, head, heads);
    float* places[kMostQueries];
    for (int i = 0; i < rows * heads; i++) {
      places[i] = a.partials + ((chunk * a.rows + row + i / heads) * a.heads + head + i % heads) * a.partial_floats();
      tile.queries[i].values = places[i] + kStrip;
    }
    tile.run(a, kv_head, chunk);
    for (int i = 0; i < rows * heads; i++) {
      places[i][0] = tile.queries[i].top;
      places[i][1] = tile.queries[i].total;
    }
  });
}

void merge(const Attention& a, int64_t row) {
  alignas(64) float values[kMostDim];
  for (int64_t head = 0; head < a.heads; head++) {
    Running running;
    running.begin(a, head, values);
    for (int64_t chunk = first_chunk(a, row); chunk * kChunk < a.seen[2 * row]; chunk++) {
      const float* part = a.partials + ((chunk * a.rows + row) * a.heads + head) * a.partial_floats();
      running.add(a.padded_dim(), part[0], part[1], part + kStrip);
    }
    running.finish(a, row, head);
  }
}

// All chunks of some rows, put together at once.
void attend_rows(const Attention& a, int64_t kv_head, int64_t first_row, int64_t last_row) {
  each_tile(a, kv_head, first_row, last_row, [&](int64_t row, int rows, int64_t head, int heads) {
    alignas(64) float parts[kMostQueries][kMostDim], sums[kMostQueries][kMostDim];
    Tile tile(a, row, rows, head, heads);
    int64_t first = a.chunks(), end = 0;
    for (int r = 0; r < rows; r++) {
      first = least(first, first_chunk(a, row + r));
      end = most(end, a.seen[2 * (row + r)]);
    }
    Running running[kMostQueries];
    for (int i = 0; i < rows * heads; i++) {
      tile.queries[i].values = parts[i];
      running[i].begin(a, head + i % heads, sums[i]);
    }
    for (int64_t chunk = first; chunk * kChunk < end; chunk++) {
      tile.run(a, kv_head, chunk);
      for (int i = 0; i < rows * heads; i++) running[i].add(a.padded_dim(), tile.queries[i].top, tile.queries[i].total, parts[i]);
    }
    for (int i = 0; i < rows * heads; i++) running[i].finish(a, row + i / heads, head + i % heads);
  });
}

}  // namespace
}  // namespace edgellm

// KV cache: new rows get norm and RoPE and are written; rows are read for attention.
#pragma once

#include "int4_rows.h"
#include "kernels.h"
#include "vector_math.h"

namespace edgellm {
namespace {

constexpr int kMostQueries = 32;  // query heads that share a read of the cache
constexpr int kMostGroup = 16;  // query heads of a KV head in a tile
constexpr float kNothing = -1e30f;

// A pointer from which 16 values can be read: to the values, or if there are fewer to `copy`.
template <class T>
const T* whole(const T* values, int64_t count, T* copy) {
  if (count == kStrip) return values;
  __builtin_memcpy(copy, values, count * sizeof(T));
  return copy;
}

// Prefetches a row: hardware prefetchers stop at the end of a memory page.
template <class E>
void fetch(const E* row, int64_t dim) {
  for (int64_t d = 0; d < dim; d += 64 / sizeof(E)) __builtin_prefetch(row + d);
}

// 16 numbers of a cache, of int8 without their scale.
template <class Isa>
EDGELLM_INLINE F<Isa> numbers(const float* x) {
  return Isa::load(x);
}
template <class Isa>
EDGELLM_INLINE F<Isa> numbers(const uint16_t* x) {
  return Isa::load_half(x);
}
template <class Isa>
EDGELLM_INLINE F<Isa> numbers(const int8_t* x) {
  return Isa::load_codes(x);
}

// ---------------------------------------------------------------- new rows: norm, rope and cache
void rotate(const Attention& a, int64_t row, float* x) {
  const int64_t half = a.inputs.rotary_dim / 2, table = (a.inputs.positions ? a.inputs.positions[row] : row) * half;
  const int64_t step = a.rules.is_interleaved ? 2 : 1, second = a.rules.is_interleaved ? 1 : half;
  for (int64_t i = 0; i < half; i++) {
    const float cos = a.inputs.cos[table + i], sin = a.inputs.sin[table + i];
    float &p = x[i * step], &q = x[i * step + second];
    const float turned = p * cos - q * sin;
    q = q * cos + p * sin;
    p = turned;
  }
}

// A head with norm and RoPE, [padded_dim], padded with zeros.
template <class Isa>
void take_head(const Attention& a, int64_t row, const float* x, const float* gamma, bool turns, float* out) {
  const int64_t dim = a.shape.head_dim;
  const float factor = gamma ? inverse_rms<Isa>(x, dim, a.rules.epsilon) : 1;
  for (int64_t d = 0; d < a.padded_dim(); d++) out[d] = d < dim ? gamma ? x[d] * factor * gamma[d] : x[d] : 0;
  if (turns && a.inputs.cos) rotate(a, row, out);
}

template <class Isa>
void store_halves(uint16_t* out, F<Isa> x) {
  Isa::store_half(out, Isa::max(Isa::set(-kMostHalf), Isa::min(Isa::set(kMostHalf), x)));
}

// Rotates `x` and writes it in 4 bits and in float16.
template <class Isa>
void store_rotated(const Attention& a, void* cache, int64_t at, uint16_t* recent, float* x) {
  hadamard(a.shape.head_dim, x);
  store_int4_row<Isa>(x, a.padded_dim(), static_cast<Int4*>(cache) + at);
  for (int64_t d = 0; d < a.padded_dim(); d += kStrip) store_halves<Isa>(recent + d, Isa::load(x + d));
}

template <class Isa>
void store_row(const Attention& a, void* cache, float scale, int64_t at, const float* x) {
  const int64_t dim = a.shape.head_dim;
  for (int64_t d = 0; d < dim; d += kStrip) {
    const int64_t count = dim - d < kStrip ? dim - d : kStrip;
    uint16_t halves[kStrip];
    int8_t codes[kStrip];
    switch (a.cache.type) {
      case CacheType::kFloat32:
        store_up_to<Isa>(static_cast<float*>(cache) + at + d, Isa::load(x + d), count);
        break;
      case CacheType::kFloat16:
        store_halves<Isa>(halves, Isa::load(x + d));
        __builtin_memcpy(static_cast<uint16_t*>(cache) + at + d, halves, count * 2);
        break;
      case CacheType::kBFloat16:
        Isa::store_bfloat(halves, Isa::load(x + d));
        __builtin_memcpy(static_cast<uint16_t*>(cache) + at + d, halves, count * 2);
        break;
      case CacheType::kInt8: {
        const F<Isa> steps = Isa::div(Isa::load(x + d), Isa::set(scale));
        Isa::store_codes(codes, Isa::to_int(Isa::max(Isa::min(steps, Isa::set(127)), Isa::set(-128))));
        __builtin_memcpy(static_cast<int8_t*>(cache) + at + d, codes, count);
        break;
      }
      case CacheType::kInt4:
        break;  // see `store_rotated`
    }
  }
}

void list_seen(const Attention& a, int64_t row) {
  int32_t* seen = a.scratch.seen + kSeen * row;
  if (a.rules.is_bidirectional || !a.inputs.mask) {
    const int64_t own_end = a.shape.write_index + row + 1;
    seen[0] = seen[1] = int32_t(a.rules.is_bidirectional ? a.end_around(row) : own_end);
    seen[2] = int32_t(own_end);
    return;
  }
  const int64_t base = a.end_slot() - a.shape.mask_columns;
  const int64_t own = a.shape.mask_columns - a.shape.rows + row;
  const int64_t columns = a.rules.is_causal ? own + 1 : a.shape.mask_columns;
  int32_t *slots = a.scratch.slots + row * a.shape.mask_columns, count = 0, straight = 0, before = 0;
  for (int64_t i = 0; i < columns; i++)
    if (a.inputs.mask[row * a.shape.mask_columns + i]) {
      straight += count == straight && i == count;
      slots[count++] = int32_t(base + i);
      if (i <= own) before = count;
    }
  seen[0] = int32_t(base) + count;
  seen[1] = int32_t(base) + straight;
  seen[2] = int32_t(base) + before;
}

// Appends a query's numbers in bfloat16 to its floats.
template <class Isa>
void round_query(int64_t dim, float* query) {
  auto* const bits = reinterpret_cast<uint16_t*>(query + dim);
  for (int64_t d = 0; d < dim; d += kStrip) Isa::store_bfloat(bits + d, Isa::load(query + d));
}

template <class Isa>
void write_kv(const Attention& a, int64_t row) {
  float head[kMostDim];
  const float scale = a.cache.type == CacheType::kInt8 ? a.rules.scale * a.cache.k_scale : a.rules.scale;
  for (int64_t h = 0; h < a.shape.heads; h++) {
    float* query = a.scratch.queries + (row * a.shape.heads + h) * a.query_floats();
    take_head<Isa>(a, row, a.inputs.q + row * a.inputs.q_stride + h * a.shape.head_dim, a.inputs.q_norm, true, query);
    for (int64_t d = 0; d < a.shape.head_dim; d++) query[d] *= scale;
    if (a.cache.type == CacheType::kBFloat16) round_query<Isa>(a.padded_dim(), query);
    if (a.cache.type != CacheType::kInt4) continue;
    hadamard(a.shape.head_dim, query);
    pack_int4_query<Isa>(a.padded_dim(), query);
  }
  for (int64_t h = 0; a.inputs.k && h < a.shape.kv_heads; h++) {
    const int64_t slot = a.shape.write_index + row, at = a.place(h, slot);
    const bool is_int4 = a.cache.type == CacheType::kInt4;
    const int64_t recent = is_int4 ? a.recent_place(h, slot) : 0;
    take_head<Isa>(a, row, a.inputs.k + row * a.inputs.k_stride + h * a.shape.head_dim, a.inputs.k_norm, true, head);
    is_int4 ? store_rotated<Isa>(a, a.cache.keys, at, a.cache.recent_keys + recent, head)
            : store_row<Isa>(a, a.cache.keys, a.cache.k_scale, at, head);
    take_head<Isa>(a, row, a.inputs.v + row * a.inputs.v_stride + h * a.shape.head_dim, nullptr, false, head);
    is_int4 ? store_rotated<Isa>(a, a.cache.values, at, a.cache.recent_values + recent, head)
            : store_row<Isa>(a, a.cache.values, a.cache.v_scale, at, head);
  }
  list_seen(a, row);
}

// ----------------------------------------------------------------------------- reading the cache
// A row of a cache as floats, [padded_dim].
template <class Isa>
void read_row(const Attention& a, const void* cache, int64_t at, float* out) {
  for (int64_t d = 0; d < a.padded_dim(); d += kStrip) {
    const int64_t rest = a.shape.head_dim - d < kStrip ? a.shape.head_dim - d : kStrip;
    uint16_t halves[kStrip] = {};
    int8_t codes[kStrip] = {};
    F<Isa> x{};
    switch (a.cache.type) {
      case CacheType::kFloat32:
        x = load_up_to<Isa>(static_cast<const float*>(cache) + at + d, rest);
        break;
      case CacheType::kFloat16:
        x = Isa::load_half(whole(static_cast<const uint16_t*>(cache) + at + d, rest, halves));
        break;
      case CacheType::kInt8:
        x = Isa::load_codes(whole(static_cast<const int8_t*>(cache) + at + d, rest, codes));
        break;
      case CacheType::kInt4:
      case CacheType::kBFloat16:
        break;  // their rows are never floats
    }
    Isa::store(out + d, x);
  }
}

// Calls function(E{}) with the type in which slots are read: the cache's, or float if heads are padded.
template <class Function>
void with_elements(const Attention& a, Function function) {
  if (a.cache.type == CacheType::kInt4) return function(Int4{});
  if (a.cache.type == CacheType::kBFloat16) return function(BFloat16{});
  if (a.cache.type == CacheType::kFloat32 || a.padded_dim() != a.shape.head_dim) return function(float{});
  a.cache.type == CacheType::kFloat16 ? function(uint16_t{}) : function(int8_t{});
}

// Slots of a chunk, [padded_dim] each: in the cache, or converted to floats in `memory`.
template <class Isa, class E>
struct Slots {
  int64_t page_rows, dim, stride;  // stride: from row to row
  const E* pages[kChunk / kStrip + 1] = {};  // and the next one; nullptr: it is not read

  // Those from `first` to `end` of the chunk that begins at slot `base`.
  Slots(const Attention& a, const void* cache, int64_t kv_head, int64_t base, int64_t first, int64_t end, float* memory)
      : page_rows(a.cache.page_rows),
        dim(a.padded_dim()),
        stride(sizeof(E) == sizeof(float) ? a.padded_dim() : a.row_elements()) {
    if constexpr (sizeof(E) == sizeof(float))
      if (a.cache.type != CacheType::kFloat32 || dim != a.shape.head_dim) {
        for (int64_t slot = 0; slot < kChunk; slot += page_rows) pages[slot / page_rows] = memory + slot * dim;
        for (int64_t slot = first; slot < end; slot++)
          read_row<Isa>(a, cache, a.place(kv_head, base + slot), memory + slot * dim);
        return;
      }
    const int64_t last = least(kChunk + page_rows, a.end_slot() - base);
    for (int64_t slot = first / page_rows * page_rows; slot < last; slot += page_rows)
      pages[slot / page_rows] = static_cast<const E*>(cache) + a.place(kv_head, base + slot);
  }

  // The slot's row; nullptr for some slots that are prefetched but never read.
  const E* row(int64_t slot) const {
    const E* page = pages[slot / page_rows];
    return page ? page + slot % page_rows * stride : nullptr;
  }
  // How many of [from, to) are contiguous.
  int64_t together(int64_t from, int64_t to) const { return least(to, (from / page_rows + 1) * page_rows) - from; }
};

// Up to 16 keys of one row that follow its contiguous ones, in `memory`: as floats, copies of rows of 4 bits and of
// bfloat16, or halves of the recent ones.
template <class Isa, class E>
const E* read_seen(const Attention& a, const void* cache, int64_t kv_head, int64_t row, int64_t key, int64_t count,
                   E* memory) {
  const int64_t ruled = a.end_slot() - a.shape.mask_columns, dim = a.padded_dim();
  for (int64_t i = 0; i < count; i++) {
    const int64_t index = key + i - ruled;  // negative for the even key of a pair that the mask divides
    const int64_t slot = index < 0 ? key + i : a.scratch.slots[row * a.shape.mask_columns + index];
    const E* const rows = static_cast<const E*>(cache);
    if constexpr (std::is_same_v<E, Int4> || std::is_same_v<E, BFloat16>)
      __builtin_memcpy(memory + i * a.row_elements(), rows + a.place(kv_head, slot), a.row_elements() * sizeof(E));
    else if constexpr (std::is_same_v<E, uint16_t>)
      __builtin_memcpy(memory + i * dim, rows + a.recent_place(kv_head, slot), 2 * dim);
    else
      read_row<Isa>(a, cache, a.place(kv_head, slot), memory + i * dim);
  }
  return memory;
}

}  // namespace
}  // namespace edgellm

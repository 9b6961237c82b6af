// What the operators ask of an instruction set: one table of functions, chosen at run time.
//
// Results are batch-invariant and bit-identical on all instruction sets: integer sums are exact,
// and every float sum has one order, independent of tiles, threads and other rows.
#pragma once

#include <cstddef>
#include <cstdint>

#include "code_units.h"

namespace edgellm {

constexpr int kGroup = 32;  // output channels of a record
constexpr int kStrip = 16;  // channels, or floats, that a vector stands for on every processor
constexpr int kChunk = 256;  // keys whose softmax is summed apart from the others'; of whole pages
constexpr int kSegment = 1024;  // logits of one `SegmentMax`

constexpr int kSpan = 256;  // inputs that share the scale of their quantized scales

enum class Form : uint32_t {
  kInt4 = 1,
  kInt8 = 2,
  kFloat16 = 3,
  kBFloat16 = 4,
  kFp4 = 5,
  kFp8 = 6,
  kFloat32 = 7,
  kInt2 = 8,
  kInt3 = 9,
  kInt5 = 10,
  kInt6 = 11
};

constexpr int bits_of(Form form) {
  switch (form) {
    case Form::kInt2:
      return 2;
    case Form::kInt3:
      return 3;
    case Form::kInt4:
    case Form::kFp4:
      return 4;
    case Form::kInt5:
      return 5;
    case Form::kInt6:
      return 6;
    case Form::kInt8:
    case Form::kFp8:
      return 8;
    case Form::kFloat16:
    case Form::kBFloat16:
      return 16;
    case Form::kFloat32:
      break;
  }
  return 32;
}

// Whether rows are rounded to codes of 8 bits; else they stay floats.
constexpr bool takes_codes(Form form) { return bits_of(form) <= 8 && form != Form::kFp8; }

// Whether codes stand in units that no other form has.
constexpr bool has_odd_bits(Form form) { return bits_of(form) < 8 && bits_of(form) != 4; }

// Quantized scales of 2-bit codes have 4 bits: scale and minimum share a byte.
constexpr bool has_paired_scales(Form form) { return form == Form::kInt2; }

// Twice the values of FP4 (E2M1) by their codes, around 12.
constexpr int kFp4Middle = 12;
constexpr uint8_t kFp4Codes[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

// A packed weight in its file: this header, then for each 32 channels for each block one record of
// codes, 32 half scales and, with zero points, 32 half products scale * (zero point - middle).
// Floats have no scales, FP8 (E4M3) has float ones, 256 times what its codes are multiplied with.
// Quantized scales: a record is of `kSpan` inputs. Its codes precede for each block 32 scales of 8 bits, then minima
// likewise, then the 32 half scales of the scales, and those of the minima. A weight is scale * code - minimum.
struct Header {
  char magic[8];  // "edgellmW"
  uint32_t version, form;
  uint32_t in_features, out_features;
  uint32_t block, has_zero_points;
  uint32_t is_gated;  // 16 gate channels and their 16 up channels take turns
  float multiplier;  // of all scales; a power of two
  uint64_t bytes;  // header and records
  uint32_t input_terms;  // codes of 8 bits that stand for an input: 1, or 2 of which the second is 1/128
  uint32_t has_quantized_scales;
  uint8_t reserved[8];
};
static_assert(sizeof(Header) == 64, "the header is part of the file format");

struct Weight {
  Form form;
  bool has_zero_points, is_gated, has_quantized_scales;  // zero points: or minima
  int input_terms;
  int64_t in_features, out_features, block;
  float multiplier;
  const uint8_t* records;

  int64_t blocks() const { return (in_features + block - 1) / block; }
  int64_t groups() const { return (out_features + kGroup - 1) / kGroup; }
  int64_t outputs() const { return is_gated ? out_features / 2 : out_features; }
  // Around which signed codes are stored; of INT8 it depends on the processor.
  int middle() const {
    if (form == Form::kFp4) return kFp4Middle;
    const bool has_minima = has_quantized_scales && has_zero_points;
    return has_minima || !takes_codes(form) ? 0 : 1 << (bits_of(form) - 1);
  }
  int64_t span() const { return has_quantized_scales ? kSpan : block; }  // inputs of a record
  int64_t code_bytes() const { return span() * kGroup * bits_of(form) / 8; }
  // Bytes of all blocks' scales where these are quantized; minima follow.
  int64_t scale_bytes() const { return has_quantized_scales ? kSpan / block * kGroup : 0; }
  int64_t halves_at() const {  // from a record's first byte on
    return code_bytes() + scale_bytes() * (1 + (has_zero_points && !has_paired_scales(form)));
  }
  int64_t record_bytes() const {
    const int of_channel = form == Form::kFp8 ? 4 : takes_codes(form) ? 2 * (1 + has_zero_points) : 0;
    return halves_at() + of_channel * kGroup;
  }
  int64_t group_bytes() const { return (in_features + span() - 1) / span() * record_bytes(); }
};

// Reads a header; returns what is wrong with it, or nullptr.
const char* read_weight(const void* data, size_t size, Weight* weight);

// Rows as the products take them: int8 per block of what takes codes, else float.
struct Rows {
  int64_t stride;  // from row to row of `floats`, and from term to term of `codes`, in elements
  int64_t blocks;  // from row to row of the others
  int8_t* codes;
  float* scales;  // of a block, times the weight's multiplier
  int32_t* starts;  // of a block's sums: what brings codes around their middle
  float* offsets;  // of a block: - scale * (sum of its codes), the factor of zero points
  float* floats;
};
// What the weights of one output channel stand for, [in_features]; not of gated weights.
void decode_channel(const Weight& weight, int64_t channel, float* out);

// Factors of a channel that replace the packed ones: (code + middle) * scale + minimum.
struct OwnFactors {
  float middle;
  const float *scales, *minima;  // [blocks]; no minima: nullptr
};
void decode_codes(const Weight& weight, int64_t channel, const OwnFactors& factors, float* out);

size_t rows_bytes(const Weight& weight, int64_t rows);
Rows place_rows(const Weight& weight, int64_t rows, void* memory);  // aligned to 64 bytes

struct Prologue {
  const Weight* weight;
  const float* x;  // [M, K]
  const float* skip;  // [M, K] added to x, or nullptr
  const float* gamma;  // [K] of an RMSNorm, or nullptr
  float epsilon;
  float* sum;  // [M, K] x + skip, or nullptr
  Rows rows;
};

struct Product {
  const Weight* weight;
  Rows rows;
  int64_t num_rows;
  const float* bias;  // [N] or nullptr
  const float* residual;  // [M, N] or nullptr
  float* y;  // [M, outputs]
  // Of gated weights: gate * sigmoid(gate * (alpha + cubic * gate^2)) * (up + offset), within a limit > 0.
  float alpha = 1, limit = 0, offset = 0, cubic = 0;
  const float* delta = nullptr;  // [M, N] that is added first
};

// What an adapter adds to a linear layer for a row: (x A^T) B.
struct LowRank {
  int64_t in_features, rank, outputs;
  const float* a;  // [rank, in_features]
  const float* b;  // [rank, outputs], times the adapter's scale
};

// kInt4: see `int4_rows.h`. Rows are rotated by a Walsh-Hadamard transform and also kept in float16, in pages of their
// own. Row p attends to the keys p - kRecent + 1 to p in float16 and to earlier ones in 4 bits.
enum class CacheType : uint32_t { kFloat32, kFloat16, kInt8, kInt4, kBFloat16 };

constexpr int64_t kInt4Block = 32;  // numbers with one scale
constexpr int64_t kRecent = 128;
constexpr int64_t kMostDim = 512;  // head_dim
constexpr int64_t int4_row_bytes(int64_t dim) { return dim / 2 + 2 * (dim / kInt4Block); }  // of whole blocks

constexpr int kSeen = 3;  // numbers of a row in `Attention::Scratch::seen`

// Attention of the new rows of one sequence, which are first written to its cache.
struct Attention {
  struct Shape {
    int64_t rows;  // new ones
    int64_t heads, kv_heads, head_dim;
    int64_t write_index;  // slot of the first new row
    int64_t mask_columns;  // the last slots, to which the mask applies
  } shape;
  struct Inputs {
    const float *q, *k, *v;  // without k and v, the new rows are in the cache already
    int64_t q_stride, k_stride, v_stride;  // from row to row
    const float *cos, *sin;  // [table_rows, rotary_dim / 2], or nullptr
    const int64_t* positions;  // [rows] in the tables, or nullptr: tables have one row for each
    int64_t rotary_dim, table_rows;
    const uint8_t* mask;  // [rows, mask_columns], or nullptr: causal
    const float *q_norm, *k_norm, *sinks;  // [head_dim], [head_dim], [heads], or nullptr
  } inputs;
  struct Rules {
    int64_t window;  // 0: all
    float scale, softcap, epsilon;
    bool is_interleaved;  // RoPE
    bool is_bidirectional;  // rows attend to later ones, in a window of both sides; without a mask
    bool is_causal;  // rows attend to no later ones, whatever the mask
  } rules;
  // Slots are logical indices: slot s is in block pages[s / page_rows]. Blocks before all windows are not read.
  struct Cache {
    CacheType type;
    float k_scale, v_scale;
    int64_t page_rows;
    const int64_t* pages;  // as many as the slots up to the last new row take
    void *keys, *values;  // [pages, kv_heads, page_rows, row_elements]
    const int64_t* recent_pages;  // of kInt4
    uint16_t *recent_keys, *recent_values;  // [pages, kv_heads, page_rows, padded_dim]
  } cache;
  float* y;  // [rows, heads * head_dim]
  struct Scratch {
    float* queries;  // [rows, heads, query_floats]
    float* partials;  // [chunks, rows, heads, padded_dim + 16]; nullptr if not split
    int32_t* slots;  // [rows, mask_columns], the last slots that each row attends to
    // [rows, kSeen]: number of keys that a row attends to, of contiguous ones, and of those up to the row itself
    int32_t* seen;
  } scratch;

  // Of the cache's type, bytes of kInt4.
  int64_t row_elements() const {
    return cache.type == CacheType::kInt4 ? int4_row_bytes(padded_dim()) : shape.head_dim;
  }
  int64_t padded_dim() const {
    const int64_t step = cache.type == CacheType::kInt4 ? kInt4Block : kStrip;
    return (shape.head_dim + step - 1) / step * step;
  }
  bool rounds_queries() const { return cache.type == CacheType::kInt4 || cache.type == CacheType::kBFloat16; }
  int64_t query_floats() const { return padded_dim() * (rounds_queries() ? 2 : 1); }
  int64_t partial_floats() const { return padded_dim() + kStrip; }
  // Size of `work` for some rows: keys, values and transposed keys of a chunk, and sums.
  int64_t work_floats(int64_t for_rows) const {
    return 3 * kChunk * padded_dim() + for_rows * shape.heads / shape.kv_heads * partial_floats();
  }
  int64_t end_slot() const { return shape.write_index + shape.rows; }
  int64_t first_chunk() const { return first_slot() / kChunk; }
  int64_t chunks() const { return (end_slot() + kChunk - 1) / kChunk - first_chunk(); }
  // The index of a slot's first number in `keys` and `values`.
  int64_t place(int64_t kv_head, int64_t slot) const {
    return row_at(cache.pages, kv_head, slot) * row_elements();
  }
  int64_t recent_place(int64_t kv_head, int64_t slot) const {
    return row_at(cache.recent_pages, kv_head, slot) * padded_dim();
  }
  int64_t row_at(const int64_t* pages, int64_t kv_head, int64_t slot) const {
    const int64_t page = pages[slot / cache.page_rows];
    return (page * shape.kv_heads + kv_head) * cache.page_rows + slot % cache.page_rows;
  }
  // The first slot in the window of both sides of a row, and the slot after the last.
  int64_t first_around(int64_t row) const {
    const int64_t own = shape.write_index + row;
    return rules.window && own + 1 > rules.window ? own + 1 - rules.window : 0;
  }
  int64_t end_around(int64_t row) const {
    const int64_t end = shape.write_index + row + rules.window;
    return rules.window && end < end_slot() ? end : end_slot();
  }
  // The first slot to which a row can attend.
  int64_t first_slot() const { return rules.is_bidirectional ? first_around(0) : first_in(rules.window); }
  // The same of the last `window` keys, 0: all, up to each row.
  int64_t first_in(int64_t window) const {
    const int64_t least_end = inputs.mask ? end_slot() - shape.mask_columns : shape.write_index + 1;
    return window && least_end > window ? least_end - window : 0;
  }
};

// Of a segment of logits: the largest, and the sum of exp(logit - max), from which log-sum-exp follows.
struct SegmentMax {
  float max, sum_exp;
};

// A row of a head of linear attention, whose matrices are [keys, values]; see `delta_rule.h`.
struct DeltaRow {
  int64_t keys, values;
  const float* from;  // N, of the row before
  float* to;  // M
  const float *q, *k;  // [keys]; without q nothing is read
  const float* v;  // [values]
  const float* decays;  // [keys], of each channel; nullptr: `decay` is that of all
  float decay, rate;
  float *delta, *y;  // [values]
};

struct Kernels {
  const char* name;
  void (*prepare)(const Prologue&, int64_t first_row, int64_t last_row);
  void (*product)(const Product&, int64_t first_group, int64_t last_group);
  void (*write_kv)(const Attention&, int64_t row);
  void (*attend_chunk)(const Attention&, int64_t kv_head, int64_t chunk, float* work);
  void (*attend_rows)(const Attention&, int64_t kv_head, int64_t first_row, int64_t last_row, float* work);
  void (*merge)(const Attention&, int64_t row);
  SegmentMax (*max_and_logsumexp)(const float* logits, int64_t count, bool with_sum);
  // exp(g), and k times it, of each channel.
  void (*delta_decays)(const float* g, const float* k, int64_t keys, float* decays, float* decayed);
  void (*delta_recall)(const DeltaRow&);
  void (*delta_update)(const DeltaRow&);
  void (*lora_down)(const LowRank&, const float* x, int64_t first, int64_t last, float* inner);  // of [rank]
  // Strips of 16 outputs, `step` floats from one to the next in base (or nullptr) and y.
  void (*lora_up)(const LowRank&, const float* inner, int64_t first, int64_t last, int64_t step, const float* base,
                  float* y);
};

// The tables of all instruction sets, of which those of the compiler's target are defined; see `instruction_set.h`.
extern const Kernels k_scalar;
extern const Kernels k_avx2, k_avx_vnni, k_avx512_vnni, k_avx512_bf16;
extern const Kernels k_neon_dotprod, k_neon_i8mm;
const Kernels& amx_kernels();

// Best first; the last is the scalar reference. Those that this processor lacks are left out.
const Kernels* const* available_kernels(int* count);

// The best of them.
const Kernels& kernels();
const Kernels* find_kernels(const char* name);  // nullptr: not on this processor

}  // namespace edgellm

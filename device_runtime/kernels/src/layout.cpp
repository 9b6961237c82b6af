#include <cmath>
#include <cstring>

#include "scalar.h"

namespace edgellm {
namespace {

constexpr char kMagic[8] = {'e', 'd', 'g', 'e', 'l', 'l', 'm', 'W'};
constexpr uint32_t kVersion = 2;
constexpr uint32_t kMostFeatures = 1u << 24;

size_t up(size_t bytes) { return (bytes + 63) & ~size_t(63); }

struct Places {
  size_t codes, scales, starts, offsets, floats, end;
  int64_t stride;
};

Places places(const Weight& w, int64_t rows) {
  Places p{};
  // Off a power of two, so that rows do not share the few places of one cache set.
  p.stride = (takes_codes(w.form) ? w.blocks() * w.block : w.in_features + 15) / 64 * 64 + 64;
  const size_t count = size_t(rows), blocks = size_t(w.blocks()) * count;
  const bool quantized = takes_codes(w.form);
  p.scales = p.codes + (quantized ? up(count * w.input_terms * p.stride) : 0);
  const size_t of_blocks = quantized ? up(blocks * 4) : 0;
  p.starts = p.scales + of_blocks;
  p.offsets = p.starts + of_blocks;
  p.floats = p.offsets + of_blocks;
  p.end = p.floats + up(count * p.stride * 4);
  return p;
}

uint16_t word_at(const uint8_t* words, int64_t index) {
  uint16_t out;
  std::memcpy(&out, words + 2 * index, 2);
  return out;
}
float half_at(const uint8_t* halves, int64_t index) { return half_value(word_at(halves, index)); }
float float_at(const uint8_t* floats, int64_t index) {
  float out;
  std::memcpy(&out, floats + 4 * index, 4);
  return out;
}

// What the code of input k of a record stands for, around its middle.
float code_value(const Weight& w, const uint8_t* record, int64_t lane, int64_t k) {
  const Form form = w.form;
  if (form == Form::kFloat16) return half_at(record, lane);
  if (form == Form::kBFloat16) return float_of(uint32_t(word_at(record, lane)) << 16);
  if (form == Form::kFloat32) return float_at(record, lane);
  if (form == Form::kFp8) {  // 1/256 of what the code stands for
    const int code = record[k * kGroup + lane];
    return half_value(uint16_t((code & 128) << 8 | (code & 127) << 7));
  }
  const int code = code_at(bits_of(form), record, kGroup, lane, k);
  return float((form == Form::kFp4 ? kFp4Codes[code] : code) - w.middle());
}

// Blocks of a form that there are kernels for.
bool is_known(const Header& h) {
  const Form form = Form(h.form);
  const uint32_t block = h.block;
  const bool is_power = block == 16 || block == 32 || block == 64 || block == 128;
  if (h.has_quantized_scales) {
    const bool has_minima = form == Form::kInt2 || form == Form::kInt4 || form == Form::kInt5;
    return (has_minima || form == Form::kInt3 || form == Form::kInt6) && has_minima == (h.has_zero_points == 1) &&
           block == (form == Form::kInt4 || form == Form::kInt5 ? 32 : 16) && h.in_features % kSpan == 0;
  }
  if (form == Form::kFp8) return block && block <= h.in_features;
  if (!takes_codes(form)) return block == 1;
  if (form == Form::kInt3 || form == Form::kInt6) return false;
  return is_power && (form != Form::kFp4 || block <= 32) && (form != Form::kInt5 || block >= 32);
}

bool may_have_zero_points(const Header& h) {
  const Form form = Form(h.form);
  return h.has_quantized_scales || form == Form::kInt4 || form == Form::kInt5 || form == Form::kInt8;
}

// Scale and offset of input k of a record.
struct Factors {
  float scale = 1, offset = 0;
};
Factors factors_of(const Weight& w, const uint8_t* record, int64_t lane, int64_t k) {
  const uint8_t* halves = record + w.halves_at();
  Factors f;
  if (w.form == Form::kFp8) f.scale = float_at(halves, lane);
  if (takes_codes(w.form)) f.scale = w.multiplier * half_at(halves, lane);
  if (w.has_zero_points) f.offset = w.multiplier * half_at(halves + 2 * kGroup, lane);
  if (!w.has_quantized_scales) return f;
  const uint8_t* scales = record + w.code_bytes() + k / w.block * kGroup + lane;
  const bool is_paired = has_paired_scales(w.form);
  f.scale *= float(is_paired ? *scales & 15 : int8_t(*scales));
  if (w.has_zero_points) f.offset *= float(is_paired ? *scales >> 4 : int8_t(scales[w.scale_bytes()]));
  return f;
}

}  // namespace

const char* read_weight(const void* data, size_t size, Weight* weight) {
  Header h;
  if (size < sizeof h) return "the packed weight is shorter than its header";
  std::memcpy(&h, data, sizeof h);
  if (std::memcmp(h.magic, kMagic, sizeof kMagic)) return "this is no packed weight of edgellm";
  if (h.version != kVersion) return "the packed weight is of another version of edgellm";
  if (h.form < 1 || h.form > 11) return "the packed weight has a form that this version does not know";
  const Form form = Form(h.form);
  if (!h.in_features || !h.out_features || h.in_features > kMostFeatures || h.out_features > kMostFeatures)
    return "the packed weight has an impossible shape";
  if (!is_known(h)) return "the packed weight has blocks that this version does not know";
  if (h.has_zero_points > (may_have_zero_points(h) ? 1u : 0u) || h.is_gated > 1 || h.has_quantized_scales > 1 ||
      h.input_terms < 1 || h.input_terms > (form == Form::kInt8 ? 2u : 1u))
    return "the packed weight has flags that this version does not know";
  if (h.is_gated && h.out_features % kGroup) return "gated channels do not come in groups of 32";
  if (!std::isfinite(h.multiplier) || h.multiplier <= 0) return "the packed weight has no sound multiplier";
  *weight = {form,
             h.has_zero_points == 1,
             h.is_gated == 1,
             h.has_quantized_scales == 1,
             int(h.input_terms),
             h.in_features,
             h.out_features,
             h.block,
             h.multiplier,
             static_cast<const uint8_t*>(data) + sizeof h};
  const uint64_t expected = sizeof h + uint64_t(weight->groups()) * weight->group_bytes();
  if (h.bytes != expected || size != expected) return "the packed weight is cut off or too long";
  return nullptr;
}

void decode_channel(const Weight& w, int64_t channel, float* out) {
  const int64_t lane = channel % kGroup, span = w.span();
  const uint8_t* record = w.records + channel / kGroup * w.group_bytes();
  for (int64_t first = 0; first < w.in_features; first += span, record += w.record_bytes()) {
    const int64_t count = w.in_features - first < span ? w.in_features - first : span;
    Factors f;
    for (int64_t k = 0; k < count; k++) {
      if (k % w.block == 0) f = factors_of(w, record, lane, k);
      out[first + k] = code_value(w, record, lane, k) * f.scale - f.offset;
    }
  }
}

void decode_codes(const Weight& w, int64_t channel, const OwnFactors& factors, float* out) {
  const int64_t lane = channel % kGroup;
  const uint8_t* record = w.records + channel / kGroup * w.group_bytes();
  for (int64_t block = 0; block < w.blocks(); block++, record += w.record_bytes()) {
    const float scale = factors.scales[block], minimum = factors.minima ? factors.minima[block] : 0;
    const int64_t first = block * w.block, count = w.in_features - first < w.block ? w.in_features - first : w.block;
    for (int64_t k = 0; k < count; k++)
      out[first + k] = (code_value(w, record, lane, k) + factors.middle) * scale + minimum;
  }
}

size_t rows_bytes(const Weight& weight, int64_t rows) { return places(weight, rows).end; }

Rows place_rows(const Weight& weight, int64_t rows, void* memory) {
  const Places p = places(weight, rows);
  char* base = static_cast<char*>(memory);
  return {p.stride,
          weight.blocks(),
          reinterpret_cast<int8_t*>(base + p.codes),
          reinterpret_cast<float*>(base + p.scales),
          reinterpret_cast<int32_t*>(base + p.starts),
          reinterpret_cast<float*>(base + p.offsets),
          reinterpret_cast<float*>(base + p.floats)};
}

}  // namespace edgellm

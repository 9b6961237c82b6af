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

// What the code of input k of a record stands for, around its middle.
float code_value(Form form, const uint8_t* record, int64_t lane, int64_t k) {
  if (form == Form::kFloat16) return half_at(record, lane);
  if (form == Form::kBFloat16) return float_of(uint32_t(word_at(record, lane)) << 16);
  if (form == Form::kFp8) {  // 1/256 of what the code stands for
    const int code = record[k * kGroup + lane];
    return half_value(uint16_t((code & 128) << 8 | (code & 127) << 7));
  }
  const int step = form == Form::kInt8 ? 4 : 8;  // inputs of 4 bytes
  const int byte = record[(k / step * kGroup + lane) * 4 + k % 4], nibble = k / 4 % 2 ? byte >> 4 : byte & 15;
  return float(form == Form::kInt8 ? byte - 128 : form == Form::kInt4 ? nibble - 8 : kFp4Codes[nibble] - kFp4Middle);
}

}  // namespace

const char* read_weight(const void* data, size_t size, Weight* weight) {
  Header h;
  if (size < sizeof h) return "the packed weight is shorter than its header";
  std::memcpy(&h, data, sizeof h);
  if (std::memcmp(h.magic, kMagic, sizeof kMagic)) return "this is no packed weight of edgellm";
  if (h.version != kVersion) return "the packed weight is of another version of edgellm";
  if (h.form < 1 || h.form > 7) return "the packed weight has a form that this version does not know";
  const Form form = Form(h.form);
  if (!h.in_features || !h.out_features || h.in_features > kMostFeatures || h.out_features > kMostFeatures)
    return "the packed weight has an impossible shape";
  const bool is_known = h.block == 16 || h.block == 32 || (form != Form::kFp4 && (h.block == 64 || h.block == 128));
  if (form == Form::kFp8 ? !h.block || h.block > h.in_features : takes_codes(form) ? !is_known : h.block != 1)
    return "the packed weight has blocks that this version does not know";
  if (h.has_zero_points > (form == Form::kInt4 || form == Form::kInt8 ? 1u : 0u) || h.is_gated > 1 ||
      h.input_terms < 1 || h.input_terms > (form == Form::kInt8 ? 2u : 1u))
    return "the packed weight has flags that this version does not know";
  if (h.is_gated && h.out_features % kGroup) return "gated channels do not come in groups of 32";
  if (!std::isfinite(h.multiplier) || h.multiplier <= 0) return "the packed weight has no sound multiplier";
  *weight = {form,
             h.has_zero_points == 1,
             h.is_gated == 1,
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
  const int64_t lane = channel % kGroup;
  const uint8_t* record = w.records + channel / kGroup * w.group_bytes();
  for (int64_t first = 0; first < w.in_features; first += w.block, record += w.record_bytes()) {
    const uint8_t* scales = record + w.code_bytes();
    float scale = 1, offset = 0;
    if (w.form == Form::kFp8) std::memcpy(&scale, scales + 4 * lane, 4);
    if (takes_codes(w.form)) scale = w.multiplier * half_at(scales, lane);
    if (w.has_zero_points) offset = w.multiplier * half_at(scales + 2 * kGroup, lane);
    const int64_t count = w.in_features - first < w.block ? w.in_features - first : w.block;
    for (int64_t k = 0; k < count; k++) out[first + k] = code_value(w.form, record, lane, k) * scale - offset;
  }
}

void decode_codes(const Weight& w, int64_t channel, const OwnFactors& factors, float* out) {
  const int64_t lane = channel % kGroup;
  const uint8_t* record = w.records + channel / kGroup * w.group_bytes();
  for (int64_t block = 0; block < w.blocks(); block++, record += w.record_bytes()) {
    const float scale = factors.scales[block], minimum = factors.minima ? factors.minima[block] : 0;
    const int64_t first = block * w.block, count = w.in_features - first < w.block ? w.in_features - first : w.block;
    for (int64_t k = 0; k < count; k++)
      out[first + k] = (code_value(w.form, record, lane, k) + factors.middle) * scale + minimum;
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

#include <cmath>
#include <cstring>

#include "kernels.h"

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

}  // namespace

const char* read_weight(const void* data, size_t size, Weight* weight) {
  Header h;
  if (size < sizeof h) return "the packed weight is shorter than its header";
  std::memcpy(&h, data, sizeof h);
  if (std::memcmp(h.magic, kMagic, sizeof kMagic)) return "this is no packed weight of edgellm";
  if (h.version != kVersion) return "the packed weight is of another version of edgellm";
  if (h.form < 1 || h.form > 6) return "the packed weight has a form that this version does not know";
  const Form form = Form(h.form);
  if (!h.in_features || !h.out_features || h.in_features > kMostFeatures || h.out_features > kMostFeatures)
    return "the packed weight has an impossible shape";
  const bool is_known = h.block == 16 || (form != Form::kFp4 && (h.block == 32 || h.block == 64 || h.block == 128));
  if (form == Form::kFp8 ? !h.block || h.block > h.in_features : takes_codes(form) ? !is_known : h.block != 1)
    return "the packed weight has blocks that this version does not know";
  if (h.has_zero_points > (form == Form::kInt4 || form == Form::kInt8 ? 1u : 0u) || h.is_gated > 1 || h.input_terms < 1 ||
      h.input_terms > (form == Form::kInt8 ? 2u : 1u))
    return "the packed weight has flags that this version does not know";
  if (h.is_gated && h.out_features % kGroup) return "gated channels do not come in groups of 32";
  if (!std::isfinite(h.multiplier) || h.multiplier <= 0) return "the packed weight has no sound multiplier";
  *weight = {form, h.has_zero_points == 1, h.is_gated == 1, int(h.input_terms), h.in_features, h.out_features, h.block,
             h.multiplier, static_cast<const uint8_t*>(data) + sizeof h};
  const uint64_t expected = sizeof h + uint64_t(weight->groups()) * weight->group_bytes();
  if (h.bytes != expected || size != expected) return "the packed weight is cut off or too long";
  return nullptr;
}

size_t rows_bytes(const Weight& weight, int64_t rows) { return places(weight, rows).end; }

Rows place_rows(const Weight& weight, int64_t rows, void* memory) {
  const Places p = places(weight, rows);
  char* base = static_cast<char*>(memory);
  return {p.stride, weight.blocks(), reinterpret_cast<int8_t*>(base + p.codes), reinterpret_cast<float*>(base + p.scales),
          reinterpret_cast<int32_t*>(base + p.starts), reinterpret_cast<float*>(base + p.offsets), reinterpret_cast<float*>(base + p.floats)};
}

}  // namespace edgellm

// Prologue of products: skip, RMSNorm, quantization of rows.
#pragma once

#include "kernels.h"
#include "vector_math.h"

namespace edgellm {
namespace {

// Quantizes a block to int8, with two terms (T) also the rest, `stride` codes later, or both as one code of 16 bits.
// Returns the sum of all codes.
template <class Isa, int T>
int32_t quantize_block(const float* x, int64_t count, int64_t block, float multiplier, int8_t* codes, int64_t stride,
                       float* scale) {
  F<Isa> largest = Isa::set(0);
  for (int64_t k = 0; k < count; k += kStrip) largest = Isa::max(largest, Isa::abs(load_up_to<Isa>(x + k, count - k)));
  const float top = Isa::largest(largest);
  const bool is_zero = !(top > 1e-30f);  // or its inverse overflows
  const F<Isa> inverse = Isa::set(is_zero ? 0.f : 127.f / top);
  I<Isa> total = Isa::set_int(0), fine = Isa::set_int(0);
  for (int64_t k = 0; k < block; k += kStrip) {
    const F<Isa> steps = k < count ? Isa::mul(load_up_to<Isa>(x + k, count - k), inverse) : Isa::set(0);
    const I<Isa> code = Isa::to_int(steps);
    total = Isa::add_int(total, code);
    if (T == 1) {
      Isa::store_codes(codes + k, code);
      continue;
    }
    const I<Isa> rest = Isa::to_int(Isa::mul(Isa::sub(steps, Isa::to_float(code)), Isa::set(128)));
    fine = Isa::add_int(fine, rest);
    if constexpr (Isa::kJoinsTerms) {
      Isa::store_words(codes + 2 * k, Isa::add_int(Isa::times128(code), rest));
    } else {
      Isa::store_codes(codes + k, code);
      Isa::store_codes(codes + stride + k, rest);
    }
  }
  *scale = is_zero ? 0.f : top / (T == 1 ? 127.f : 127.f * 128.f) * multiplier;
  return Isa::sum(T == 1 ? total : Isa::add_int(Isa::times128(total), fine));
}

template <class Isa>
void prepare(const Prologue& p, int64_t first_row, int64_t last_row) {
  const Weight& w = *p.weight;
  const int64_t K = w.in_features;
  const bool joins_terms = Isa::kJoinsTerms && w.input_terms == 2;
  const int middle = w.form == Form::kInt8 && !joins_terms ? Isa::kMiddle8 : w.middle();
  for (int64_t row = first_row; row < last_row; row++) {
    const float* x = p.x + row * K;
    float* out = p.rows.floats + row * p.rows.stride;
    if (p.skip) {
      float* sum = p.sum ? p.sum + row * K : out;
      for (int64_t k = 0; k < K; k++) sum[k] = x[k] + p.skip[row * K + k];
      x = sum;
    }
    if (p.gamma) {
      const float factor = inverse_rms<Isa>(x, K, p.epsilon);
      for (int64_t k = 0; k < K; k++) out[k] = x[k] * factor * p.gamma[k];
      x = out;
    }
    if (!takes_codes(w.form)) {
      if (x != out) __builtin_memcpy(out, x, K * sizeof(float));
      continue;
    }
    for (int64_t b = 0; b < p.rows.blocks; b++) {
      const int64_t k = b * w.block, at = row * p.rows.blocks + b;
      const int64_t count = K - k < w.block ? K - k : w.block;
      float& scale = p.rows.scales[at];
      int8_t* codes = p.rows.codes + row * w.input_terms * p.rows.stride + (joins_terms ? 2 * k : k);
      const auto quantize = w.input_terms == 1 ? quantize_block<Isa, 1> : quantize_block<Isa, 2>;
      const int32_t sum = quantize(x + k, count, w.block, w.multiplier, codes, p.rows.stride, &scale);
      p.rows.starts[at] = -middle * sum;
      p.rows.offsets[at] = -scale * float(sum);
    }
  }
}

}  // namespace
}  // namespace edgellm

// Rows as the products take them. Included by `instruction_set.h` with `Set`, an instruction set.
#pragma once

#include "vector_math.h"

namespace edgellm {
namespace {

// Codes of one block, and with two terms those of what is left, `stride` on; the sum of all, and the scale.
template <int T>
int32_t quantize_block(const float* x, int64_t count, int64_t block, float multiplier, int8_t* codes, int64_t stride,
                       float* scale) {
  F largest = Set::set(0);
  for (int64_t k = 0; k < count; k += kStrip) largest = Set::max(largest, Set::abs(load_up_to(x + k, count - k)));
  const float top = Set::largest(largest);
  const bool is_zero = !(top > 1e-30f);  // what has no inverse
  const F inverse = Set::set(is_zero ? 0.f : 127.f / top);
  I total = Set::set_int(0), fine = Set::set_int(0);
  for (int64_t k = 0; k < block; k += kStrip) {
    const F steps = k < count ? Set::mul(load_up_to(x + k, count - k), inverse) : Set::set(0);
    const I code = Set::to_int(steps);
    total = Set::add_int(total, code);
    Set::store_codes(codes + k, code);
    if (T == 1) continue;
    const I rest = Set::to_int(Set::mul(Set::sub(steps, Set::to_float(code)), Set::set(128)));
    fine = Set::add_int(fine, rest);
    Set::store_codes(codes + stride + k, rest);
  }
  *scale = is_zero ? 0.f : top / (T == 1 ? 127.f : 127.f * 128.f) * multiplier;
  return Set::sum(T == 1 ? total : Set::add_int(Set::times128(total), fine));
}

// sqrt and division are exact by the standard, so that this is one number on every processor.
inline float inverse_rms(const float* x, int64_t count, float epsilon) {
  F squares = Set::set(0);
  for (int64_t k = 0; k < count; k += kStrip) {
    const F part = load_up_to(x + k, count - k);
    squares = Set::fma(part, part, squares);
  }
  return 1.f / __builtin_sqrtf(Set::sum(squares) / float(count) + epsilon);
}

void prepare(const Prologue& p, int64_t first_row, int64_t last_row) {
  const Weight& w = *p.weight;
  const int64_t K = w.in_features;
  const int middle = w.form == Form::kInt4 ? 8 : w.form == Form::kFp4 ? kFp4Middle : Set::kMiddle8;
  for (int64_t row = first_row; row < last_row; row++) {
    const float* x = p.x + row * K;
    float* out = p.rows.floats + row * p.rows.stride;
    if (p.skip) {
      float* sum = p.sum ? p.sum + row * K : out;
      for (int64_t k = 0; k < K; k++) sum[k] = x[k] + p.skip[row * K + k];
      x = sum;
    }
    if (p.gamma) {
      const float factor = inverse_rms(x, K, p.epsilon);
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
      int8_t* codes = p.rows.codes + row * w.input_terms * p.rows.stride + k;
      const auto quantize = w.input_terms == 1 ? quantize_block<1> : quantize_block<2>;
      const int32_t sum = quantize(x + k, count, w.block, w.multiplier, codes, p.rows.stride, &scale);
      p.rows.starts[at] = -middle * sum;
      p.rows.offsets[at] = -scale * float(sum);
    }
  }
}

}  // namespace
}  // namespace edgellm

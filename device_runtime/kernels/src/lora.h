// What adapters add to linear layers. Included by `instruction_set.h` with `Set`, an instruction set.
#pragma once

#include "vector_math.h"

namespace edgellm {
namespace {

// inner[r] of R rows of A: sixteen sums along x, then the sum of these, whatever R is.
template <int R>
void lora_down_rows(const LowRank& layer, const float* x, int64_t first, float* inner) {
  const int64_t K = layer.in_features;
  const float* a = layer.a + first * K;
  F sums[R];
  for (F& one : sums) one = Set::set(0);
  for (int64_t k = 0; k < K; k += kStrip) {
    const F part = load_up_to(x + k, K - k);
    for (int r = 0; r < R; r++) sums[r] = Set::fma(load_up_to(a + r * K + k, K - k), part, sums[r]);
  }
  for (int r = 0; r < R; r++) inner[first + r] = Set::sum(sums[r]);
}

void lora_down(const LowRank& layer, const float* x, int64_t first, int64_t last, float* inner) {
  constexpr int kAtOnce = 4;
  int64_t r = first;
  for (; r + kAtOnce <= last; r += kAtOnce) lora_down_rows<kAtOnce>(layer, x, r, inner);
  for (; r < last; r++) lora_down_rows<1>(layer, x, r, inner);
}

void lora_up(const LowRank& layer, const float* inner, int64_t first, int64_t last, int64_t step, const float* base,
             float* y) {
  const int64_t N = layer.outputs;
  for (int64_t strip = first; strip < last; strip++) {
    const int64_t at = strip * kStrip, rest = N - at;
    F sum = Set::set(0);
    for (int64_t r = 0; r < layer.rank; r++)
      sum = Set::fma(load_up_to(layer.b + r * N + at, rest), Set::set(inner[r]), sum);
    if (base) sum = Set::add(load_up_to(base + strip * step, rest), sum);
    store_up_to(y + strip * step, sum, rest);
  }
}

}  // namespace
}  // namespace edgellm

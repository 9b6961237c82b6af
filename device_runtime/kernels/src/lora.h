// Adapters of linear layers: (x A^T) B.
#pragma once

#include "kernels.h"
#include "vector_math.h"

namespace edgellm {
namespace {

// inner[r] of R rows of A: sixteen sums along x, then the sum of these; bits do not depend on R.
template <class Isa, int R>
void lora_down_rows(const LowRank& layer, const float* x, int64_t first, float* inner) {
  const int64_t K = layer.in_features;
  const float* a = layer.a + first * K;
  F<Isa> sums[R];
  for (F<Isa>& one : sums) one = Isa::set(0);
  for (int64_t k = 0; k < K; k += kStrip) {
    const F<Isa> part = load_up_to<Isa>(x + k, K - k);
    for (int r = 0; r < R; r++) sums[r] = Isa::fma(load_up_to<Isa>(a + r * K + k, K - k), part, sums[r]);
  }
  for (int r = 0; r < R; r++) inner[first + r] = Isa::sum(sums[r]);
}

template <class Isa>
void lora_down(const LowRank& layer, const float* x, int64_t first, int64_t last, float* inner) {
  constexpr int kAtOnce = 4;
  int64_t r = first;
  for (; r + kAtOnce <= last; r += kAtOnce) lora_down_rows<Isa, kAtOnce>(layer, x, r, inner);
  for (; r < last; r++) lora_down_rows<Isa, 1>(layer, x, r, inner);
}

template <class Isa>
void lora_up(const LowRank& layer, const float* inner, int64_t first, int64_t last, int64_t step, const float* base,
             float* y) {
  const int64_t N = layer.outputs;
  for (int64_t strip = first; strip < last; strip++) {
    const int64_t at = strip * kStrip, rest = N - at;
    F<Isa> sum = Isa::set(0);
    for (int64_t r = 0; r < layer.rank; r++)
      sum = Isa::fma(load_up_to<Isa>(layer.b + r * N + at, rest), Isa::set(inner[r]), sum);
    if (base) sum = Isa::add(load_up_to<Isa>(base + strip * step, rest), sum);
    store_up_to<Isa>(y + strip * step, sum, rest);
  }
}

}  // namespace
}  // namespace edgellm

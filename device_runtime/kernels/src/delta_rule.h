// The gated delta rule for one row of linear attention: its delta, and the update of the state.
#pragma once

#include "kernels.h"
#include "vector_math.h"

namespace edgellm {
namespace {

template <class Isa>
void delta_decays(const float* g, const float* k, int64_t keys, float* decays, float* decayed) {
  for (int64_t i = 0; i < keys; i += kStrip) {
    const F<Isa> decay = exp<Isa>(load_up_to<Isa>(g + i, keys - i));
    store_up_to<Isa>(decays + i, decay, keys - i);
    store_up_to<Isa>(decayed + i, Isa::mul(load_up_to<Isa>(k + i, keys - i), decay), keys - i);
  }
}

// d = rate * (v - decay * N^T k); with a decay of each channel, k is decayed and `decay` is 1.
template <class Isa>
void delta_recall(const DeltaRow& r) {
  int64_t j = 0;
  for (; j + kStrip <= r.values; j += kStrip) {
    F<Isa> known = Isa::set(0);
    for (int64_t i = 0; i < r.keys; i++)
      known = Isa::fma(Isa::set(r.k[i]), Isa::load(r.from + i * r.values + j), known);
    const F<Isa> missing = Isa::sub(Isa::load(r.v + j), Isa::mul(Isa::set(r.decay), known));
    Isa::store(r.delta + j, Isa::mul(Isa::set(r.rate), missing));
  }
  for (; j < r.values; j++) {
    float known = 0;
    for (int64_t i = 0; i < r.keys; i++) known = __builtin_fmaf(r.k[i], r.from[i * r.values + j], known);
    r.delta[j] = r.rate * (r.v[j] - r.decay * known);
  }
}

template <class Isa, bool kByChannel>
void update_matrix(const DeltaRow& r) {
  const auto decay = [&r](int64_t i) { return kByChannel ? r.decays[i] : r.decay; };
  int64_t j = 0;
  for (; j + kStrip <= r.values; j += kStrip) {
    const F<Isa> delta = Isa::load(r.delta + j);
    F<Isa> y = Isa::set(0);
    for (int64_t i = 0; i < r.keys; i++) {
      const F<Isa> kept = Isa::mul(Isa::set(decay(i)), Isa::load(r.from + i * r.values + j));
      const F<Isa> next = Isa::fma(Isa::set(r.k[i]), delta, kept);
      Isa::store(r.to + i * r.values + j, next);
      if (r.q) y = Isa::fma(Isa::set(r.q[i]), next, y);
    }
    if (r.q) Isa::store(r.y + j, y);
  }
  for (; j < r.values; j++) {
    float y = 0;
    for (int64_t i = 0; i < r.keys; i++) {
      const float next = __builtin_fmaf(r.k[i], r.delta[j], decay(i) * r.from[i * r.values + j]);
      r.to[i * r.values + j] = next;
      if (r.q) y = __builtin_fmaf(r.q[i], next, y);
    }
    if (r.q) r.y[j] = y;
  }
}

// M = decay * N + k d^T, and y = M^T q if there is a q; M may be N.
template <class Isa>
void delta_update(const DeltaRow& r) {
  r.decays ? update_matrix<Isa, true>(r) : update_matrix<Isa, false>(r);
}

}  // namespace
}  // namespace edgellm

// What a row changes in a matrix of linear attention, and reads there. Included by `instruction_set.h` with `Set`.
#pragma once

#include "vector_math.h"

namespace edgellm {
namespace {

// d = rate * (v - decay * N^T k).
void delta_recall(const DeltaRow& r) {
  int64_t j = 0;
  for (; j + kStrip <= r.values; j += kStrip) {
    F known = Set::set(0);
    for (int64_t i = 0; i < r.keys; i++)
      known = Set::fma(Set::set(r.k[i]), Set::load(r.from + i * r.values + j), known);
    const F missing = Set::sub(Set::load(r.v + j), Set::mul(Set::set(r.decay), known));
    Set::store(r.delta + j, Set::mul(Set::set(r.rate), missing));
  }
  for (; j < r.values; j++) {
    float known = 0;
    for (int64_t i = 0; i < r.keys; i++) known = __builtin_fmaf(r.k[i], r.from[i * r.values + j], known);
    r.delta[j] = r.rate * (r.v[j] - r.decay * known);
  }
}

// M = decay * N + k d^T, and y = M^T q if there is a q; M may be N.
void delta_update(const DeltaRow& r) {
  int64_t j = 0;
  for (; j + kStrip <= r.values; j += kStrip) {
    const F delta = Set::load(r.delta + j);
    F y = Set::set(0);
    for (int64_t i = 0; i < r.keys; i++) {
      const F kept = Set::mul(Set::set(r.decay), Set::load(r.from + i * r.values + j));
      const F next = Set::fma(Set::set(r.k[i]), delta, kept);
      Set::store(r.to + i * r.values + j, next);
      if (r.q) y = Set::fma(Set::set(r.q[i]), next, y);
    }
    if (r.q) Set::store(r.y + j, y);
  }
  for (; j < r.values; j++) {
    float y = 0;
    for (int64_t i = 0; i < r.keys; i++) {
      const float next = __builtin_fmaf(r.k[i], r.delta[j], r.decay * r.from[i * r.values + j]);
      r.to[i * r.values + j] = next;
      if (r.q) y = __builtin_fmaf(r.q[i], next, y);
    }
    if (r.q) r.y[j] = y;
  }
}

}  // namespace
}  // namespace edgellm

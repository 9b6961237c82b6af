// Functions of sixteen lanes, in the same steps on every instruction set.
#pragma once

#include "kernels.h"

namespace edgellm {
namespace {

using F = Set::F;
using I = Set::I;

inline int64_t least(int64_t x, int64_t y) { return x < y ? x : y; }
inline int64_t most(int64_t x, int64_t y) { return x > y ? x : y; }

// The part of what comes next that one of several loops fetches, while it computes.
struct Share {
  int64_t first, last;
};

inline F load_up_to(const float* p, int64_t count) {
  if (count >= kStrip) return Set::load(p);
  float lanes[kStrip] = {};
  __builtin_memcpy(lanes, p, count * sizeof(float));
  return Set::load(lanes);
}

inline void store_up_to(float* p, F x, int64_t count) {
  if (count >= kStrip) return Set::store(p, x);
  float lanes[kStrip];
  Set::store(lanes, x);
  __builtin_memcpy(p, lanes, count * sizeof(float));
}

// exp with a relative error below 3e-7: 2^n times the series on [-ln 2 / 2, ln 2 / 2].
inline F exp(F x) {
  x = Set::max(Set::min(x, Set::set(88.f)), Set::set(-87.f));
  F n;
  const F power = Set::pow2(Set::mul(x, Set::set(1.44269504f)), n);
  F r = Set::fma(n, Set::set(-0.693145752f), x);  // ln 2 in two parts
  r = Set::fma(n, Set::set(-1.42860677e-6f), r);
  F y = Set::set(1.f / 5040);
  constexpr float kRest[] = {1.f / 720, 1.f / 120, 1.f / 24, 1.f / 6, 0.5f, 1.f, 1.f};
  for (const float c : kRest) y = Set::fma(y, r, Set::set(c));
  return Set::mul(y, power);
}

inline F silu(F x) { return Set::div(x, Set::add(Set::set(1), exp(Set::sub(Set::set(0), x)))); }

__attribute__((noinline)) inline F tanh(F x) {  // few need it: what may call it stays small
  const F e = exp(Set::add(x, x));
  return Set::sub(Set::set(1), Set::div(Set::set(2), Set::add(e, Set::set(1))));
}

inline float exp(float x) {
  float lanes[kStrip];
  Set::store(lanes, exp(Set::set(x)));
  return lanes[0];
}

}  // namespace
}  // namespace edgellm

// Functions of sixteen lanes, with the same steps on every instruction set `Isa` (a class derived from `Vector`).
#pragma once

#include <cstdint>

#include "kernels.h"
#include "vector.h"

namespace edgellm {
namespace {

template <class Isa>
using F = typename Isa::F;  // sixteen floats
template <class Isa>
using I = typename Isa::I;  // sixteen integers

constexpr int64_t least(int64_t x, int64_t y) { return x < y ? x : y; }
constexpr int64_t most(int64_t x, int64_t y) { return x > y ? x : y; }

constexpr float kMostHalf = 65504;  // as the first argument of `min` and `max`: NaN stays NaN

// The part of the next data that one of several loops prefetches while it computes.
struct PrefetchRange {
  int64_t first, last;
};

template <class Isa>
inline F<Isa> load_up_to(const float* p, int64_t count) {
  if (count >= kStrip) return Isa::load(p);
  float lanes[kStrip] = {};
  __builtin_memcpy(lanes, p, count * sizeof(float));
  return Isa::load(lanes);
}

template <class Isa>
inline void store_up_to(float* p, F<Isa> x, int64_t count) {
  if (count >= kStrip) return Isa::store(p, x);
  float lanes[kStrip];
  Isa::store(lanes, x);
  __builtin_memcpy(p, lanes, count * sizeof(float));
}

// exp with a relative error below 3e-7: 2^n times the series on [-ln 2 / 2, ln 2 / 2].
template <class Isa>
inline F<Isa> exp(F<Isa> x) {
  x = Isa::max(Isa::min(x, Isa::set(88.f)), Isa::set(-87.f));
  F<Isa> n;
  const F<Isa> power = Isa::pow2(Isa::mul(x, Isa::set(1.44269504f)), n);
  F<Isa> r = Isa::fma(n, Isa::set(-0.693145752f), x);  // ln 2 in two parts
  r = Isa::fma(n, Isa::set(-1.42860677e-6f), r);
  F<Isa> y = Isa::set(1.f / 5040);
  constexpr float kRest[] = {1.f / 720, 1.f / 120, 1.f / 24, 1.f / 6, 0.5f, 1.f, 1.f};
  for (const float c : kRest) y = Isa::fma(y, r, Isa::set(c));
  return Isa::mul(y, power);
}

template <class Isa>
__attribute__((noinline)) inline F<Isa> tanh(F<Isa> x) {  // rarely called: its callers stay small
  const F<Isa> e = exp<Isa>(Isa::add(x, x));
  return Isa::sub(Isa::set(1), Isa::div(Isa::set(2), Isa::add(e, Isa::set(1))));
}

template <class Isa>
inline float exp(float x) {
  float lanes[kStrip];
  Isa::store(lanes, exp<Isa>(Isa::set(x)));
  return lanes[0];
}

// 1 / RMS. The standard rounds sqrt and division exactly, so the result is equal on all processors.
template <class Isa>
inline float inverse_rms(const float* x, int64_t count, float epsilon) {
  F<Isa> squares = Isa::set(0);
  for (int64_t k = 0; k < count; k += kStrip) {
    const F<Isa> part = load_up_to<Isa>(x + k, count - k);
    squares = Isa::fma(part, part, squares);
  }
  return 1.f / __builtin_sqrtf(Isa::sum(squares) / float(count) + epsilon);
}

}  // namespace
}  // namespace edgellm

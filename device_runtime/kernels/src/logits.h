// Maximum and sum of exponentials of logits.
#pragma once

#include "kernels.h"
#include "vector_math.h"

namespace edgellm {
namespace {

// The maximum of a segment and, with_sum, its sum of exponentials in 16 lanes.
template <class Isa>
SegmentMax max_and_logsumexp(const float* logits, int64_t count, bool with_sum) {
  const int64_t whole = count / kStrip * kStrip;
  F<Isa> largest = Isa::set(logits[0]), total = Isa::set(0);
  for (int64_t i = 0; i < whole; i += kStrip) largest = Isa::max(largest, Isa::load(logits + i));
  float top = Isa::largest(largest), sum = 0;
  for (int64_t i = whole; i < count; i++) top = logits[i] > top ? logits[i] : top;
  if (!with_sum) return {top, 0};
  for (int64_t i = 0; i < whole; i += kStrip)
    total = Isa::add(total, exp<Isa>(Isa::sub(Isa::load(logits + i), Isa::set(top))));
  sum = Isa::sum(total);
  for (int64_t i = whole; i < count; i++) sum += exp<Isa>(logits[i] - top);
  return {top, sum};
}

}  // namespace
}  // namespace edgellm

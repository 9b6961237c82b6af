// What a sweep over logits finds. Included by `instruction_set.h` with `Set`.
#pragma once

#include "vector_math.h"

namespace edgellm {
namespace {

// The maximum of a segment and, with_sum, its sum of exponentials in 16 lanes.
SegmentMax max_and_logsumexp(const float* logits, int64_t count, bool with_sum) {
  const int64_t whole = count / kStrip * kStrip;
  F largest = Set::set(logits[0]), total = Set::set(0);
  for (int64_t i = 0; i < whole; i += kStrip) largest = Set::max(largest, Set::load(logits + i));
  float top = Set::largest(largest), sum = 0;
  for (int64_t i = whole; i < count; i++) top = logits[i] > top ? logits[i] : top;
  if (!with_sum) return {top, 0};
  for (int64_t i = 0; i < whole; i += kStrip)
    total = Set::add(total, exp(Set::sub(Set::load(logits + i), Set::set(top))));
  sum = Set::sum(total);
  for (int64_t i = whole; i < count; i++) sum += exp(logits[i] - top);
  return {top, sum};
}

}  // namespace
}  // namespace edgellm

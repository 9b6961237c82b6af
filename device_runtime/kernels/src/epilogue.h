// What follows the sums of products: biases, gates, residuals. Included with `Set`.
#pragma once

#include "vector_math.h"

namespace edgellm {
namespace {

void write_strip(const Product& p, F sum, int64_t row, int64_t channel) {
  const int64_t N = p.weight->out_features, rest = N - channel;
  if (rest <= 0) return;
  if (p.delta) sum = Set::add(sum, load_up_to(p.delta + row * N + channel, rest));
  if (p.bias) sum = Set::add(sum, load_up_to(p.bias + channel, rest));
  if (p.residual) sum = Set::add(sum, load_up_to(p.residual + row * N + channel, rest));
  store_up_to(p.y + row * N + channel, sum, rest);
}

F gated(const Product& p, F gate, F up) {
  if (!(p.limit > 0)) return Set::mul(silu(gate), up);
  const F limit = Set::set(p.limit);  // stands first: what is no number stays so
  gate = Set::min(limit, gate);
  up = Set::max(Set::set(-p.limit), Set::min(limit, up));
  const F swish = Set::div(gate, Set::add(Set::set(1), exp(Set::mul(gate, Set::set(-p.alpha)))));
  return Set::mul(swish, Set::add(up, Set::set(p.offset)));
}

// Sums of the 32 channels of a group.
void write_group(const Product& p, int64_t group, int64_t row, F low, F high) {
  const int64_t channel = group * kGroup;
  if (!p.weight->is_gated) {
    write_strip(p, low, row, channel);
    write_strip(p, high, row, channel + kStrip);
    return;
  }
  if (p.delta) {
    const float* delta = p.delta + row * p.weight->out_features + channel;
    low = Set::add(low, Set::load(delta));
    high = Set::add(high, Set::load(delta + kStrip));
  }
  if (p.bias) {
    low = Set::add(low, Set::load(p.bias + channel));
    high = Set::add(high, Set::load(p.bias + channel + kStrip));
  }
  Set::store(p.y + row * p.weight->outputs() + channel / 2, gated(p, low, high));
}

}  // namespace
}  // namespace edgellm

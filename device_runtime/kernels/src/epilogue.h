// Epilogue of products: adapters, biases, gates, residuals.
#pragma once

#include "kernels.h"
#include "vector_math.h"

namespace edgellm {
namespace {

template <class Isa>
void write_strip(const Product& p, F<Isa> sum, int64_t row, int64_t channel) {
  const int64_t N = p.weight->out_features, rest = N - channel;
  if (rest <= 0) return;
  if (p.delta) sum = Isa::add(sum, load_up_to<Isa>(p.delta + row * N + channel, rest));
  if (p.bias) sum = Isa::add(sum, load_up_to<Isa>(p.bias + channel, rest));
  if (p.residual) sum = Isa::add(sum, load_up_to<Isa>(p.residual + row * N + channel, rest));
  store_up_to<Isa>(p.y + row * N + channel, sum, rest);
}

template <class Isa>
F<Isa> gated(const Product& p, F<Isa> gate, F<Isa> up) {
  if (p.limit > 0) {
    const F<Isa> limit = Isa::set(p.limit);  // as the first argument: NaN stays NaN
    gate = Isa::min(limit, gate);
    up = Isa::max(Isa::set(-p.limit), Isa::min(limit, up));
  }
  F<Isa> slope = Isa::set(-p.alpha);
  if (p.cubic != 0) slope = Isa::fma(Isa::mul(gate, gate), Isa::set(-p.cubic), slope);
  const F<Isa> activated = Isa::div(gate, Isa::add(Isa::set(1), exp<Isa>(Isa::mul(gate, slope))));
  return Isa::mul(activated, Isa::add(up, Isa::set(p.offset)));
}

// Sums of the 32 channels of a group.
template <class Isa>
void write_group(const Product& p, int64_t group, int64_t row, F<Isa> low, F<Isa> high) {
  const int64_t channel = group * kGroup;
  if (!p.weight->is_gated) {
    write_strip<Isa>(p, low, row, channel);
    write_strip<Isa>(p, high, row, channel + kStrip);
    return;
  }
  if (p.delta) {
    const float* delta = p.delta + row * p.weight->out_features + channel;
    low = Isa::add(low, Isa::load(delta));
    high = Isa::add(high, Isa::load(delta + kStrip));
  }
  if (p.bias) {
    low = Isa::add(low, Isa::load(p.bias + channel));
    high = Isa::add(high, Isa::load(p.bias + channel + kStrip));
  }
  Isa::store(p.y + row * p.weight->outputs() + channel / 2, gated<Isa>(p, low, high));
}

}  // namespace
}  // namespace edgellm

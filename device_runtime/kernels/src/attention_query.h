// A query in attention to a chunk of keys.
#pragma once

#include "kernels.h"
#include "vector_math.h"

namespace edgellm {
namespace {

struct Query {
  int64_t row, first, end, straight;  // the keys [first, end) of a chunk; slots are keys below `straight`
  const float* q;  // [query_floats]
  float* values;  // [padded_dim]
  float top, total;
  float* scores;  // [kChunk], of the chunk's keys
};

template <class Isa>
F<Isa> capped(const Attention& a, F<Isa> scores) {
  if (a.rules.softcap <= 0) return scores;
  return Isa::mul(tanh<Isa>(Isa::div(scores, Isa::set(a.rules.softcap))), Isa::set(a.rules.softcap));
}

}  // namespace
}  // namespace edgellm

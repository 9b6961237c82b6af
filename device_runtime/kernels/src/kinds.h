// What products are compiled for: forms of weights with their flags.
#pragma once

#include "kernels.h"
#include "vector_math.h"

namespace edgellm {
namespace {

constexpr int kAtOnce = 32;  // inputs of a weight with quantized scales: one block, or two of 16 inputs

// `kBlocks` are multiplied at once, `kParts` times for a record.
template <Form kForm_, bool kZero_ = false, int kTerms_ = 1, bool kScaled_ = false>
struct Kind {
  static constexpr Form kForm = kForm_;
  static constexpr bool kZero = kZero_, kScaled = kScaled_;  // zero points or minima; quantized scales
  static constexpr int kTerms = kTerms_;
  static constexpr int kBlocks = kScaled && kForm != Form::kInt4 && kForm != Form::kInt5 ? 2 : 1;
  static constexpr int kParts = kScaled ? kSpan / kAtOnce : 1;
  static constexpr int kScaleBytes = kScaled ? kParts * kBlocks * kGroup : 0;  // minima follow

  static int64_t inputs(const Weight& w) { return kScaled ? kAtOnce : w.block; }
};

// Sums that a product keeps for a row and a channel.
template <class Isa, class Kind>
constexpr int sums_of_row() {
  return Isa::kJoinsTerms ? 1 : Kind::kTerms;
}

// function(kind) of a weight.
template <class Function>
void with_kind(const Weight& w, Function function) {
  const bool zero = w.has_zero_points, scaled = w.has_quantized_scales;
  switch (w.form) {
    case Form::kInt2:
      return scaled ? function(Kind<Form::kInt2, true, 1, true>{}) : function(Kind<Form::kInt2>{});
    case Form::kInt3:
      return function(Kind<Form::kInt3, false, 1, true>{});
    case Form::kInt4:
      return scaled ? function(Kind<Form::kInt4, true, 1, true>{})
             : zero ? function(Kind<Form::kInt4, true>{})
                    : function(Kind<Form::kInt4>{});
    case Form::kInt5:
      return scaled ? function(Kind<Form::kInt5, true, 1, true>{})
             : zero ? function(Kind<Form::kInt5, true>{})
                    : function(Kind<Form::kInt5>{});
    case Form::kInt6:
      return function(Kind<Form::kInt6, false, 1, true>{});
    case Form::kInt8:
      if (w.input_terms == 2)
        return zero ? function(Kind<Form::kInt8, true, 2>{}) : function(Kind<Form::kInt8, false, 2>{});
      return zero ? function(Kind<Form::kInt8, true>{}) : function(Kind<Form::kInt8>{});
    case Form::kFp4:
      return function(Kind<Form::kFp4>{});
    case Form::kFp8:
      return function(Kind<Form::kFp8>{});
    case Form::kFloat16:
      return function(Kind<Form::kFloat16>{});
    case Form::kBFloat16:
      return function(Kind<Form::kBFloat16>{});
    case Form::kFloat32:
      return function(Kind<Form::kFloat32>{});
  }
}

// Of a block's 16 channels: what its sums are multiplied with, and what the rows' offsets are.
template <class Isa>
struct Factors {
  F<Isa> scale, minimum;
};

// The halves of a record, and the quantized scales of a block, both of the first of 16 channels.
template <class Isa, class Kind>
EDGELLM_INLINE Factors<Isa> load_factors(const uint8_t* halves, const uint8_t* scales) {
  Factors<Isa> f{Isa::load_half(halves), {}};
  if constexpr (Kind::kZero) f.minimum = Isa::load_half(halves + 2 * kGroup);
  if constexpr (has_paired_scales(Kind::kForm) && Kind::kScaled) {
    f.scale = Isa::mul(f.scale, Isa::template load_nibbles<false>(scales));
    f.minimum = Isa::mul(f.minimum, Isa::template load_nibbles<true>(scales));
  } else if constexpr (Kind::kScaled) {
    f.scale = Isa::mul(f.scale, Isa::load_codes(reinterpret_cast<const int8_t*>(scales)));
    if constexpr (Kind::kZero)
      f.minimum = Isa::mul(f.minimum, Isa::load_codes(reinterpret_cast<const int8_t*>(scales + Kind::kScaleBytes)));
  }
  return f;
}

}  // namespace
}  // namespace edgellm

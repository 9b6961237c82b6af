// Rows of a 4-bit KV cache: heads rotated by a Walsh-Hadamard transform, as codes with a half scale for each block.
//
// A row of D numbers, padded to whole blocks of 32: 16 bytes of codes for each block, then the scales. Byte i of
// a block has number i in its low half and number 16 + i in its high half. Codes are signed; a number is code * scale.
#pragma once

#include "kernels.h"
#include "vector_math.h"

namespace edgellm {
namespace {

enum class Int4 : uint8_t {};  // a byte of such a row
enum class BFloat16 : uint16_t {};

// The orthonormal Walsh-Hadamard transform, its own inverse, in blocks of the largest power of two that divides `dim`.
void hadamard(int64_t dim, float* x) {
  const int64_t block = dim & -dim;
  for (int64_t half = 1; half < block; half *= 2)
    for (int64_t first = 0; first < dim; first += 2 * half)
      for (int64_t i = first; i < first + half; i++) {
        const float a = x[i], b = x[i + half];
        x[i] = a + b;
        x[i + half] = a - b;
      }
  const float factor = 1 / __builtin_sqrtf(float(block));
  for (int64_t d = 0; d < dim; d++) x[d] *= factor;
}

// ------------------------------------------------------------------------------------- writing rows
// The block's largest number, with its sign, becomes one of these codes: the one with the least squared error.
constexpr int kInt4Trials = 6;
constexpr float kInt4Ends[kStrip] = {-8, -7.5f, -7, -6.5f, -8.5f, -9, -8, -8, -8, -8, -8, -8, -8, -8, -8, -8};

template <class Isa>
EDGELLM_INLINE I<Isa> int4_codes(F<Isa> x, float inverse) {
  return Isa::to_int(Isa::max(Isa::min(Isa::mul(x, Isa::set(inverse)), Isa::set(7)), Isa::set(-8)));
}

// Writes the 16 bytes of a block; returns its scale, a half.
template <class Isa>
uint16_t store_int4_block(const float* x, Int4* codes) {
  const F<Isa> own[2] = {Isa::load(x), Isa::load(x + kStrip)};
  float largest = 0, scales[kStrip], least_error = 0;
  uint16_t halves[kStrip];
  for (int i = 0; i < kInt4Block; i++)
    if (__builtin_fabsf(x[i]) > __builtin_fabsf(largest)) largest = x[i];
  const F<Isa> limit = Isa::set(kMostHalf), all = Isa::div(Isa::set(largest), Isa::load(kInt4Ends));
  Isa::store_half(halves, Isa::max(Isa::sub(Isa::set(0), limit), Isa::min(limit, all)));
  Isa::store(scales, Isa::load_half(halves));
  int best = 0;
  for (int trial = 0; trial < kInt4Trials; trial++) {
    F<Isa> errors = Isa::set(0);
    for (const F<Isa>& some : own) {
      const F<Isa> code = Isa::to_float(int4_codes<Isa>(some, scales[trial] != 0 ? 1 / scales[trial] : 0));
      const F<Isa> error = Isa::sub(some, Isa::mul(code, Isa::set(scales[trial])));
      errors = Isa::fma(error, error, errors);
    }
    const float error = Isa::sum(errors);
    if (trial && !(error < least_error)) continue;
    best = trial;
    least_error = error;
  }
  int8_t bytes[2][kStrip];
  for (int half = 0; half < 2; half++)
    Isa::store_codes(bytes[half], int4_codes<Isa>(own[half], scales[best] != 0 ? 1 / scales[best] : 0));
  for (int i = 0; i < kStrip; i++) codes[i] = Int4((bytes[0][i] & 15) | (bytes[1][i] & 15) << 4);
  return halves[best];
}

// `x`: rotated, [dim], whole blocks.
template <class Isa>
void store_int4_row(const float* x, int64_t dim, Int4* row) {
  for (int64_t block = 0; block < dim / kInt4Block; block++) {
    const uint16_t scale = store_int4_block<Isa>(x + block * kInt4Block, row + block * kStrip);
    __builtin_memcpy(row + dim / 2 + 2 * block, &scale, 2);
  }
}

// --------------------------------------------------------------------------------------- queries
// A query for rows of 4 bits, after its floats, [dim]: codes of 8 bits, and of each block a scale and what
// brings the sum of products with codes from 0 to 15 around their middle.
struct Int4Query {
  const int8_t* codes;  // [dim]
  const float *scales, *middles;  // [blocks]
  Int4Query(const float* memory, int64_t dim)
      : codes(reinterpret_cast<const int8_t*>(memory)),
        scales(memory + dim / 4),
        middles(scales + dim / kInt4Block) {}
};

template <class Isa>
void pack_int4_query(int64_t dim, float* floats) {
  int8_t* const codes = reinterpret_cast<int8_t*>(floats + dim);
  float *const scales = floats + dim + dim / 4, *const middles = scales + dim / kInt4Block;
  for (int64_t block = 0; block < dim / kInt4Block; block++) {
    const F<Isa> own[2] = {Isa::load(floats + block * kInt4Block), Isa::load(floats + block * kInt4Block + kStrip)};
    const float largest = Isa::largest(Isa::max(Isa::abs(own[0]), Isa::abs(own[1])));
    const float inverse = largest > 1e-30f ? 127 / largest : 0;
    int32_t sum = 0;
    for (int half = 0; half < 2; half++) {
      const I<Isa> steps = Isa::to_int(Isa::mul(own[half], Isa::set(inverse)));
      Isa::store_codes(codes + block * kInt4Block + half * kStrip, steps);
      sum += Isa::sum(steps);
    }
    scales[block] = largest / 127;
    middles[block] = float(-8 * sum);
  }
}

}  // namespace
}  // namespace edgellm

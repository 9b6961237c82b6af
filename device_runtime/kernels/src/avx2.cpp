// AVX2: products of bytes are added in pairs of 16 bits, which must not overflow.
#include "avx2.h"

namespace edgellm {
namespace {

struct Pairs {
  using Sum = __m256i;  // 16 words

  static Sum begin(__m256i) { return _mm256_setzero_si256(); }
  // Eight times two products of at most 15 * 127 each: 30,480.
  static Sum add4(Sum sum, __m256i codes, __m256i x) { return _mm256_add_epi16(sum, _mm256_maddubs_epi16(codes, x)); }
  static __m256i end(__m256i sums, Sum sum) {
    return _mm256_add_epi32(sums, _mm256_madd_epi16(sum, _mm256_set1_epi16(1)));
  }
  // |code - 128| <= 128 and the row with the code's sign, |x| <= 127: 32,512 at most.
  static __m256i add8(__m256i sums, __m256i codes, __m256i x) {
    const __m256i code = _mm256_xor_si256(codes, _mm256_set1_epi8(-128));
    return end(sums, _mm256_maddubs_epi16(_mm256_abs_epi8(code), _mm256_sign_epi8(x, code)));
  }
};

struct Set : Avx2Dot<Pairs> {
  static constexpr int kMiddle8 = 0;
  static constexpr int kRows = 4, kStrips = 1, kQueries = 2, kWide = 2, kTurnFrom = 0;
};

}  // namespace
}  // namespace edgellm

#define EDGELLM_SET avx2
#include "set.inl"

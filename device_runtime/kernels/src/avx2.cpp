// AVX2: products of bytes are added in pairs of 16 bits, which must not overflow.
#include "avx2.h"

namespace edgellm {
namespace {

struct Pairs : Avx2 {
  static constexpr int kSteps8 = 1;
  static constexpr int kMiddle8 = 0;  // what int8 dot products leave to be taken off

  using Sum = __m256i;  // 16 words
  static Sum begin(Ints) { return _mm256_setzero_si256(); }
  // Eight times two products of at most 15 * 127 each: 30,480.
  static Sum add4(Sum sum, Bytes codes, Bytes x) { return _mm256_add_epi16(sum, _mm256_maddubs_epi16(__m256i(codes), __m256i(x))); }
  static Ints end(Ints sums, Sum sum) { return sums + Ints(_mm256_madd_epi16(sum, _mm256_set1_epi16(1))); }
  // |code - 128| <= 128 and the row with the code's sign, |x| <= 127: 32,512 at most.
  static Ints add8(Ints sums, Bytes codes, Bytes x) {
    const __m256i code = __m256i(codes ^ 128);
    return end(sums, _mm256_maddubs_epi16(_mm256_abs_epi8(code), _mm256_sign_epi8(__m256i(x), code)));
  }
};

using Set = Vector<Pairs>;

}  // namespace
}  // namespace edgellm

#define EDGELLM_SET avx2
#include "set.inl"

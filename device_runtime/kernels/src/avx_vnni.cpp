// AVX-VNNI: the products of AVX-512's VNNI on AVX registers, as in processors without AVX-512.
#include "avx2.h"

namespace edgellm {
namespace {

struct Quads {
  using Sum = __m256i;

  static Sum begin(__m256i sums) { return sums; }
  static Sum add4(Sum sum, __m256i codes, __m256i x) { return _mm256_dpbusd_avx_epi32(sum, codes, x); }
  static __m256i end(__m256i, Sum sum) { return sum; }
  static __m256i add8(__m256i sums, __m256i codes, __m256i x) { return _mm256_dpbusd_avx_epi32(sums, codes, x); }
};

struct Set : Avx2Dot<Quads> {
  static constexpr int kMiddle8 = 128;
  static constexpr int kRows = 4, kStrips = 1, kQueries = 2, kWide = 2, kTurnFrom = 0;
};

}  // namespace
}  // namespace edgellm

#define EDGELLM_SET avx_vnni
#include "set.inl"

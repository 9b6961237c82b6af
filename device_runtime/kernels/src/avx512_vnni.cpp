// AVX-512 with VNNI: 64 products of bytes by one instruction.
#include "avx512.h"
#include "kernels.h"

namespace edgellm {
namespace {

struct Avx512Vnni : Avx512Vector {
  static constexpr int kMiddle8 = 128;
  static constexpr int kRows = 6, kStrips = 2, kQueries = 6, kWide = 4, kTurnFrom = 6;

  static I broadcast(const int8_t* p) { return _mm512_set1_epi32(*(const int32_t __attribute__((aligned(1), may_alias))*)p); }

  template <bool kFp4, int R, int S>
  static inline __attribute__((always_inline)) void dot4(
      I (&acc)[R][S], const uint8_t* w, const int8_t* x, int64_t stride, int64_t block) {
    if (kFp4 || block == 16)
      dot4_by<2, kFp4>(acc, w, x, stride, block);
    else
      dot4_by<4, kFp4>(acc, w, x, stride, block);
  }

  template <int kSteps, bool kFp4, int R, int S>
  static inline __attribute__((always_inline)) void dot4_by(
      I (&acc)[R][S], const uint8_t* w, const int8_t* x, int64_t stride, int64_t block) {
    const I nibble = _mm512_set1_epi8(15), values = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)kFp4Codes));
    for (int64_t k = 0; k < block; k += 8 * kSteps, w += 128 * kSteps, x += 8 * kSteps)
#pragma GCC unroll 4
      for (int step = 0; step < kSteps; step++) {
        I low[S], high[S];
#pragma GCC unroll 2
        for (int s = 0; s < S; s++) {
          const I codes = _mm512_loadu_si512(w + step * 128 + s * 64);
          low[s] = _mm512_and_si512(codes, nibble);
          high[s] = _mm512_and_si512(_mm512_srli_epi16(codes, 4), nibble);
          if (!kFp4) continue;
          low[s] = _mm512_shuffle_epi8(values, low[s]);
          high[s] = _mm512_shuffle_epi8(values, high[s]);
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; r++)
#pragma GCC unroll 2
          for (int s = 0; s < S; s++)
            acc[r][s] = _mm512_dpbusd_epi32(acc[r][s], low[s], broadcast(x + r * stride + step * 8));
#pragma GCC unroll 16
        for (int r = 0; r < R; r++)
#pragma GCC unroll 2
          for (int s = 0; s < S; s++)
            acc[r][s] = _mm512_dpbusd_epi32(acc[r][s], high[s], broadcast(x + r * stride + step * 8 + 4));
      }
  }

  template <int R, int S>
  static inline __attribute__((always_inline)) void dot8(
      I (&acc)[R][S], const uint8_t* w, const int8_t* x, int64_t stride, int64_t block) {
    for (int64_t k = 0; k < block; k += 16, w += 512, x += 16)
#pragma GCC unroll 4
      for (int step = 0; step < 4; step++) {
        I codes[S];
#pragma GCC unroll 2
        for (int s = 0; s < S; s++) codes[s] = _mm512_loadu_si512(w + step * 128 + s * 64);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++)
#pragma GCC unroll 2
          for (int s = 0; s < S; s++)
            acc[r][s] = _mm512_dpbusd_epi32(acc[r][s], codes[s], broadcast(x + r * stride + step * 4));
      }
  }
};

using Set = Avx512Vnni;

}  // namespace
}  // namespace edgellm

#define EDGELLM_SET avx512_vnni
#include "set.inl"

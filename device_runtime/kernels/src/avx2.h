// Sixteen lanes as two AVX registers.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "kernels.h"

namespace edgellm {
namespace {

struct Avx2Vector {
  struct F { __m256 low, high; };
  struct I { __m256i low, high; };
  using H = __m256;

  static F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  static void store(float* p, F x) {
    _mm256_storeu_ps(p, x.low);
    _mm256_storeu_ps(p + 8, x.high);
  }
  static F set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
  static F add(F a, F b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
  static F sub(F a, F b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
  static F mul(F a, F b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
  static F div(F a, F b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
  static F max(F a, F b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
  static F min(F a, F b) { return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }
  static F abs(F a) {
    const H sign = _mm256_set1_ps(-0.f);
    return {_mm256_andnot_ps(sign, a.low), _mm256_andnot_ps(sign, a.high)};
  }
  static F fma(F a, F b, F c) { return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)}; }
  static F round(F a) {
    constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(a.low, kNearest), _mm256_round_ps(a.high, kNearest)};
  }
  static H pow2(H n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvttps_epi32(n), _mm256_set1_epi32(127)), 23));
  }
  static F pow2(F n) { return {pow2(n.low), pow2(n.high)}; }
  static F load_half(const void* p) {
    const __m128i* halves = (const __m128i*)p;
    return {_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
  }
  static H widen(__m128i halves) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16)); }
  static F load_bfloat(const void* p) {
    const __m128i* halves = (const __m128i*)p;
    return {widen(_mm_loadu_si128(halves)), widen(_mm_loadu_si128(halves + 1))};
  }
  static F load_fp8(const void* p) {  // see avx512.h
    __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)), 7);
    wide = _mm256_and_si256(wide, _mm256_set1_epi16(int16_t(0xbfff)));
    return {_mm256_cvtph_ps(_mm256_castsi256_si128(wide)), _mm256_cvtph_ps(_mm256_extracti128_si256(wide, 1))};
  }
  static F load_codes(const int8_t* p) {
    const __m128i codes = _mm_loadu_si128((const __m128i*)p);
    return to_float({_mm256_cvtepi8_epi32(codes), _mm256_cvtepi8_epi32(_mm_srli_si128(codes, 8))});
  }
  static void store_half(void* p, F x) {
    constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x.low, kNearest));
    _mm_storeu_si128((__m128i*)p + 1, _mm256_cvtps_ph(x.high, kNearest));
  }
  static I to_int(F x) { return {_mm256_cvtps_epi32(x.low), _mm256_cvtps_epi32(x.high)}; }
  static F to_float(I x) { return {_mm256_cvtepi32_ps(x.low), _mm256_cvtepi32_ps(x.high)}; }
  static I set_int(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
  static I times128(I x) { return {_mm256_slli_epi32(x.low, 7), _mm256_slli_epi32(x.high, 7)}; }
  static I add_int(I a, I b) { return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)}; }
  static void store_codes(int8_t* p, I x) {
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.low, x.high), 0xd8);
    _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
  }
  static int32_t sum(I x) {
    const __m256i both = _mm256_add_epi32(x.low, x.high);
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
  }
  static __m128 ends(H x) { return _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1)); }
  static float sum(F x) {  // lanes i and i + 8, then 4, 2, 1
    const __m128 four = ends(_mm256_add_ps(x.low, x.high)), two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }
  static float largest(F x) {
    const H both = _mm256_max_ps(x.low, x.high);
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
  }
  // Lane i of four: sum(x[i]), in its order.
  static __m128 four_sums(const F* x) {
    const __m128 a = ends(_mm256_add_ps(x[0].low, x[0].high)), b = ends(_mm256_add_ps(x[1].low, x[1].high)),
                 c = ends(_mm256_add_ps(x[2].low, x[2].high)), d = ends(_mm256_add_ps(x[3].low, x[3].high));
    const __m128 ab = _mm_add_ps(_mm_movelh_ps(a, b), _mm_movehl_ps(b, a)), cd = _mm_add_ps(_mm_movelh_ps(c, d), _mm_movehl_ps(d, c));
    return _mm_add_ps(_mm_shuffle_ps(ab, cd, 0x88), _mm_shuffle_ps(ab, cd, 0xdd));
  }
  static F sums(const F* x) {
    return {_mm256_set_m128(four_sums(x + 4), four_sums(x)), _mm256_set_m128(four_sums(x + 12), four_sums(x + 8))};
  }
};

// The products of bytes, 8 channels at a time: `Step::add(acc, codes, x)` adds, for each channel, the
// products of 4 codes and 4 of the row.
template <class Step>
struct Avx2Dot : Avx2Vector {
  static __m256i broadcast(const int8_t* p) { return _mm256_set1_epi32(*(const int32_t __attribute__((aligned(1), may_alias))*)p); }

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
    const __m256i nibble = _mm256_set1_epi8(15);
    const __m256i values = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)kFp4Codes));
    for (int half = 0; half < 2 * S; half++) {
      __m256i sums[R];
      for (int r = 0; r < R; r++) sums[r] = half % 2 ? acc[r][half / 2].high : acc[r][half / 2].low;
      for (int64_t k = 0; k < block; k += 8 * kSteps) {
        typename Step::Sum some[R];
        for (int r = 0; r < R; r++) some[r] = Step::begin(sums[r]);
#pragma GCC unroll 4
        for (int step = 0; step < kSteps; step++) {
          const __m256i codes = _mm256_loadu_si256((const __m256i*)(w + k * 16 + step * 128 + half * 32));
          __m256i low = _mm256_and_si256(codes, nibble), high = _mm256_and_si256(_mm256_srli_epi16(codes, 4), nibble);
          if (kFp4) {
            low = _mm256_shuffle_epi8(values, low);
            high = _mm256_shuffle_epi8(values, high);
          }
#pragma GCC unroll 8
          for (int r = 0; r < R; r++) {
            const int8_t* row = x + r * stride + k + step * 8;
            some[r] = Step::add4(Step::add4(some[r], low, broadcast(row)), high, broadcast(row + 4));
          }
        }
        for (int r = 0; r < R; r++) sums[r] = Step::end(sums[r], some[r]);
      }
      for (int r = 0; r < R; r++) (half % 2 ? acc[r][half / 2].high : acc[r][half / 2].low) = sums[r];
    }
  }

  template <int R, int S>
  static inline __attribute__((always_inline)) void dot8(
      I (&acc)[R][S], const uint8_t* w, const int8_t* x, int64_t stride, int64_t block) {
    for (int half = 0; half < 2 * S; half++) {
      __m256i sums[R];
      for (int r = 0; r < R; r++) sums[r] = half % 2 ? acc[r][half / 2].high : acc[r][half / 2].low;
      for (int64_t k = 0; k < block; k += 4) {
        const __m256i codes = _mm256_loadu_si256((const __m256i*)(w + k * 32 + half * 32));
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) sums[r] = Step::add8(sums[r], codes, broadcast(x + r * stride + k));
      }
      for (int r = 0; r < R; r++) (half % 2 ? acc[r][half / 2].high : acc[r][half / 2].low) = sums[r];
    }
  }
};

}  // namespace
}  // namespace edgellm

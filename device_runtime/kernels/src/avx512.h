// Sixteen lanes as one AVX-512 register.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace edgellm {
namespace {

struct Avx512Vector {
  using F = __m512;
  using I = __m512i;

  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, F x) { _mm512_storeu_ps(p, x); }
  static F set(float x) { return _mm512_set1_ps(x); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F div(F a, F b) { return _mm512_div_ps(a, b); }
  static F max(F a, F b) { return _mm512_max_ps(a, b); }
  static F min(F a, F b) { return _mm512_min_ps(a, b); }
  static F abs(F a) { return _mm512_abs_ps(a); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F round(F a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static F pow2(F n) {
    const I exponent = _mm512_add_epi32(_mm512_cvttps_epi32(n), _mm512_set1_epi32(127));
    return _mm512_castsi512_ps(_mm512_slli_epi32(exponent, 23));
  }
  static F load_half(const void* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
  static F load_bfloat(const void* p) {
    const I wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
  }
  // E4M3's exponent and digits stand in a half as 1/256 of what they stand for.
  static F load_fp8(const void* p) {
    const __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)), 7);
    return _mm512_cvtph_ps(_mm256_and_si256(wide, _mm256_set1_epi16(int16_t(0xbfff))));
  }
  static F load_codes(const int8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
  }
  static void store_half(void* p, F x) {
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  static I to_int(F x) { return _mm512_cvtps_epi32(x); }
  static F to_float(I x) { return _mm512_cvtepi32_ps(x); }
  static I set_int(int32_t x) { return _mm512_set1_epi32(x); }
  static I times128(I x) { return _mm512_slli_epi32(x, 7); }
  static I add_int(I a, I b) { return _mm512_add_epi32(a, b); }
  static void store_codes(int8_t* p, I x) { _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(x)); }
  static int32_t sum(I x) { return _mm512_reduce_add_epi32(x); }
  static float largest(F x) { return _mm512_reduce_max_ps(x); }
  static float sum(F x) {  // lanes i and i + 8, then 4, 2, 1
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    const __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    const __m128 pair = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
    return _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)));
  }
  static void zip(F a, F b, F& low, F& high) {  // a0 b0 a1 b1 ...
    const I first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    low = _mm512_permutex2var_ps(a, first, b);
    high = _mm512_permutex2var_ps(a, _mm512_add_epi32(first, _mm512_set1_epi32(8)), b);
  }

  // Lane i: sum(x[i]), in its order; each step halves both the registers and what is left to add.
  static F sums(const F* x) {
    F half[8], quarter[4], pair[2];
    for (int i = 0; i < 8; i++)  // x[i] below, x[i + 8] above
      half[i] = add(_mm512_shuffle_f32x4(x[i], x[i + 8], 0x44), _mm512_shuffle_f32x4(x[i], x[i + 8], 0xee));
    for (int i = 0; i < 4; i++)  // by 128 bits: i, i + 4, i + 8, i + 12
      quarter[i] = add(_mm512_shuffle_f32x4(half[i], half[i + 4], 0x88), _mm512_shuffle_f32x4(half[i], half[i + 4], 0xdd));
    for (int i = 0; i < 4; i++)  // the quarters above stand as i, i + 8, i + 4, i + 12
      quarter[i] = _mm512_shuffle_f32x4(quarter[i], quarter[i], 0xd8);
    for (int i = 0; i < 2; i++)
      pair[i] = add(_mm512_shuffle_ps(quarter[i], quarter[i + 2], 0x44), _mm512_shuffle_ps(quarter[i], quarter[i + 2], 0xee));
    const F last = add(_mm512_shuffle_ps(pair[0], pair[1], 0x88), _mm512_shuffle_ps(pair[0], pair[1], 0xdd));
    return _mm512_shuffle_ps(last, last, 0xd8);  // 0, 2, 1, 3 of each quarter
  }
};

}  // namespace
}  // namespace edgellm

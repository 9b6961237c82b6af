// Registers of AVX: 8 lanes.
#pragma once

#include <immintrin.h>

#include "vector.h"

namespace edgellm {
namespace {

struct Avx2 : Registers<32> {
  static constexpr int kRows = 4, kStrips = 1, kAtOnce = 1, kScoreQueries = 4, kScoreRegisters = 2, kTurnFrom = 6;
  static constexpr int kValueQueries = 6, kValueTile = 4, kSumRegisters = 12;
  static constexpr int kPairRegisters = 2, kPairSums = 8;

  static Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
  static Floats from_half(Halves h) { return _mm256_cvtph_ps(__m128i(h)); }
  static Halves to_half(Floats x) { return Halves(_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)); }
  template <bool kFp4>
  static Bytes decode(Bytes codes) {
    if (!kFp4) return codes;
    return Bytes(
        _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)kFp4Codes)), __m256i(codes)));
  }
  static Ints to_ints(Halves h) { return Ints(_mm256_cvtepu16_epi32(__m128i(h))); }
  static void load_fp8(const void* p, Halves* x) {
    __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)), 7);
    wide = _mm256_and_si256(wide, _mm256_set1_epi16(int16_t(0xbfff)));
    x[0] = Halves(_mm256_castsi256_si128(wide));
    x[1] = Halves(_mm256_extracti128_si256(wide, 1));
  }
  static void load_codes(const void* p, Ints* x) {
    for (int i = 0; i < 2; i++)
      x[i] = Ints(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i_u*)((const char*)p + 8 * i))));
  }
  static void store_codes(int8_t* p, const Ints* x) {
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(__m256i(x[0]), __m256i(x[1])), 0xd8);
    _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
  }
};

}  // namespace
}  // namespace edgellm

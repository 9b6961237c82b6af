// Registers of AVX-512, 16 lanes, with VNNI: 64 products of bytes by one instruction.
#pragma once

#include <immintrin.h>

#include "vector.h"

namespace edgellm {
namespace {

struct Avx512 : Registers<64> {
  static constexpr int kMiddle8 = 128;
  // Larger blocks of unpacked codes are slower: sums are loaded and stored for each block.
  static constexpr int kUnpackedBlock = 16, kUnpackedRows = 8, kUnpackedStrips = 2;
  static constexpr int kRows = 6, kStrips = 2, kAtOnce = 2, kScoreQueries = 6, kScoreRegisters = 2, kTurnFrom = 6;
  static constexpr int kValueQueries = 6, kValueTile = 24, kSumRegisters = 24;
  static constexpr int kPairQueries = 6, kPairRegisters = 2, kPairSums = 12;
  static constexpr bool kInterleaves = true;

  static Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
  static Floats from_half(Halves h) { return _mm512_cvtph_ps(__m256i(h)); }
  static Halves to_half(Floats x) { return Halves(_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)); }
  template <bool kFp4>
  static Bytes decode(Bytes codes) {
    if (!kFp4) return codes;
    return Bytes(
        _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)kFp4Codes)), __m512i(codes)));
  }
  static Ints add4(Ints sum, Bytes codes, Bytes x) {
    return Ints(_mm512_dpbusd_epi32(__m512i(sum), __m512i(codes), __m512i(x)));
  }
  static Ints add8(Ints sum, Bytes codes, Bytes x) { return add4(sum, codes, x); }
  static Ints to_ints(Halves h) { return Ints(_mm512_cvtepu16_epi32(__m256i(h))); }
  static EDGELLM_INLINE void interleave(const void* even, const void* odd, int32_t* out) {
    alignas(64) static constexpr uint16_t kPlaces[] = {
        0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39, 8,  40, 9,  41, 10, 42,
        11, 43, 12, 44, 13, 45, 14, 46, 15, 47, 16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53,
        22, 54, 23, 55, 24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63};
    const __m512i a = _mm512_loadu_si512(even), b = _mm512_loadu_si512(odd);
    for (int i = 0; i < 2; i++)
      _mm512_storeu_si512(out + 16 * i, _mm512_permutex2var_epi16(a, _mm512_load_si512(kPlaces + 32 * i), b));
  }
  static void load_fp8(const void* p, Halves* x) {
    x[0] = Halves(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p))) << 7 & 0xbfff;
  }
  static void load_codes(const void* p, Ints* x) {
    x[0] = Ints(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
  }
  static void store_codes(int8_t* p, const Ints* x) {
    _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(__m512i(x[0])));
  }
};

struct Avx512Isa : Vector<Avx512> {
  // GCC 12 leaves arrays of what is loaded otherwise in memory.
  static EDGELLM_INLINE F load(const float* p) { return _mm512_loadu_ps(p); }
};

#ifdef __AVX512BF16__
// With dot products of bfloat16.
struct Avx512Bf16 : Avx512 {
  static constexpr int kPairQueries = 6, kPairRegisters = 4, kPairSums = 24;
};

struct Avx512Bf16Isa : Vector<Avx512Bf16> {
  static EDGELLM_INLINE F load(const float* p) { return _mm512_loadu_ps(p); }
  static EDGELLM_INLINE void store_bfloat(void* p, F x) { write(p, _mm512_cvtneps_pbh(x)); }
  static EDGELLM_INLINE Floats dot_pairs(Floats sum, Ints a, Ints b) {
    return _mm512_dpbf16_ps(sum, __m512bh(a), __m512bh(b));
  }
};
#endif

}  // namespace
}  // namespace edgellm

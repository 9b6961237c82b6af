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

}  // namespace
}  // namespace edgellm

// AVX2: products of bytes are added in pairs of 16 bits, which must not overflow.
#include "avx2.h"

#include "instruction_set.h"

namespace edgellm {
namespace {

struct Pairs : Avx2 {
  static constexpr bool kWholeGroups = true, kJoinsTerms = true;
  static constexpr int kUnpackedBlock = 32;
  static constexpr int kMiddle8 = 0;  // what int8 dot products leave to be taken off
  static constexpr int kFetchFrom = 1;
};

struct Isa : Vector<Pairs> {
  template <Form kForm, int R, int S>
  static EDGELLM_INLINE void dot(I (&acc)[R][S], const uint8_t* w, const int8_t* x, int64_t stride, int64_t block) {
#pragma GCC unroll 2
    for (int s = 0; s < S; s++, w += 2 * kBytes) {
      __m256i sums[R][2];
      for (int r = 0; r < R; r++)
        for (int c = 0; c < 2; c++) sums[r][c] = __m256i(acc[r][s].part[c]);
      if constexpr (kForm == Form::kInt8)
        add_bytes(sums, w, x, stride, block);
      else if (kForm == Form::kInt4 && block > 16)
        add_nibbles<kForm, 4>(sums, w, x, stride, block);
      else
        add_nibbles<kForm, 2>(sums, w, x, stride, block);
      for (int r = 0; r < R; r++)
        for (int c = 0; c < 2; c++) acc[r][s].part[c] = Ints(sums[r][c]);
    }
  }
  // Codes of 8 bits, whose middle is not taken off, with rows of 16 bits: |sums| < 128 * 255 * 2^14 = 2^29.
  template <int R, int S>
  static EDGELLM_INLINE void dot_words(I (&acc)[R][S], const uint8_t* w, const int16_t* x, int64_t stride,
                                       int64_t block) {
#pragma GCC unroll 4
    for (int c = 0; c < 2 * S; c++) {
      __m256i sums[R][2];  // of two channels' halves of four inputs each
      for (int r = 0; r < R; r++) sums[r][0] = sums[r][1] = _mm256_setzero_si256();
      for (int64_t k = 0; k < block; k += 16)
#pragma GCC unroll 4
        for (int64_t at = k; at < k + 16; at += 4) {
          const __m128i* codes = reinterpret_cast<const __m128i*>(w + at * 32 + c * 32);
          const __m256i low = _mm256_cvtepu8_epi16(_mm_loadu_si128(codes));
          const __m256i high = _mm256_cvtepu8_epi16(_mm_loadu_si128(codes + 1));
#pragma GCC unroll 8
          for (int r = 0; r < R; r++) {
            int64_t four;
            __builtin_memcpy(&four, x + r * stride + at, 8);
            const __m256i inputs = _mm256_set1_epi64x(four);
            sums[r][0] = _mm256_add_epi32(sums[r][0], _mm256_madd_epi16(low, inputs));
            sums[r][1] = _mm256_add_epi32(sums[r][1], _mm256_madd_epi16(high, inputs));
          }
        }
      for (int r = 0; r < R; r++) {
        const __m256i pairs = _mm256_permute4x64_epi64(_mm256_hadd_epi32(sums[r][0], sums[r][1]), 0xd8);
        acc[r][c / 2].part[c % 2] += Ints(pairs);
      }
    }
  }
  // Sums of 8 times two products, of at most 15 * 127 each, fit 16 bits.
  static EDGELLM_INLINE Ints sum_nibbles(const Bytes (&codes)[8], const int8_t* x) {
    __m256i words = _mm256_maddubs_epi16(__m256i(codes[0]), four_of(x));
#pragma GCC unroll 8
    for (int i = 1; i < 8; i++)
      words = _mm256_add_epi16(words, _mm256_maddubs_epi16(__m256i(codes[i]), four_of(x + 4 * i)));
    return Ints(_mm256_madd_epi16(words, _mm256_set1_epi16(1)));
  }
  static EDGELLM_INLINE void store_words(void* p, I x) {
    const __m256i words = _mm256_packs_epi32(__m256i(x.part[0]), __m256i(x.part[1]));
    _mm256_storeu_si256(static_cast<__m256i*>(p), _mm256_permute4x64_epi64(words, 0xd8));
  }
  // Products are added in 16 bits as long as their sums fit, or until their block ends.
  template <Form kForm, int H, int R, int S>
  static EDGELLM_INLINE void dot_units(I (&acc)[H][R][S], const uint8_t* w, const int8_t* x, int64_t stride,
                                       int64_t block) {
    constexpr int kBits = bits_of(kForm), kFitting = fitting(kForm);
    constexpr int kRun = kFitting < 4 ? 2 : 4;
    constexpr bool kByBlock = H == 1 && kFitting >= 32;  // of 128 inputs at most
#pragma GCC unroll 4
    for (int i = 0; i < 2 * S; i++) {
      __m256i sums[H][R], words[R];
      for (int r = 0; r < R; r++) {
        words[r] = _mm256_setzero_si256();
        for (int h = 0; h < H; h++) sums[h][r] = __m256i(acc[h][r][i / 2].part[i % 2]);
      }
      each_unit<kBits, H>(w + i * kBytes, block, [&](auto first, const uint8_t* unit, int64_t k) EDGELLM_LAMBDA {
        each_quad<kBits>(unit, [&](auto j, Bytes codes) EDGELLM_LAMBDA {
          constexpr int at = decltype(first)::value + decltype(j)::value, h = H == 1 ? 0 : at / 4;
#pragma GCC unroll 8
          for (int r = 0; r < R; r++) {
            const __m256i products = _mm256_maddubs_epi16(__m256i(codes), four_of(x + r * stride + k + 4 * j));
            words[r] = kByBlock || at % kRun ? _mm256_add_epi16(words[r], products) : products;
            if (R > 1) asm("" : "+x"(words[r]));
            if (!kByBlock && at % kRun == kRun - 1) sums[h][r] = add_pairs(sums[h][r], words[r]);
          }
        });
      });
      for (int r = 0; r < R; r++) {
        if (kByBlock) sums[0][r] = add_pairs(sums[0][r], words[r]);
        for (int h = 0; h < H; h++) acc[h][r][i / 2].part[i % 2] = Ints(sums[h][r]);
      }
    }
  }

  template <Form kForm, int kBlock, int R>
  static EDGELLM_INLINE void dot_unpacked(I (&out)[R][1], const uint8_t* w, int64_t, const int8_t* x, int64_t stride) {
    constexpr int kFitting = fitting(kForm), kRun = least(kFitting < 4 ? 2 : kFitting < 8 ? 4 : 8, kBlock / 4);
    __m256i sums[R][2];
    for (int r = 0; r < R; r++)
      for (int c = 0; c < 2; c++) sums[r][c] = __m256i(out[r][0].part[c]);
#pragma GCC unroll 4
    for (int k = 0; k < kBlock; k += 4 * kRun) {
      __m256i words[R][2];
#pragma GCC unroll 8
      for (int i = 0; i < kRun; i++)
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
          const __m256i four = four_of(x + r * stride + k + 4 * i);
          for (int c = 0; c < 2; c++) {
            const __m256i products = _mm256_maddubs_epi16(codes_at(w + (k + 4 * i) * kStrip, c), four);
            words[r][c] = i ? _mm256_add_epi16(words[r][c], products) : products;
          }
          asm("" : "+x"(words[r][0]), "+x"(words[r][1]));
        }
      for (int r = 0; r < R; r++)
        for (int c = 0; c < 2; c++) sums[r][c] = add_pairs(sums[r][c], words[r][c]);
    }
    for (int r = 0; r < R; r++)
      for (int c = 0; c < 2; c++) out[r][0].part[c] = Ints(sums[r][c]);
  }

 private:
  // Of four codes and four inputs, the products that are added in 16 bits.
  static constexpr int fitting(Form form) { return 32767 / (2 * 127 * ((1 << bits_of(form)) - 1)); }
  static EDGELLM_INLINE __m256i codes_at(const uint8_t* w, int c) { return _mm256_loadu_si256((const __m256i*)w + c); }
  static EDGELLM_INLINE __m256i four_of(const int8_t* x) { return __m256i(broadcast(x)); }
  static EDGELLM_INLINE __m256i add_pairs(__m256i sum, __m256i words) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(words, _mm256_set1_epi16(1)));
  }

  // As many steps as fit 16 bits: 16 products of at most 15 * 127 are 30,480, 8 of FP4's 24 * 127 are 24,384.
  template <Form kForm, int kSteps, int R>
  static EDGELLM_INLINE void add_nibbles(__m256i (&sums)[R][2], const uint8_t* w, const int8_t* x, int64_t stride,
                                         int64_t block) {
    for (int64_t k = 0; k < block; k += 8 * kSteps) {
      __m256i words[R][2];
#pragma GCC unroll 8
      for (int half = 0; half < 2 * kSteps; half++) {
        __m256i codes[2];
        for (int c = 0; c < 2; c++) {
          const __m256i both = codes_at(w + (k / 8 + half / 2) * 128, c);
          codes[c] = _mm256_and_si256(half % 2 ? _mm256_srli_epi16(both, 4) : both, _mm256_set1_epi8(15));
          codes[c] = __m256i(decode<kForm == Form::kFp4>(Bytes(codes[c])));
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
          const __m256i four = four_of(x + r * stride + k + half * 4);
          for (int c = 0; c < 2; c++) {
            const __m256i products = _mm256_maddubs_epi16(codes[c], four);
            words[r][c] = half ? _mm256_add_epi16(words[r][c], products) : products;
          }
          // Compilers would add in a tree, which takes more registers than there are.
          if (R > 1) asm("" : "+x"(words[r][0]), "+x"(words[r][1]));
        }
      }
      for (int r = 0; r < R; r++)
        for (int c = 0; c < 2; c++) sums[r][c] = add_pairs(sums[r][c], words[r][c]);
    }
  }

  // |code - 128| <= 128 and the row with the code's sign, |x| <= 127: 32,512 at most.
  template <int R>
  static EDGELLM_INLINE void add_bytes(__m256i (&sums)[R][2], const uint8_t* w, const int8_t* x, int64_t stride,
                                       int64_t block) {
    for (int64_t k = 0; k < block; k += 16)
#pragma GCC unroll 4
      for (int64_t at = k; at < k + 16; at += 4) {
        __m256i codes[2], sizes[2];
        for (int c = 0; c < 2; c++) {
          codes[c] = _mm256_xor_si256(codes_at(w + at * 32, c), _mm256_set1_epi8(-128));
          sizes[c] = _mm256_abs_epi8(codes[c]);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
          const __m256i four = four_of(x + r * stride + at);
          for (int c = 0; c < 2; c++)
            sums[r][c] = add_pairs(sums[r][c], _mm256_maddubs_epi16(sizes[c], _mm256_sign_epi8(four, codes[c])));
          if (R > 1) asm("" : "+x"(sums[r][0]), "+x"(sums[r][1]));
        }
      }
  }
};

}  // namespace

const Kernels k_avx2 = make_kernels<Isa>("avx2");

}  // namespace edgellm

// NEON with products of 2 x 8 by 8 x 2 bytes: two rows and two channels by one instruction.
#include "neon.h"

namespace edgellm {
namespace {

struct Set : NeonVector {
  static constexpr int kRows = 4, kStrips = 1, kQueries = 2, kWide = 2, kTurnFrom = 0;

  // Eight codes of two rows; an odd last row stands for both.
  static int8x16_t pair(const int8_t* x, int64_t stride, bool is_last) {
    return vcombine_s8(vld1_s8(x), vld1_s8(is_last ? x : x + stride));
  }

  // 4 channels: codes of inputs k to k + 3 and of k + 4 to k + 7; `sums` are [row pair][channel pair].
  template <int R>
  static inline __attribute__((always_inline)) void add(
      int32x4_t (&sums)[(R + 1) / 2][2], int8x16_t first, int8x16_t second, const int8_t* x, int64_t stride) {
    const int32x4_t a = vreinterpretq_s32_s8(first), b = vreinterpretq_s32_s8(second);
    const int8x16_t low = vreinterpretq_s8_s32(vzip1q_s32(a, b)), high = vreinterpretq_s8_s32(vzip2q_s32(a, b));
#pragma GCC unroll 4
    for (int r = 0; r < R; r += 2) {
      const int8x16_t rows = pair(x + r * stride, stride, r + 1 == R);
      sums[r / 2][0] = vmmlaq_s32(sums[r / 2][0], rows, low);
      sums[r / 2][1] = vmmlaq_s32(sums[r / 2][1], rows, high);
    }
  }

  template <int R, int S, class Step>
  static inline __attribute__((always_inline)) void dot(I (&acc)[R][S], int64_t block, Step step) {
#pragma GCC unroll 8
    for (int i = 0; i < 4 * S; i++) {
      int32x4_t sums[(R + 1) / 2][2] = {};
      for (int64_t k = 0; k < block; k += 8) step(sums, i, k);
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) {  // rows stand in the halves of each sum
        const int64x2_t a = vreinterpretq_s64_s32(sums[r / 2][0]), b = vreinterpretq_s64_s32(sums[r / 2][1]);
        const int64x2_t row = r % 2 ? vzip2q_s64(a, b) : vzip1q_s64(a, b);
        int32x4_t& sum = acc[r][i / 4].part[i % 4];
        sum = vaddq_s32(sum, vreinterpretq_s32_s64(row));
      }
    }
  }

  template <bool kFp4, int R, int S>
  static inline __attribute__((always_inline)) void dot4(
      I (&acc)[R][S], const uint8_t* w, const int8_t* x, int64_t stride, int64_t block) {
    dot(acc, block, [&](auto& sums, int i, int64_t k) {
      const uint8x16_t codes = vld1q_u8(w + k * 16 + i * 16);
      add<R>(sums, low4<kFp4>(codes), high4<kFp4>(codes), x + k, stride);
    });
  }

  template <int R, int S>
  static inline __attribute__((always_inline)) void dot8(
      I (&acc)[R][S], const uint8_t* w, const int8_t* x, int64_t stride, int64_t block) {
    dot(acc, block, [&](auto& sums, int i, int64_t k) {
      const uint8_t* codes = w + k * 32 + i * 16;
      add<R>(sums, middle8(vld1q_u8(codes)), middle8(vld1q_u8(codes + 128)), x + k, stride);
    });
  }
  using NeonVector::add;
};

}  // namespace
}  // namespace edgellm

#define EDGELLM_SET neon_i8mm
#include "set.inl"

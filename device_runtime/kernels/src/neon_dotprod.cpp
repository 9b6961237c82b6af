// NEON with dot products: 16 products of bytes by one instruction, 4 channels at a time.
#include "neon.h"

namespace edgellm {
namespace {

struct Set : NeonVector {
  static constexpr int kRows = 4, kStrips = 1, kQueries = 2, kWide = 2, kTurnFrom = 0;

  static int8x16_t broadcast(const int8_t* p) {
    int32_t four;
    std::memcpy(&four, p, 4);
    return vreinterpretq_s8_s32(vdupq_n_s32(four));
  }

  template <bool kFp4, int R, int S>
  static inline __attribute__((always_inline)) void dot4(
      I (&acc)[R][S], const uint8_t* w, const int8_t* x, int64_t stride, int64_t block) {
    for (int64_t k = 0; k < block; k += 8, w += 128, x += 8)
#pragma GCC unroll 8
      for (int i = 0; i < 4 * S; i++) {
        const uint8x16_t codes = vld1q_u8(w + i * 16);
        const int8x16_t low = low4<kFp4>(codes), high = high4<kFp4>(codes);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
          int32x4_t& sum = acc[r][i / 4].part[i % 4];
          sum = vdotq_s32(vdotq_s32(sum, low, broadcast(x + r * stride)), high, broadcast(x + r * stride + 4));
        }
      }
  }

  template <int R, int S>
  static inline __attribute__((always_inline)) void dot8(
      I (&acc)[R][S], const uint8_t* w, const int8_t* x, int64_t stride, int64_t block) {
    for (int64_t k = 0; k < block; k += 4, w += 128, x += 4)
#pragma GCC unroll 8
      for (int i = 0; i < 4 * S; i++) {
        const int8x16_t codes = middle8(vld1q_u8(w + i * 16));
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
          int32x4_t& sum = acc[r][i / 4].part[i % 4];
          sum = vdotq_s32(sum, codes, broadcast(x + r * stride));
        }
      }
  }
};

}  // namespace
}  // namespace edgellm

#define EDGELLM_SET neon_dotprod
#include "set.inl"

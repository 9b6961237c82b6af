// NEON with matrix products of bytes: two channels of eight inputs and two rows by one instruction.
#include "instruction_set.h"
#include "neon.h"

namespace edgellm {
namespace {

struct Isa : Vector<Neon> {
  // Eight codes of two rows; an odd last row stands for both.
  static int8x16_t pair(const int8_t* x, int64_t stride, bool is_last) {
    return vcombine_s8(vld1_s8(x), vld1_s8(is_last ? x : x + stride));
  }

  // 4 channels: codes of inputs k to k + 3 and of k + 4 to k + 7; `sums` are [row pair][channel pair].
  template <int R>
  static EDGELLM_INLINE void add_pairs(int32x4_t (&sums)[(R + 1) / 2][2], Bytes first, Bytes second, const int8_t* x,
                                       int64_t stride) {
    const int32x4_t a = int32x4_t(first), b = int32x4_t(second);
    const int8x16_t low = vreinterpretq_s8_s32(vzip1q_s32(a, b)), high = vreinterpretq_s8_s32(vzip2q_s32(a, b));
#pragma GCC unroll 4
    for (int r = 0; r < R; r += 2) {
      const int8x16_t rows = pair(x + r * stride, stride, r + 1 == R);
      sums[r / 2][0] = vmmlaq_s32(sums[r / 2][0], rows, low);
      sums[r / 2][1] = vmmlaq_s32(sums[r / 2][1], rows, high);
    }
  }

  template <Form kForm, int R, int S>
  static EDGELLM_INLINE void dot(I (&acc)[R][S], const uint8_t* w, const int8_t* x, int64_t stride, int64_t block) {
    constexpr bool kIsWide = kForm == Form::kInt8, kFp4 = kForm == Form::kFp4;
#pragma GCC unroll 8
    for (int i = 0; i < 4 * S; i++) {
      int32x4_t sums[(R + 1) / 2][2] = {};
      for (int64_t k = 0; k < block; k += 8) {
        const uint8_t* at = w + k * (kIsWide ? 32 : 16) + i * kBytes;
        const Bytes codes = read<Bytes>(at);
        if constexpr (kIsWide)
          add_pairs<R>(sums, codes ^ 128, read<Bytes>(at + 128) ^ 128, x + k, stride);
        else
          add_pairs<R>(sums, decode<kFp4>(codes & 15), decode<kFp4>(codes >> 4), x + k, stride);
      }
      add_sums<R>(acc, sums, i);
    }
  }

  template <Form kForm, int H, int R, int S>
  static EDGELLM_INLINE void dot_units(I (&acc)[H][R][S], const uint8_t* w, const int8_t* x, int64_t stride,
                                       int64_t block) {
    constexpr int kBits = bits_of(kForm), kQuads = unit_of(kBits).quads;
#pragma GCC unroll 8
    for (int i = 0; i < 4 * S; i++) {
      int32x4_t sums[H][(R + 1) / 2][2] = {};
      each_unit<kBits, H>(w + i * kBytes, block, [&](auto first, const uint8_t* unit, int64_t k) EDGELLM_LAMBDA {
        Bytes codes[kQuads];
        each_quad<kBits>(unit, [&](auto j, Bytes found) EDGELLM_LAMBDA { codes[j] = found; });
#pragma GCC unroll 4
        for (int j = 0; j < kQuads; j += 2)
          add_pairs<R>(sums[H == 1 ? 0 : (first + j) / 4], codes[j], codes[j + 1], x + k + 4 * j, stride);
      });
#pragma GCC unroll 2
      for (int h = 0; h < H; h++) add_sums<R>(acc[h], sums[h], i);
    }
  }

 private:
  // Adds sums of registers i of 4 channels; rows stand in the halves of each.
  template <int R, int S>
  static EDGELLM_INLINE void add_sums(I (&acc)[R][S], const int32x4_t (&sums)[(R + 1) / 2][2], int i) {
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      const int64x2_t a = vreinterpretq_s64_s32(sums[r / 2][0]), b = vreinterpretq_s64_s32(sums[r / 2][1]);
      acc[r][i / 4].part[i % 4] += Ints(r % 2 ? vzip2q_s64(a, b) : vzip1q_s64(a, b));
    }
  }
};

}  // namespace

const Kernels k_neon_i8mm = make_kernels<Isa>("neon_i8mm");

}  // namespace edgellm

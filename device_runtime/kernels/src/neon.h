// Sixteen lanes as four NEON registers.
#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

#include "kernels.h"

namespace edgellm {
namespace {

struct NeonVector {
  using Q = float32x4_t;
  struct F { Q part[4]; };
  struct I { int32x4_t part[4]; };
  static constexpr int kMiddle8 = 0;  // int8 codes are made signed by one exclusive or

  template <class Out = F, class Function>
  static inline __attribute__((always_inline)) Out each(Function function) {
    return {{function(0), function(1), function(2), function(3)}};
  }
  static F load(const float* p) { return each([=](int i) { return vld1q_f32(p + 4 * i); }); }
  static void store(float* p, F x) {
    for (int i = 0; i < 4; i++) vst1q_f32(p + 4 * i, x.part[i]);
  }
  static F set(float x) { return each([=](int) { return vdupq_n_f32(x); }); }
  static F add(F a, F b) { return each([=](int i) { return vaddq_f32(a.part[i], b.part[i]); }); }
  static F sub(F a, F b) { return each([=](int i) { return vsubq_f32(a.part[i], b.part[i]); }); }
  static F mul(F a, F b) { return each([=](int i) { return vmulq_f32(a.part[i], b.part[i]); }); }
  static F div(F a, F b) { return each([=](int i) { return vdivq_f32(a.part[i], b.part[i]); }); }
  // As on other processors, the second of two is taken where one is no number.
  static F max(F a, F b) { return each([=](int i) { return vbslq_f32(vcgtq_f32(a.part[i], b.part[i]), a.part[i], b.part[i]); }); }
  static F min(F a, F b) { return each([=](int i) { return vbslq_f32(vcltq_f32(a.part[i], b.part[i]), a.part[i], b.part[i]); }); }
  static F abs(F a) { return each([=](int i) { return vabsq_f32(a.part[i]); }); }
  static F fma(F a, F b, F c) { return each([=](int i) { return vfmaq_f32(c.part[i], a.part[i], b.part[i]); }); }
  static F round(F a) { return each([=](int i) { return vrndnq_f32(a.part[i]); }); }
  static F pow2(F n) {
    return each([=](int i) {
      return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n.part[i]), vdupq_n_s32(127)), 23));
    });
  }
  static F load_half(const void* p) {
    const uint16_t* halves = static_cast<const uint16_t*>(p);
    return each([=](int i) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(halves + 4 * i))); });
  }
  static F load_bfloat(const void* p) {
    const uint16_t* halves = static_cast<const uint16_t*>(p);
    return each([=](int i) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(halves + 4 * i), 16)); });
  }
  static F load_fp8(const void* p) {  // see avx512.h
    const int8x16_t codes = vld1q_s8(static_cast<const int8_t*>(p));
    const int16x8_t kept = vdupq_n_s16(int16_t(0xbfff));
    const int16x8_t low = vandq_s16(vshlq_n_s16(vmovl_s8(vget_low_s8(codes)), 7), kept);
    const int16x8_t high = vandq_s16(vshlq_n_s16(vmovl_s8(vget_high_s8(codes)), 7), kept);
    const int16x4_t parts[] = {vget_low_s16(low), vget_high_s16(low), vget_low_s16(high), vget_high_s16(high)};
    return each([=](int i) { return vcvt_f32_f16(vreinterpret_f16_s16(parts[i])); });
  }
  static F load_codes(const int8_t* p) {
    const int8x16_t codes = vld1q_s8(p);
    const int16x8_t low = vmovl_s8(vget_low_s8(codes)), high = vmovl_s8(vget_high_s8(codes));
    return to_float({{vmovl_s16(vget_low_s16(low)), vmovl_s16(vget_high_s16(low)), vmovl_s16(vget_low_s16(high)), vmovl_s16(vget_high_s16(high))}});
  }
  static void store_half(void* p, F x) {
    uint16_t* halves = static_cast<uint16_t*>(p);
    for (int i = 0; i < 4; i++) vst1_u16(halves + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(x.part[i])));
  }
  static I to_int(F x) { return each<I>([=](int i) { return vcvtnq_s32_f32(x.part[i]); }); }
  static F to_float(I x) { return each([=](int i) { return vcvtq_f32_s32(x.part[i]); }); }
  static I set_int(int32_t x) { return each<I>([=](int) { return vdupq_n_s32(x); }); }
  static I times128(I x) { return each<I>([=](int i) { return vshlq_n_s32(x.part[i], 7); }); }
  static I add_int(I a, I b) { return each<I>([=](int i) { return vaddq_s32(a.part[i], b.part[i]); }); }
  static void store_codes(int8_t* p, I x) {
    const int16x8_t low = vcombine_s16(vqmovn_s32(x.part[0]), vqmovn_s32(x.part[1]));
    const int16x8_t high = vcombine_s16(vqmovn_s32(x.part[2]), vqmovn_s32(x.part[3]));
    vst1q_s8(p, vcombine_s8(vqmovn_s16(low), vqmovn_s16(high)));
  }
  static int32_t sum(I x) {
    return vaddvq_s32(vaddq_s32(vaddq_s32(x.part[0], x.part[1]), vaddq_s32(x.part[2], x.part[3])));
  }
  static Q ends(F x) { return vaddq_f32(vaddq_f32(x.part[0], x.part[2]), vaddq_f32(x.part[1], x.part[3])); }
  static float sum(F x) {  // lanes i and i + 8, then 4, 2, 1
    const Q four = ends(x);
    const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
  }
  static float largest(F x) {
    return vmaxvq_f32(vmaxq_f32(vmaxq_f32(x.part[0], x.part[1]), vmaxq_f32(x.part[2], x.part[3])));
  }
  static F sums(const F* x) {
    return each([=](int i) {
      const Q a = ends(x[4 * i]), b = ends(x[4 * i + 1]), c = ends(x[4 * i + 2]), d = ends(x[4 * i + 3]);
      const Q ab = vaddq_f32(vcombine_f32(vget_low_f32(a), vget_low_f32(b)), vcombine_f32(vget_high_f32(a), vget_high_f32(b)));
      const Q cd = vaddq_f32(vcombine_f32(vget_low_f32(c), vget_low_f32(d)), vcombine_f32(vget_high_f32(c), vget_high_f32(d)));
      return vpaddq_f32(ab, cd);
    });
  }

  template <bool kFp4>
  static int8x16_t decoded(uint8x16_t codes) { return vreinterpretq_s8_u8(kFp4 ? vqtbl1q_u8(vld1q_u8(kFp4Codes), codes) : codes); }
  template <bool kFp4>
  static int8x16_t low4(uint8x16_t codes) { return decoded<kFp4>(vandq_u8(codes, vdupq_n_u8(15))); }
  template <bool kFp4>
  static int8x16_t high4(uint8x16_t codes) { return decoded<kFp4>(vshrq_n_u8(codes, 4)); }
  static int8x16_t middle8(uint8x16_t codes) { return vreinterpretq_s8_u8(veorq_u8(codes, vdupq_n_u8(128))); }
};

}  // namespace
}  // namespace edgellm

// Registers of NEON: 4 lanes.
#pragma once

#include <arm_neon.h>

#include "vector.h"

namespace edgellm {
namespace {

struct Neon : Registers<16> {
  static constexpr int kMiddle8 = 0;  // int8 codes are made signed by one exclusive or
  static constexpr int kRows = 4, kStrips = 1, kAtOnce = 8, kTurnFrom = 0;
  static constexpr int kValueQueries = 6, kValueTile = 4, kSumRegisters = 24;

  static Floats fma(Floats a, Floats b, Floats c) {
    return Floats(vfmaq_f32(float32x4_t(c), float32x4_t(a), float32x4_t(b)));
  }
  static Floats from_half(Halves h) { return Floats(vcvt_f32_f16(float16x4_t(h))); }
  static Halves to_half(Floats x) { return Halves(vcvt_f16_f32(float32x4_t(x))); }
  template <bool kFp4>
  static Bytes decode(Bytes codes) {
    return kFp4 ? Bytes(vqtbl1q_u8(vld1q_u8(kFp4Codes), uint8x16_t(codes))) : codes;
  }
  // Sums with 4 codes of each channel and 4 of a row; `add8`: of codes that are not signed yet.
  static Ints add4(Ints sum, Bytes codes, Bytes x) {
    return Ints(vdotq_s32(int32x4_t(sum), int8x16_t(codes), int8x16_t(x)));
  }
  static Ints add8(Ints sum, Bytes codes, Bytes x) { return add4(sum, codes ^ 128, x); }
  static Ints to_ints(Halves h) { return Ints(vmovl_u16(uint16x4_t(h))); }
  static void load_bytes(const void* p, Halves* x) {
    const int8x16_t bytes = vld1q_s8(static_cast<const int8_t*>(p));
    const int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_s8(vget_high_s8(bytes));
    const int16x4_t parts[] = {vget_low_s16(low), vget_high_s16(low), vget_low_s16(high), vget_high_s16(high)};
    for (int i = 0; i < 4; i++) x[i] = Halves(parts[i]);
  }
  static void load_fp8(const void* p, Halves* x) {
    load_bytes(p, x);
    for (int i = 0; i < 4; i++) x[i] = x[i] << 7 & 0xbfff;
  }
  static void load_codes(const void* p, Ints* x) {
    Halves wide[4];
    load_bytes(p, wide);
    for (int i = 0; i < 4; i++) x[i] = Ints(vmovl_s16(int16x4_t(wide[i])));
  }
  static void store_codes(int8_t* p, const Ints* x) {
    const int16x8_t low = vcombine_s16(vqmovn_s32(int32x4_t(x[0])), vqmovn_s32(int32x4_t(x[1])));
    const int16x8_t high = vcombine_s16(vqmovn_s32(int32x4_t(x[2])), vqmovn_s32(int32x4_t(x[3])));
    vst1q_s8(p, vcombine_s8(vqmovn_s16(low), vqmovn_s16(high)));
  }
};

}  // namespace
}  // namespace edgellm

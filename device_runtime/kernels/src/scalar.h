// Plain C++ for any processor: what the other instruction sets must equal bit for bit.
#pragma once

#include "vector.h"

namespace edgellm {
namespace {

inline float float_of(uint32_t bits) {
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

inline float half_value(uint16_t h) {
  const uint32_t rest = h & 0x7fff, bits = (rest << 13) + ((rest < 0x7c00 ? 112u : 224u) << 23);  // infinity and NaN
  const float out = rest < 0x400 ? float(rest) * 0x1p-24f : float_of(bits);
  return h & 0x8000 ? -out : out;
}

inline uint16_t half_bits(float x) {  // to nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return sign | 0x7e00;
  if (bits >= 0x477ff000) return sign | 0x7c00;
  if (bits < 0x38800000) return sign | uint16_t(__builtin_rintf(float_of(bits) * 0x1p24f));
  bits += 0xfff + (bits >> 13 & 1);
  return sign | uint16_t((bits - (112u << 23)) >> 13);
}

struct Scalar : Registers<16> {
  static constexpr int kMiddle8 = 0;
  static constexpr int kRows = 2, kStrips = 2, kAtOnce = 1, kTurnFrom = 0;
  static constexpr int kValueQueries = 1, kValueTile = 1, kSumRegisters = 24;

  template <class Out, class Function>
  static Out lanes(Function function) {
    Out out{};
    for (int i = 0; i < kLanes; i++) out[i] = function(i);
    return out;
  }
  static Floats fma(Floats a, Floats b, Floats c) {
    return lanes<Floats>([&](int i) { return __builtin_fmaf(a[i], b[i], c[i]); });
  }
  static Floats from_half(Halves h) {
    return lanes<Floats>([&](int i) { return half_value(h[i]); });
  }
  static Halves to_half(Floats x) {
    return lanes<Halves>([&](int i) { return half_bits(x[i]); });
  }
  template <bool kFp4>
  static Bytes decode(Bytes codes) {
    for (int i = 0; kFp4 && i < kBytes; i++) codes[i] = kFp4Codes[codes[i]];
    return codes;
  }
  template <int kMiddle = 0>
  static Ints add4(Ints sum, Bytes codes, Bytes x) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) sum += ((Ints(codes) >> 8 * i & 255) - kMiddle) * (Ints(x) << (24 - 8 * i) >> 24);
    return sum;
  }
  static Ints add8(Ints sum, Bytes codes, Bytes x) { return add4<128>(sum, codes, x); }
  static Ints to_ints(Halves h) {
    return lanes<Ints>([&](int i) { return h[i]; });
  }
  template <class V>
  static void load_codes(const void* p, V* x) {
    for (int i = 0; i < kStrip; i++) x[i / kLanes][i % kLanes] = static_cast<const int8_t*>(p)[i];
  }
  static void load_fp8(const void* p, Halves* x) {
    load_codes(p, x);
    for (int i = 0; i < kStrip / kLanes; i++) x[i] = x[i] << 7 & 0xbfff;
  }
  static void store_codes(int8_t* p, const Ints* x) {
    for (int i = 0; i < kStrip; i++) p[i] = int8_t(x[i / kLanes][i % kLanes]);
  }
};

}  // namespace
}  // namespace edgellm

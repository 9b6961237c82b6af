// Sixteen lanes in plain C++: what the other instruction sets must equal bit for bit.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels.h"

namespace edgellm {
namespace {

struct ScalarVector {
  struct F { float lane[16]; };
  struct I { int32_t lane[16]; };
  static constexpr int kMiddle8 = 0;  // what int8 dot products leave to be taken off
  static constexpr int kRows = 2, kStrips = 2, kQueries = 1, kWide = 1, kTurnFrom = 0;

  template <class T, class Function>
  static T each(Function function) {
    T out;
    for (int i = 0; i < 16; i++) out.lane[i] = function(i);
    return out;
  }
  static F load(const float* p) {  // which need not be aligned
    F out;
    std::memcpy(out.lane, p, sizeof out.lane);
    return out;
  }
  static void store(float* p, F x) { std::memcpy(p, x.lane, sizeof x.lane); }
  static F set(float x) { return each<F>([&](int) { return x; }); }
  static F add(F a, F b) { return each<F>([&](int i) { return a.lane[i] + b.lane[i]; }); }
  static F sub(F a, F b) { return each<F>([&](int i) { return a.lane[i] - b.lane[i]; }); }
  static F mul(F a, F b) { return each<F>([&](int i) { return a.lane[i] * b.lane[i]; }); }
  static F div(F a, F b) { return each<F>([&](int i) { return a.lane[i] / b.lane[i]; }); }
  static F max(F a, F b) { return each<F>([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; }); }
  static F min(F a, F b) { return each<F>([&](int i) { return a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]; }); }
  static F abs(F a) { return each<F>([&](int i) { return __builtin_fabsf(a.lane[i]); }); }
  static F fma(F a, F b, F c) { return each<F>([&](int i) { return __builtin_fmaf(a.lane[i], b.lane[i], c.lane[i]); }); }
  static F round(F a) { return each<F>([&](int i) { return __builtin_rintf(a.lane[i]); }); }
  static F pow2(F n) {
    return each<F>([&](int i) {
      const uint32_t bits = uint32_t(int32_t(n.lane[i]) + 127) << 23;
      float out;
      std::memcpy(&out, &bits, 4);
      return out;
    });
  }
  static float half_value(uint16_t h) {
    const uint32_t sign = uint32_t(h & 0x8000) << 16, rest = h & 0x7fff;
    uint32_t bits = (rest << 13) + (112u << 23);
    if (rest >= 0x7c00) bits += 112u << 23;  // infinity and NaN
    float out;
    std::memcpy(&out, &bits, 4);
    if (rest < 0x400) out = float(rest) * 0x1p-24f;
    return sign ? -out : out;
  }
  static uint16_t word(const void* words, int64_t index) {
    uint16_t out;
    std::memcpy(&out, static_cast<const char*>(words) + 2 * index, 2);
    return out;
  }
  static F load_half(const void* p) { return each<F>([&](int i) { return half_value(word(p, i)); }); }
  static float bfloat_value(uint16_t b) {
    const uint32_t bits = uint32_t(b) << 16;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
  }
  static float fp8_value(uint8_t code) {  // E4M3; 1/256 of what the code stands for
    return half_value(uint16_t((code & 128) << 8 | (code & 127) << 7));
  }
  static F load_bfloat(const void* p) { return each<F>([&](int i) { return bfloat_value(word(p, i)); }); }
  static F load_fp8(const void* p) {
    return each<F>([&](int i) { return fp8_value(static_cast<const uint8_t*>(p)[i]); });
  }
  static F load_codes(const int8_t* p) { return each<F>([&](int i) { return float(p[i]); }); }
  static void store_half(void* p, F x) {
    uint16_t h[16];
    for (int i = 0; i < 16; i++) h[i] = half_bits(x.lane[i]);
    std::memcpy(p, h, sizeof h);
  }
  static uint16_t half_bits(float x) {  // to nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return sign | 0x7e00;
    if (bits >= 0x477ff000) return sign | 0x7c00;
    if (bits < 0x38800000) {
      float magnitude;
      std::memcpy(&magnitude, &bits, 4);
      return sign | uint16_t(__builtin_rintf(magnitude * 0x1p24f));
    }
    bits += 0xfff + (bits >> 13 & 1);
    return sign | uint16_t((bits - (112u << 23)) >> 13);
  }
  static I to_int(F x) { return each<I>([&](int i) { return int32_t(__builtin_rintf(x.lane[i])); }); }
  static F to_float(I x) { return each<F>([&](int i) { return float(x.lane[i]); }); }
  static I set_int(int32_t x) { return each<I>([&](int) { return x; }); }
  static I times128(I x) { return each<I>([&](int i) { return x.lane[i] * 128; }); }
  static I add_int(I a, I b) { return each<I>([&](int i) { return a.lane[i] + b.lane[i]; }); }
  static void store_codes(int8_t* p, I x) {
    for (int i = 0; i < 16; i++) p[i] = int8_t(x.lane[i] > 127 ? 127 : x.lane[i] < -128 ? -128 : x.lane[i]);
  }
  static int32_t sum(I x) {
    int32_t out = 0;
    for (int32_t lane : x.lane) out += lane;
    return out;
  }
  static float sum(F x) {  // lanes i and i + 8, then 4, 2, 1
    for (int half = 8; half; half /= 2)
      for (int i = 0; i < half; i++) x.lane[i] += x.lane[i + half];
    return x.lane[0];
  }
  static float largest(F x) {
    float out = x.lane[0];
    for (float lane : x.lane) out = lane > out ? lane : out;
    return out;
  }
  static F sums(const F* x) { return each<F>([&](int i) { return sum(x[i]); }); }

  // Adds sum over k of (code - middle) * x; see `dot` of the other instruction sets.
  template <bool kFp4, int R, int S>
  static void dot4(I (&acc)[R][S], const uint8_t* w, const int8_t* x, int64_t stride, int64_t block) {
    for (int64_t k = 0; k < block; k += 8, w += 128)
      for (int r = 0; r < R; r++)
        for (int s = 0; s < S; s++)
          for (int i = 0; i < 64; i++) {
            const int8_t* row = x + r * stride + k + i % 4;
            const int low = w[s * 64 + i] & 15, high = w[s * 64 + i] >> 4;
            acc[r][s].lane[i / 4] += (kFp4 ? kFp4Codes[low] : low) * row[0] + (kFp4 ? kFp4Codes[high] : high) * row[4];
          }
  }
  template <int R, int S>
  static void dot8(I (&acc)[R][S], const uint8_t* w, const int8_t* x, int64_t stride, int64_t block) {
    for (int64_t k = 0; k < block; k += 4, w += 128)
      for (int r = 0; r < R; r++)
        for (int s = 0; s < S; s++)
          for (int i = 0; i < 64; i++)
            acc[r][s].lane[i / 4] += (w[s * 64 + i] - 128) * x[r * stride + k + i % 4];
  }
};

}  // namespace
}  // namespace edgellm

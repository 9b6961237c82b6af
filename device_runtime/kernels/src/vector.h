// Sixteen lanes in the compiler's own vectors. An instruction set says how wide they are and adds
// what these cannot say: `fma`, halves and products of bytes.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "kernels.h"

#ifndef __has_builtin
#define __has_builtin(x) 0
#endif

namespace edgellm {
namespace {

#ifndef EDGELLM_INLINE
#define EDGELLM_INLINE inline __attribute__((always_inline))
#endif
#define EDGELLM_LAMBDA __attribute__((always_inline))

// Registers of `kBytes` bytes.
template <int kBytes_>
struct Registers {
  static constexpr int kBytes = kBytes_, kLanes = kBytes / 4;
  typedef float Floats __attribute__((vector_size(kBytes_)));
  typedef int32_t Ints __attribute__((vector_size(kBytes_)));
  typedef uint8_t Bytes __attribute__((vector_size(kBytes_)));
  typedef uint16_t Halves __attribute__((vector_size(kBytes_ / 2)));

  static constexpr bool kWholeGroups = false;  // products of codes sum all channels of a record at once
  static constexpr bool kJoinsTerms = false;  // the two codes of an input are one of 16 bits; see `dot_words`
  static constexpr int kUnpackedBlock = 0;  // inputs of the largest block whose codes many rows unpack once
  static constexpr int kUnpackedRows = 5, kUnpackedStrips = 1;  // multiplied with unpacked codes at once
  static constexpr int kPairQueries = 4, kPairRegisters = 4, kPairSums = 16;  // of attention to bfloat16
  static constexpr bool kInterleaves = false;  // has `interleave`, of two registers' halves
  static constexpr int kFetchFrom = 2;  // rows of a product; see `PrefetchRange`

  template <class V>
  static EDGELLM_INLINE V read(const void* p) {  // which need not be aligned
    V out;
    __builtin_memcpy(&out, p, sizeof out);
    return out;
  }
  template <class V>
  static EDGELLM_INLINE void write(void* p, V x) {
    __builtin_memcpy(p, &x, sizeof x);
  }
  template <int... kLane, class V>
  static EDGELLM_INLINE V shuffle(V a, V b) {
#if __has_builtin(__builtin_shufflevector)
    return __builtin_shufflevector(a, b, kLane...);
#else
    return __builtin_shuffle(a, b, Ints{kLane...});
#endif
  }
  // The codes of four inputs from those of a unit.
  template <int kBits, int kQuad, int kTo = 0, int kWords>
  static EDGELLM_INLINE Bytes quad(const Bytes (&words)[kWords]) {
    constexpr CodePiece piece = piece_of(kBits, kQuad, kTo);
    constexpr uint32_t mask = (((1u << piece.width) - 1) << piece.to) * 0x01010101u;
    const Bytes found = Bytes(Ints(words[piece.word]) >> (piece.from - piece.to) & int32_t(mask));
    if constexpr (piece.to + piece.width < kBits)
      return found | quad<kBits, kQuad, piece.to + piece.width>(words);
    else
      return found;
  }
  // function(j, codes of inputs 4 j to 4 j + 3) for one register of channels of a unit at w.
  template <int kBits, class Function, size_t... j>
  static EDGELLM_INLINE void each_quad(const uint8_t* w, Function function, std::index_sequence<j...>) {
    constexpr int kWords = unit_of(kBits).words;
    Bytes words[kWords];
#pragma GCC unroll 8
    for (int i = 0; i < kWords; i++) words[i] = read<Bytes>(w + i * 4 * kGroup);
    (function(std::integral_constant<int, int(j)>{}, quad<kBits, int(j)>(words)), ...);
  }
  template <int kBits, class Function>
  static EDGELLM_INLINE void each_quad(const uint8_t* w, Function function) {
    each_quad<kBits>(w, function, std::make_index_sequence<unit_of(kBits).quads>{});
  }
  // function(first quad, unit, its first input) for the units of a block, or of two blocks of 16 inputs.
  template <int kBits, int H, class Function, size_t... i>
  static EDGELLM_INLINE void each_unit(const uint8_t* w, int64_t block, Function function, std::index_sequence<i...>) {
    constexpr int kBytesOfUnit = unit_of(kBits).words * 4 * kGroup, kQuads = unit_of(kBits).quads;
    if constexpr (H == 1)
      for (int64_t k = 0; k < block; k += 4 * kQuads, w += kBytesOfUnit)
        function(std::integral_constant<int, 0>{}, w, k);
    else
      (function(std::integral_constant<int, int(i) * kQuads>{}, w + i * kBytesOfUnit, int64_t(i) * 4 * kQuads), ...);
  }
  template <int kBits, int H, class Function>
  static EDGELLM_INLINE void each_unit(const uint8_t* w, int64_t block, Function function) {
    each_unit<kBits, H>(w, block, function, std::make_index_sequence<8 / unit_of(kBits).quads>{});
  }
  // Of every 2 * kHalf lanes the lower halves of a and b, or from kUp = kHalf on the upper.
  template <int kHalf, int kUp, class V, size_t... j>
  static EDGELLM_INLINE V halves(V a, V b, std::index_sequence<j...>) {
    return shuffle<int(j / (2 * kHalf) * 2 * kHalf + j % kHalf + kUp + j % (2 * kHalf) / kHalf * kLanes)...>(a, b);
  }
  template <int kHalf, class V, class Function>
  static EDGELLM_INLINE V fold(V a, V b, Function function) {
    constexpr std::make_index_sequence<kLanes> lanes{};
    return function(halves<kHalf, 0>(a, b, lanes), halves<kHalf, kHalf>(a, b, lanes));
  }
};

template <class Native>
struct Vector : Native {
  using Native::kBytes, Native::kLanes;
  using typename Native::Floats, typename Native::Ints, typename Native::Bytes, typename Native::Halves;
  static constexpr int kParts = kStrip / kLanes;
  template <class V>
  struct Several {
    V part[kParts];
  };
  using F = std::conditional_t<kParts == 1, Floats, Several<Floats>>;
  using I = std::conditional_t<kParts == 1, Ints, Several<Ints>>;

  // Written out, never a loop: what compilers index they keep in memory.
  template <class X>
  static EDGELLM_INLINE auto& part(X& x, int i) {
    if constexpr (kParts == 1)
      return x;
    else
      return x.part[i];
  }
  template <class Out = F, class Function, size_t... i>
  static EDGELLM_INLINE Out each(Function function, std::index_sequence<i...>) {
    return {function(int(i))...};
  }
  template <class Out = F, class Function>
  static EDGELLM_INLINE Out each(Function function) {
    if constexpr (kParts == 1)
      return function(0);
    else
      return each<Out>(function, std::make_index_sequence<kParts>{});
  }
  template <class Function, size_t... i>
  static EDGELLM_INLINE void for_each(Function function, std::index_sequence<i...>) {
    (function(int(i)), ...);
  }
  template <class Function>
  static EDGELLM_INLINE void for_each(Function function) {
    for_each(function, std::make_index_sequence<kParts>{});
  }
  template <class Out = F, class Function, class... In>
  static EDGELLM_INLINE Out map(Function function, In... in) {
    if constexpr (kParts == 1)
      return function(in...);
    else
      return each<Out>([&](int i) { return function(in.part[i]...); });
  }

  static EDGELLM_INLINE F load(const float* p) {
    return each([=](int i) { return Native::template read<Floats>(p + i * kLanes); });
  }
  static EDGELLM_INLINE void store(float* p, F x) {
    for_each([&](int i) { Native::write(p + i * kLanes, part(x, i)); });
  }
  static EDGELLM_INLINE F set(float x) {
    return each([=](int) { return x - Floats{}; });
  }
  static constexpr auto plus = [](auto a, auto b) { return a + b; };
  // The second of two is taken where one is no number.
  static constexpr auto larger = [](Floats a, Floats b) { return a > b ? a : b; };
  static EDGELLM_INLINE F add(F a, F b) { return map(plus, a, b); }
  static EDGELLM_INLINE F sub(F a, F b) {
    return map([](Floats x, Floats y) { return x - y; }, a, b);
  }
  static EDGELLM_INLINE F mul(F a, F b) {
    return map([](Floats x, Floats y) { return x * y; }, a, b);
  }
  static EDGELLM_INLINE F div(F a, F b) {
    return map([](Floats x, Floats y) { return x / y; }, a, b);
  }
  static EDGELLM_INLINE F max(F a, F b) { return map(larger, a, b); }
  static EDGELLM_INLINE F min(F a, F b) {
    return map([](Floats x, Floats y) { return x < y ? x : y; }, a, b);
  }
  static EDGELLM_INLINE F abs(F a) {
    return map([](Floats x) { return Floats(Ints(x) & 0x7fffffff); }, a);
  }
  using Native::fma;
  static EDGELLM_INLINE F fma(F a, F b, F c) {
    return map([](Floats x, Floats y, Floats z) { return Native::fma(x, y, z); }, a, b, c);
  }
  // To nearest, ties to even, of |a| < 2^22: what is added leaves no digits behind the point.
  static constexpr float kPoint = 0x1.8p23f;
  static constexpr int32_t kPointBits = 0x4b400000;
  static EDGELLM_INLINE I to_int(F a) {
    return map<I>([](Floats x) { return Ints(x + kPoint) - kPointBits; }, a);
  }
  // 2^n of the whole number n nearest to a; n is at least -126 and at most 127.
  static EDGELLM_INLINE F pow2(F a, F& n) {
    const F whole = add(a, set(kPoint));
    n = sub(whole, set(kPoint));
    return map([](Floats x) { return Floats((Ints(x) + 127) << 23); }, whole);
  }
  static EDGELLM_INLINE F to_float(I a) {
    return map([](Ints x) { return __builtin_convertvector(x, Floats); }, a);
  }
  static EDGELLM_INLINE I set_int(int32_t x) {
    return each<I>([=](int) { return x + Ints{}; });
  }
  static EDGELLM_INLINE I times128(I a) {
    return map<I>([](Ints x) { return x << 7; }, a);
  }
  static EDGELLM_INLINE I add_int(I a, I b) { return map<I>(plus, a, b); }

  static EDGELLM_INLINE Halves halves_at(const void* p, int i) {
    return Native::template read<Halves>(static_cast<const uint16_t*>(p) + i * kLanes);
  }
  static EDGELLM_INLINE F load_half(const void* p) {
    return each([=](int i) { return Native::from_half(halves_at(p, i)); });
  }
  static EDGELLM_INLINE F load_bfloat(const void* p) {
    return each([=](int i) { return Floats(Native::to_ints(halves_at(p, i)) << 16); });
  }
  // E4M3's exponent and digits stand in a half as 1/256 of what they stand for.
  static EDGELLM_INLINE F load_fp8(const void* p) {
    Halves halves[kParts];
    Native::load_fp8(p, halves);
    return each([&](int i) { return Native::from_half(halves[i]); });
  }
  static EDGELLM_INLINE F load_codes(const int8_t* p) {
    Ints x[kParts];
    Native::load_codes(p, x);
    return each([&](int i) { return __builtin_convertvector(x[i], Floats); });
  }
  // Sixteen bytes' halves, as numbers from 0 to 15.
  template <bool kHigh>
  static EDGELLM_INLINE F load_nibbles(const uint8_t* p) {
    Ints x[kParts];
    Native::load_codes(p, x);
    return each([&](int i) { return __builtin_convertvector(x[i] >> (kHigh ? 4 : 0) & 15, Floats); });
  }
  // The same as numbers from -8 to 7.
  template <bool kHigh>
  static EDGELLM_INLINE F load_signed_nibbles(const void* p) {
    Ints x[kParts];
    Native::load_codes(p, x);
    return each([&](int i) { return __builtin_convertvector(kHigh ? x[i] >> 4 : x[i] << 28 >> 28, Floats); });
  }
  static EDGELLM_INLINE void store_half(void* p, F x) {
    for_each([&](int i) { Native::write(static_cast<uint16_t*>(p) + i * kLanes, Native::to_half(part(x, i))); });
  }
  static EDGELLM_INLINE void store_bfloat(void* p, F x) {  // to nearest, ties to even
    for_each([&](int i) {
      const Ints bits = Ints(part(x, i)), rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
      Native::write(static_cast<uint16_t*>(p) + i * kLanes, __builtin_convertvector(rounded, Halves));
    });
  }
  // Adds the products of two pairs of bfloat16: of the odd numbers, then of the even ones. Products are exact in float.
  static EDGELLM_INLINE Floats dot_pairs(Floats sum, Ints a, Ints b) {
    const auto odd = [](Ints x) { return Floats(x & int32_t(0xffff0000)); };
    const auto even = [](Ints x) { return Floats(x << 16); };
    return Native::fma(even(a), even(b), Native::fma(odd(a), odd(b), sum));
  }
  static EDGELLM_INLINE void store_codes(int8_t* p, I x) { Native::store_codes(p, &part(x, 0)); }

  // ------------------------------------------------------------------------------ across lanes
  // Lanes i and i + 8 first, then 4, 2, 1.
  template <class V, class Function>
  static EDGELLM_INLINE auto all_lanes(V x, Function function) {
    return one_lane<kLanes / 2>(x, function, std::make_index_sequence<kLanes>{});
  }
  template <int kHalf, class V, class Function, size_t... j>
  static EDGELLM_INLINE auto one_lane(V x, Function function, std::index_sequence<j...> lanes) {
    if constexpr (kHalf > 0)
      return one_lane<kHalf / 2>(function(x, Native::template shuffle<int(j ^ kHalf)...>(x, x)), function, lanes);
    else
      return x[0];
  }
  template <int kLeft = kParts / 2, class X, class Function>
  static EDGELLM_INLINE auto all_parts(X x, Function function) {
    if constexpr (kLeft > 0) {
      for (int i = 0; i < kLeft; i++) x.part[i] = function(x.part[i], x.part[i + kLeft]);
      return all_parts<kLeft / 2>(x, function);
    } else {
      return part(x, 0);
    }
  }
  static EDGELLM_INLINE int32_t sum(I x) { return all_lanes(all_parts(x, plus), plus); }
  static EDGELLM_INLINE float sum(F x) { return all_lanes(all_parts(x, plus), plus); }
  static EDGELLM_INLINE float largest(F x) { return all_lanes(all_parts(x, larger), larger); }

  // Lane i: sum(x[i]), in its order; each step halves both the registers and what is left to add.
  template <int kHalf = kLanes / 2>
  static EDGELLM_INLINE Floats halve(Floats* x) {
    if constexpr (kHalf > 0) {
      for (int i = 0; i < kHalf; i++) x[i] = Native::template fold<kHalf>(x[i], x[i + kHalf], plus);
      return halve<kHalf / 2>(x);
    } else {
      return x[0];
    }
  }
  static EDGELLM_INLINE F sums(const F* x) {
    Floats one[kStrip];
    for (int i = 0; i < kStrip; i++) one[i] = all_parts(x[i], plus);
    return each([&](int i) { return halve(one + i * kLanes); });
  }
  // Stores lane i of vector j as lane j of vector i. Each step exchanges a bit of the lane's number with that of the
  // register's.
  template <int kHalf = kLanes / 2>
  static EDGELLM_INLINE void transpose(Floats* x) {
    constexpr std::make_index_sequence<kLanes> lanes{};
    if constexpr (kHalf > 0) {
      for (int i = 0; i < kLanes; i++) {
        if (i & kHalf) continue;
        const Floats a = x[i], b = x[i + kHalf];
        x[i] = Native::template halves<kHalf, 0>(a, b, lanes);
        x[i + kHalf] = Native::template halves<kHalf, kHalf>(a, b, lanes);
      }
      transpose<kHalf / 2>(x);
    }
  }
  static EDGELLM_INLINE void store_transposed(F* x, float* out) {
    for (int from = 0; from < kParts; from++)
      for (int to = 0; to < kParts; to++) {
        Floats block[kLanes];
        for (int i = 0; i < kLanes; i++) block[i] = part(x[to * kLanes + i], from);
        transpose(block);
        for (int i = 0; i < kLanes; i++) Native::write(out + (from * kLanes + i) * kStrip + to * kLanes, block[i]);
      }
  }

  // ------------------------------------------------------------------------- products of bytes
  // Adds, for each channel, the sum over k of (code - middle) * x, `kAtOnce` registers of channels at
  // a time. `Native::add4` and `add8` add the products of 4 codes of each channel and 4 of the row.
  static EDGELLM_INLINE Bytes broadcast(const int8_t* p) {
    int32_t four;
    std::memcpy(&four, p, 4);
    return Bytes(four + Ints{});
  }
  // Of each lane's 32 codes below 16, four in each register, times those of a row.
  static EDGELLM_INLINE Ints sum_nibbles(const Bytes (&codes)[8], const int8_t* x) {
    Ints sum{};
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) sum = Native::add4(sum, codes[i], broadcast(x + 4 * i));
    return sum;
  }
  template <Form kForm, int R, int S>
  static EDGELLM_INLINE void dot(I (&acc)[R][S], const uint8_t* w, const int8_t* x, int64_t stride, int64_t block) {
    if (kForm == Form::kInt8 || (kForm == Form::kInt4 && block > 16))
      dot_by<kForm, 4>(acc, w, x, stride, block);
    else
      dot_by<kForm, 2>(acc, w, x, stride, block);
  }
  // The same of codes in units, of H blocks; two have 16 inputs each.
  template <Form kForm, int H, int R, int S>
  static EDGELLM_INLINE void dot_units(I (&acc)[H][R][S], const uint8_t* w, const int8_t* x, int64_t stride,
                                       int64_t block) {
    constexpr int kBits = bits_of(kForm);
#pragma GCC unroll 8
    for (int i = 0; i < S * kParts; i++) {
      Ints sums[H][R];
      each_sum<H, R>([&](int h, int r) { sums[h][r] = part(acc[h][r][i / kParts], i % kParts); });
      const auto add_unit = [&](auto first, const uint8_t* unit, int64_t k) EDGELLM_LAMBDA {
        Native::template each_quad<kBits>(unit, [&](auto j, Bytes codes) EDGELLM_LAMBDA {
          constexpr int h = H == 1 ? 0 : (decltype(first)::value + decltype(j)::value) / 4;
          const int8_t* row = x + k + 4 * j;
#pragma GCC unroll 8
          for (int r = 0; r < R; r++) sums[h][r] = Native::add4(sums[h][r], codes, broadcast(row + r * stride));
        });
      };
      Native::template each_unit<kBits, H>(w + i * kBytes, block, add_unit);
      each_sum<H, R>([&](int h, int r) { part(acc[h][r][i / kParts], i % kParts) = sums[h][r]; });
    }
  }
  // Codes of a strip as bytes, [inputs / 4][16 channels][4].
  template <Form kForm>
  static EDGELLM_INLINE void unpack(const uint8_t* w, int64_t inputs, uint8_t* out) {
    constexpr int kBits = bits_of(kForm);
    for (int c = 0; c < kParts; c++)
      Native::template each_unit<kBits, 1>(
          w + c * kBytes, inputs, [&](auto, const uint8_t* unit, int64_t k) EDGELLM_LAMBDA {
            Native::template each_quad<kBits>(unit, [&](auto j, Bytes codes) EDGELLM_LAMBDA {
              Native::write(out + (k + 4 * j) * kStrip + c * kBytes, codes);
            });
          });
  }
  // Adds the products of R rows and the unpacked codes of S strips, `apart` bytes from each other, along a block.
  template <Form kForm, int kBlock, int R, int S>
  static EDGELLM_INLINE void dot_unpacked(I (&sums)[R][S], const uint8_t* w, int64_t apart, const int8_t* x,
                                          int64_t stride) {
#pragma GCC unroll 2
    for (int c = 0; c < kParts; c++) {
      Ints some[R][S];
      each_sum<R, S>([&](int r, int s) { some[r][s] = part(sums[r][s], c); });
#pragma GCC unroll 8
      for (int k = 0; k < kBlock; k += 4) {
        Bytes codes[S];
        for (int s = 0; s < S; s++) codes[s] = Native::template read<Bytes>(w + s * apart + k * kStrip + c * kBytes);
        each_sum<R, S>(
            [&](int r, int s) { some[r][s] = Native::add4(some[r][s], codes[s], broadcast(x + r * stride + k)); });
      }
      each_sum<R, S>([&](int r, int s) { part(sums[r][s], c) = some[r][s]; });
    }
  }

 private:
  template <Form kForm, int kSteps, int R, int S>
  static EDGELLM_INLINE void dot_by(I (&acc)[R][S], const uint8_t* w, const int8_t* x, int64_t stride, int64_t block) {
    constexpr int kInputs = kForm == Form::kInt8 ? 4 : 8,
                  C = Native::kAtOnce < S * kParts ? Native::kAtOnce : S * kParts;
#pragma GCC unroll 8
    for (int first = 0; first < S * kParts; first += C) {
      Ints sums[R][C];
      each_sum<R, C>([&](int r, int c) { sums[r][c] = part(acc[r][(first + c) / kParts], (first + c) % kParts); });
      for (int64_t k = 0; k < block; k += kInputs * kSteps) {
        Ints some[R][C];  // apart from those that go round the loop
        each_sum<R, C>([&](int r, int c) { some[r][c] = sums[r][c]; });
#pragma GCC unroll 4
        for (int step = 0; step < kSteps; step++) {
          const int8_t* row = x + k + step * kInputs;
          Bytes codes[C], low[C], high[C];
          for (int c = 0; c < C; c++) {
            codes[c] = Native::template read<Bytes>(w + (k / kInputs + step) * 128 + (first + c) * kBytes);
            low[c] = Native::template decode<kForm == Form::kFp4>(codes[c] & 15);
            high[c] = Native::template decode<kForm == Form::kFp4>(codes[c] >> 4);
          }
          if constexpr (kForm == Form::kInt8) {
            each_sum<R, C>(
                [&](int r, int c) { sums[r][c] = Native::add8(sums[r][c], codes[c], broadcast(row + r * stride)); });
          } else {
            each_sum<R, C>(
                [&](int r, int c) { some[r][c] = Native::add4(some[r][c], low[c], broadcast(row + r * stride)); });
            each_sum<R, C>(
                [&](int r, int c) { some[r][c] = Native::add4(some[r][c], high[c], broadcast(row + r * stride + 4)); });
          }
        }
        if constexpr (kForm != Form::kInt8) each_sum<R, C>([&](int r, int c) { sums[r][c] = some[r][c]; });
      }
      each_sum<R, C>([&](int r, int c) { part(acc[r][(first + c) / kParts], (first + c) % kParts) = sums[r][c]; });
    }
  }
  template <int R, int C, class Function>
  static EDGELLM_INLINE void each_sum(Function function) {
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
      for (int c = 0; c < C; c++) function(r, c);
  }
};

}  // namespace
}  // namespace edgellm

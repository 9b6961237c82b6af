// Products of prepared rows and a packed weight.
#pragma once

#include "epilogue.h"
#include "kernels.h"
#include "kinds.h"
#include "many_rows.h"
#include "vector_math.h"

namespace edgellm {
namespace {

// ---------------------------------------------------------------------- 32 channels of a few rows
// From `kFetchFrom` rows on, each tile prefetches a part of the next group's records: fewer rows are limited by memory
// anyway, more would leave it idle while they compute.

// out[r][s]: sums of channels [16 s, 16 s + 16) from `strip` on; blocks are added in their order.
template <class Isa, int R, int S, class Kind>
void quantized_tile(const Product& p, const uint8_t* record, int strip, int64_t row, PrefetchRange share,
                    F<Isa> (&out)[R][S]) {
  constexpr Form kForm = Kind::kForm;
  constexpr int T = sums_of_row<Isa, Kind>(), H = Kind::kBlocks, kParts = Kind::kParts;
  constexpr bool kJoined = T < Kind::kTerms;
  const Weight& w = *p.weight;
  const int64_t blocks = p.rows.blocks, inputs = Kind::inputs(w), bytes = w.record_bytes(), ahead = w.group_bytes();
  const int64_t codes = w.code_bytes(), step = codes / kParts, halves_at = w.halves_at();
  const int8_t* x = p.rows.codes + row * Kind::kTerms * p.rows.stride;
  const float* scales = p.rows.scales + row * blocks;
  const float* offsets = p.rows.offsets + row * blocks;
  const int32_t* starts = p.rows.starts + row * blocks;
  F<Isa> total[R][S];
  for (auto& totals : total)
    for (F<Isa>& one : totals) one = Isa::set(0);
  for (int64_t b = 0; b < blocks; record += bytes)
    for (int i = 0; i < kParts; i++, b += H, x += kJoined ? 2 * inputs : inputs) {
      for (int64_t at = share.first; at < share.last; at += 64)
        __builtin_prefetch(record + ahead + i * bytes / kParts + at, 0, 2);
      I<Isa> acc[H][R * T][S];
      for (int h = 0; h < H; h++)
        for (int r = 0; r < R * T; r++)
          for (int s = 0; s < S; s++)
            acc[h][r][s] = Isa::set_int(r % T < T - 1 ? 0 : starts[r / T * blocks + b + h]);
      const uint8_t* first = record + i * step + strip * 64;
      if constexpr (has_odd_bits(kForm))
        Isa::template dot_units<kForm>(acc, first, x, p.rows.stride, inputs / H);
      else if constexpr (kJoined)
        Isa::dot_words(acc[0], first, reinterpret_cast<const int16_t*>(x), p.rows.stride, inputs);
      else
        Isa::template dot<kForm>(acc[0], first, x, p.rows.stride, inputs);
      for (int h = 0; h < H; h++)
        for (int s = 0; s < S; s++) {
          const Factors<Isa> f = load_factors<Isa, Kind>(
              record + halves_at + (strip + s) * 32, record + codes + (i * H + h) * kGroup + (strip + s) * kStrip);
          for (int r = 0; r < R; r++) {
            const int64_t at = r * blocks + b + h;
            const I<Isa>& last = acc[h][r * T + T - 1][s];
            const I<Isa> sum = T == 1 ? last : Isa::add_int(Isa::times128(acc[h][r * T][s]), last);
            total[r][s] = Isa::fma(Isa::to_float(sum), Isa::mul(f.scale, Isa::set(scales[at])), total[r][s]);
            if (Kind::kZero) total[r][s] = Isa::fma(f.minimum, Isa::set(offsets[at]), total[r][s]);
          }
        }
    }
  for (int r = 0; r < R; r++)
    for (int s = 0; s < S; s++) out[r][s] = total[r][s];
}

template <class Isa, Form kForm>
F<Isa> load_weights(const uint8_t* p) {
  if constexpr (kForm == Form::kFloat32) return Isa::load(reinterpret_cast<const float*>(p));
  return kForm == Form::kFloat16    ? Isa::load_half(p)
         : kForm == Form::kBFloat16 ? Isa::load_bfloat(p)
                                    : Isa::load_fp8(p);
}

// Weights that are decoded to floats: products are added in order along a block, or along all of K.
template <class Isa, int R, int S, Form kForm>
void float_tile(const Product& p, const uint8_t* record, int strip, int64_t row, PrefetchRange share,
                F<Isa> (&out)[R][S]) {
  constexpr bool kFp8 = kForm == Form::kFp8;
  constexpr int kStep = kFp8 ? kGroup : kForm == Form::kFloat32 ? 4 * kGroup : 2 * kGroup, kStripStep = kStep / 2;
  const Weight& w = *p.weight;
  const int64_t ahead = w.group_bytes(), K = w.in_features, block = kFp8 ? w.block : K;
  const float* x = p.rows.floats + row * p.rows.stride;
  for (auto& some : out)
    for (F<Isa>& one : some) one = Isa::set(0);
  for (int64_t first = 0; first < K; first += block) {
    const uint8_t* codes = record + strip * kStripStep;
    F<Isa> sums[R][S];
    for (auto& some : sums)
      for (F<Isa>& one : some) one = Isa::set(0);
    for (int64_t k = first, end = least(first + block, K); k < end; k++, codes += kStep) {
      if (share.first < share.last && (k * kStep) % 64 == 0) __builtin_prefetch(codes + ahead, 0, 2);
      for (int s = 0; s < S; s++) {
        const F<Isa> weight = load_weights<Isa, kForm>(codes + s * kStripStep);
        for (int r = 0; r < R; r++) sums[r][s] = Isa::fma(weight, Isa::set(x[r * p.rows.stride + k]), sums[r][s]);
      }
    }
    record += block * kStep;
    for (int s = 0; s < S; s++) {
      const F<Isa> scale =
          kFp8 ? Isa::load(reinterpret_cast<const float*>(record) + (strip + s) * kStrip) : Isa::set(1);
      for (int r = 0; r < R; r++) out[r][s] = kFp8 ? Isa::fma(sums[r][s], scale, out[r][s]) : sums[r][s];
    }
    record += kFp8 ? kGroup * sizeof(float) : 0;
  }
}

template <class Isa, int R, int S, class Kind>
void run_tile(const Product& p, int64_t group, int64_t row, PrefetchRange share) {
  const Weight& w = *p.weight;
  F<Isa> sums[R][2];
  for (int strip = 0; strip < 2; strip += S) {
    F<Isa> some[R][S];
    const uint8_t* record = w.records + group * w.group_bytes();
    if constexpr (takes_codes(Kind::kForm))
      quantized_tile<Isa, R, S, Kind>(p, record, strip, row, strip ? PrefetchRange{} : share, some);
    else
      float_tile<Isa, R, S, Kind::kForm>(p, record, strip, row, strip ? PrefetchRange{} : share, some);
    for (int r = 0; r < R; r++)
      for (int s = 0; s < S; s++) sums[r][strip + s] = some[r][s];
  }
  for (int r = 0; r < R; r++) write_group<Isa>(p, group, row + r, sums[r][0], sums[r][1]);
}

template <class Isa, int R, class Kind>
void run_rows(const Product& p, int64_t group, int64_t row, int64_t count, PrefetchRange share) {
  constexpr int kStrips = R == 1 || (takes_codes(Kind::kForm) && Isa::kWholeGroups) ? 2 : Isa::kStrips;
  if (count == R)
    run_tile<Isa, R, kStrips, Kind>(p, group, row, share);
  else if constexpr (R > 1)
    run_rows<Isa, R - 1, Kind>(p, group, row, count, share);
}

// A panel of rows stays in the L2 cache while the weights are read.
constexpr int64_t kPanelBytes = 512 << 10;

template <class Isa, class Kind>
void run_groups(const Product& p, int64_t first, int64_t last) {
  constexpr bool kCanUnpack = Kind::kScaled || Kind::kForm == Form::kInt4 || Kind::kForm == Form::kInt5;
  if constexpr (kCanUnpack && Unpacked<Isa, Kind>::kBlock <= Isa::kUnpackedBlock)
    if (p.num_rows >= kManyRows && p.weight->block == Unpacked<Isa, Kind>::kBlock)
      return multiply_many_rows<Isa, Kind>(p, first, last);
  constexpr int kRows = Isa::kRows / sums_of_row<Isa, Kind>();
  const int64_t row_bytes = p.rows.stride * (takes_codes(Kind::kForm) ? Kind::kTerms : 4);
  const int64_t fitting = kPanelBytes / row_bytes / kRows * kRows;
  const int64_t panel = fitting > kRows ? fitting : kRows;
  const int64_t lines = (p.weight->record_bytes() / Kind::kParts + 63) / 64;
  for (int64_t top = 0; top < p.num_rows; top += panel) {
    const int64_t rows = p.num_rows - top < panel ? p.num_rows - top : panel;
    const int64_t tiles = (rows + kRows - 1) / kRows;
    for (int64_t group = first; group < last; group++)
      for (int64_t tile = 0; tile < tiles; tile++) {
        const int64_t begin = rows * tile / tiles, end = rows * (tile + 1) / tiles;
        const PrefetchRange share = {lines * tile / tiles * 64, lines * (tile + 1) / tiles * 64};
        run_rows<Isa, kRows, Kind>(p, group, top + begin, end - begin,
                                   rows < Isa::kFetchFrom ? PrefetchRange{} : share);
      }
  }
}

template <class Isa>
void product(const Product& p, int64_t first, int64_t last) {
  with_kind(*p.weight, [&](auto kind) { run_groups<Isa, decltype(kind)>(p, first, last); });
}

}  // namespace
}  // namespace edgellm

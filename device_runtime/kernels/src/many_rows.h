// Products of many rows with codes of 2 to 6 bits in blocks of 16 or 32: a group's codes are unpacked once for all rows.
#pragma once

#include "epilogue.h"
#include "kernels.h"
#include "kinds.h"
#include "vector_math.h"

namespace edgellm {
namespace {

constexpr int kManyRows = 24;
constexpr int kUnpackedInputs = 2 * kSpan;  // whose codes of a group stay in the first cache
constexpr int kPanelRows = 128;

// The codes of some inputs of a group as bytes, [strip][inputs / 4][16 channels][4], and their blocks' factors.
template <class Isa, class Kind>
struct Unpacked {
  static constexpr int kBlock = kAtOnce / Kind::kBlocks;
  alignas(64) uint8_t codes[2][kUnpackedInputs * kStrip];
  alignas(64) float scales[kUnpackedInputs / kBlock][kGroup], minima[kUnpackedInputs / kBlock][kGroup];

  void read(const Weight& w, const uint8_t* record, int64_t blocks) {
    constexpr int H = Kind::kBlocks, kParts = Kind::kParts;
    const int64_t code_bytes = w.code_bytes();
    for (int64_t b = 0; b < blocks; record += w.record_bytes())
      for (int i = 0; i < kParts; i++, b += H)
        for (int s = 0; s < 2; s++) {
          Isa::template unpack<Kind::kForm>(record + i * code_bytes / kParts + s * 64, kAtOnce,
                                            codes[s] + b * kBlock * kStrip);
          for (int h = 0; h < H; h++) {
            const Factors<Isa> f = load_factors<Isa, Kind>(record + w.halves_at() + s * 32,
                                                           record + code_bytes + (i * H + h) * kGroup + s * kStrip);
            Isa::store(scales[b + h] + s * kStrip, f.scale);
            if (Kind::kZero) Isa::store(minima[b + h] + s * kStrip, f.minimum);
          }
        }
  }
};

// Adds blocks in their order to the sums of R rows, [rows, 32 channels].
template <class Isa, int R, class Kind>
void add_blocks(const Product& p, const Unpacked<Isa, Kind>& some, int64_t row, int64_t first, int64_t blocks,
                float* sums) {
  constexpr int kBlock = Unpacked<Isa, Kind>::kBlock;
  const Rows& rows = p.rows;
  for (int s = 0; s < 2; s++)
    for (int64_t b = 0; b < blocks; b++) {
      I<Isa> found[R];
      Isa::template dot_unpacked<Kind::kForm, kBlock>(found, some.codes[s] + b * kBlock * kStrip,
                                                      rows.codes + row * rows.stride + (first + b) * kBlock,
                                                      rows.stride);
      const F<Isa> scale = Isa::load(some.scales[b] + s * kStrip);
      for (int r = 0; r < R; r++) {
        const int64_t at = (row + r) * rows.blocks + first + b;
        float* sum = sums + r * kGroup + s * kStrip;
        const F<Isa> product = Isa::to_float(Isa::add_int(found[r], Isa::set_int(rows.starts[at])));
        F<Isa> total = Isa::fma(product, Isa::mul(scale, Isa::set(rows.scales[at])), Isa::load(sum));
        if (Kind::kZero) total = Isa::fma(Isa::load(some.minima[b] + s * kStrip), Isa::set(rows.offsets[at]), total);
        Isa::store(sum, total);
      }
    }
}

// Of a panel of rows, which stays in the second cache.
template <class Isa, class Kind>
void multiply_panel(const Product& p, int64_t group, int64_t top, int64_t rows) {
  constexpr int kTile = 5;
  const Weight& w = *p.weight;
  const int64_t blocks = p.rows.blocks, step = kUnpackedInputs / Unpacked<Isa, Kind>::kBlock;
  const int64_t tiles = (rows + kTile - 1) / kTile;  // of 4 or 5 of many rows
  const uint8_t* record = w.records + group * w.group_bytes();
  Unpacked<Isa, Kind> some;
  alignas(64) float sums[kPanelRows][kGroup] = {};
  for (int64_t first = 0; first < blocks; first += step) {
    const int64_t count = least(step, blocks - first);
    const int64_t bytes = count * w.block / w.span() * w.record_bytes();
    some.read(w, record, count);
    record += bytes;
    for (int64_t tile = 0; tile < tiles; tile++) {
      const int64_t begin = rows * tile / tiles, end = rows * (tile + 1) / tiles;
      for (int64_t at = bytes * tile / tiles; at < bytes * (tile + 1) / tiles; at += 64)
        __builtin_prefetch(record + at, 0, 2);
      const auto add = end - begin == kTile ? add_blocks<Isa, kTile, Kind> : add_blocks<Isa, kTile - 1, Kind>;
      add(p, some, top + begin, first, count, sums[begin]);
    }
  }
  for (int64_t row = 0; row < rows; row++)
    write_group<Isa>(p, group, top + row, Isa::load(sums[row]), Isa::load(sums[row] + kStrip));
}

template <class Isa, class Kind>
void multiply_many_rows(const Product& p, int64_t first, int64_t last) {
  const int64_t panels = (p.num_rows + kPanelRows - 1) / kPanelRows;
  for (int64_t panel = 0; panel < panels; panel++) {
    const int64_t top = p.num_rows * panel / panels, end = p.num_rows * (panel + 1) / panels;
    for (int64_t group = first; group < last; group++) multiply_panel<Isa, Kind>(p, group, top, end - top);
  }
}

}  // namespace
}  // namespace edgellm

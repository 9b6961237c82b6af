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
  constexpr int kBlock = Unpacked<Isa, Kind>::kBlock, S = Isa::kUnpackedStrips;
  const Rows& rows = p.rows;
  for (int strip = 0; strip < 2; strip += S)
    for (int64_t b = 0; b < blocks; b++) {
      I<Isa> found[R][S];
      for (int r = 0; r < R; r++)
        for (int s = 0; s < S; s++) found[r][s] = Isa::set_int(rows.starts[(row + r) * rows.blocks + first + b]);
      Isa::template dot_unpacked<Kind::kForm, kBlock>(found, some.codes[strip] + b * kBlock * kStrip,
                                                      sizeof some.codes[0],
                                                      rows.codes + row * rows.stride + (first + b) * kBlock,
                                                      rows.stride);
      for (int s = 0; s < S; s++) {
        const int at = (strip + s) * kStrip;
        const F<Isa> scale = Isa::load(some.scales[b] + at);
        for (int r = 0; r < R; r++) {
          const int64_t block = (row + r) * rows.blocks + first + b;
          float* sum = sums + r * kGroup + at;
          F<Isa> total = Isa::fma(Isa::to_float(found[r][s]), Isa::mul(scale, Isa::set(rows.scales[block])),
                                  Isa::load(sum));
          if (Kind::kZero) total = Isa::fma(Isa::load(some.minima[b] + at), Isa::set(rows.offsets[block]), total);
          Isa::store(sum, total);
        }
      }
    }
}

// The least height of tiles of up to `most` rows, which divide many rows evenly.
constexpr int least_tile(int most) {
  int least = most;
  for (int rows = kManyRows; rows < kManyRows + most * most; rows++) {
    const int height = rows / ((rows + most - 1) / most);
    if (height < least) least = height;
  }
  return least;
}

template <class Isa, int R, class Kind>
void add_tile(const Product& p, const Unpacked<Isa, Kind>& some, int64_t row, int64_t height, int64_t first,
              int64_t blocks, float* sums) {
  if constexpr (R > least_tile(Isa::kUnpackedRows))
    if (height < R) return add_tile<Isa, R - 1, Kind>(p, some, row, height, first, blocks, sums);
  add_blocks<Isa, R, Kind>(p, some, row, first, blocks, sums);
}

// Of a panel of rows, which stays in the second cache.
template <class Isa, class Kind>
void multiply_panel(const Product& p, int64_t group, int64_t top, int64_t rows) {
  constexpr int kTile = Isa::kUnpackedRows;
  const Weight& w = *p.weight;
  const int64_t blocks = p.rows.blocks, step = kUnpackedInputs / Unpacked<Isa, Kind>::kBlock;
  const int64_t tiles = (rows + kTile - 1) / kTile;
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
      add_tile<Isa, kTile, Kind>(p, some, top + begin, end - begin, first, count, sums[begin]);
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

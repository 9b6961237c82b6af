// AMX: sums of 16 rows and 16 channels along 64 inputs by one instruction, where there are rows
// enough; everything else is AVX-512's.
#include "avx512.h"
#include "epilogue.h"
#include "kernels.h"
#include "kinds.h"

namespace edgellm {

namespace {

using Isa = Avx512Bf16Isa;

// By the rates of the instructions: for 16 rows and channels along a block of 32 inputs AVX-512 needs
// 128 cycles, tiles 32 to multiply and to store. Fewer rows gain less; the break-even is not measured.
constexpr int64_t kRowsFrom = 16;
constexpr int64_t kTileRows = 16, kTileInputs = 64;
constexpr int64_t kPanelBytes = 512 << 10;  // of rows that stay in the second cache

// Tiles 0 to 3 are sums [rows a or b][strip], 4 and 5 the rows a and b, 6 and 7 the strips' codes.
struct Configuration {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  Configuration(int64_t num_rows, int64_t inputs) {
    for (int tile = 0; tile < 8; tile++) {
      rows[tile] = uint8_t(tile < 6 ? num_rows : inputs / 4);
      row_bytes[tile] = uint16_t(tile == 4 || tile == 5 ? inputs : 64);
    }
  }
};

struct Sums {
  alignas(64) int32_t of[2][2][kTileRows][kStrip];
};

// Compilers do not see what tile instructions read, so earlier writes must be in memory.
inline void keep_stored(const void* memory) { __asm__ volatile("" : : "r"(memory) : "memory"); }

// One block of the rows from a and from b on, and of codes [block / 4][32 channels][4].
void multiply(const int8_t* a, const int8_t* b, int64_t stride, const uint8_t* codes, int64_t block, Sums& sums) {
  keep_stored(codes);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t k = 0; k < block; k += kTileInputs) {
    _tile_loadd(6, codes + k * kGroup, 4 * kGroup);
    _tile_loadd(7, codes + k * kGroup + 64, 4 * kGroup);
    _tile_loadd(4, a + k, stride);
    _tile_dpbsud(0, 4, 6);
    _tile_dpbsud(1, 4, 7);
    _tile_loadd(5, b + k, stride);
    _tile_dpbsud(2, 5, 6);
    _tile_dpbsud(3, 5, 7);
  }
  _tile_stored(0, sums.of[0][0], 64);
  _tile_stored(1, sums.of[0][1], 64);
  _tile_stored(2, sums.of[1][0], 64);
  _tile_stored(3, sums.of[1][1], 64);
  keep_stored(&sums);
}

// Codes as bytes, [inputs / 4][32 channels][4].
template <Form kForm>
const uint8_t* bytes_of(const uint8_t* codes, int64_t inputs, uint8_t* memory) {
  if constexpr (kForm == Form::kInt8) return codes;
  for (int s = 0; s < 2; s++)
    Isa::each_unit<bits_of(kForm), 1>(codes + s * 64, inputs, [&](auto, const uint8_t* unit, int64_t k) {
      Isa::each_quad<bits_of(kForm)>(unit, [&](auto j, Isa::Bytes quad) {
        Isa::write(memory + (k / 4 + j) * 128 + s * 64, Isa::decode<kForm == Form::kFp4>(quad));
      });
    });
  return memory;
}

// The 32 channels of a group for two tiles of rows or, of two terms, for one whose tiles are the terms.
template <class Kind>
void run_tiles(const Product& p, int64_t group, int64_t num_rows, const int64_t (&first)[2]) {
  constexpr int T = Kind::kTerms;
  const Weight& w = *p.weight;
  const int64_t stride = p.rows.stride, blocks = p.rows.blocks, inputs = Kind::inputs(w), codes = w.code_bytes();
  const int8_t* a = p.rows.codes + first[0] * T * stride;
  const int8_t* b = T == 1 ? p.rows.codes + first[1] * stride : a + stride;
  alignas(64) uint8_t memory[128 * kGroup];
  const uint8_t* bytes = memory;
  Sums sums;
  Isa::F totals[3 - T][kTileRows][2];
  for (auto& some : totals)
    for (auto& both : some)
      for (Isa::F& one : both) one = Isa::set(0);
  const uint8_t* record = w.records + group * w.group_bytes();
  for (int64_t block = 0; block < blocks; block++, a += w.block, b += w.block, bytes += w.block * kGroup) {
    const int place = int(block % (Kind::kParts * Kind::kBlocks));  // in its record
    if (block && !place) record += w.record_bytes();
    if (place % Kind::kBlocks == 0)
      bytes = bytes_of<Kind::kForm>(record + place / Kind::kBlocks * codes / Kind::kParts, inputs, memory);
    multiply(a, b, T * stride, bytes, w.block, sums);
    for (int s = 0; s < 2; s++) {
      const Factors<Isa> f =
          load_factors<Isa, Kind>(record + w.halves_at() + s * 32, record + codes + place * kGroup + s * kStrip);
      for (int tile = 0; tile < 3 - T; tile++)
        for (int64_t r = 0; r < num_rows; r++) {
          const int64_t at = (first[tile] + r) * blocks + block;
          Isa::I sum = Isa::read<Isa::I>(sums.of[tile][s][r]);
          if (T == 2) sum = Isa::add_int(Isa::times128(sum), Isa::read<Isa::I>(sums.of[1][s][r]));
          sum = Isa::add_int(sum, Isa::set_int(p.rows.starts[at]));
          Isa::F& total = totals[tile][r][s];
          total = Isa::fma(Isa::to_float(sum), Isa::mul(f.scale, Isa::set(p.rows.scales[at])), total);
          if (Kind::kZero) total = Isa::fma(f.minimum, Isa::set(p.rows.offsets[at]), total);
        }
    }
  }
  for (int tile = 0; tile < 3 - T; tile++)
    for (int64_t r = 0; r < num_rows; r++)
      write_group<Isa>(p, group, first[tile] + r, totals[tile][r][0], totals[tile][r][1]);
}

// Tiles of one height, the last of which overlap: what is computed twice has the same bits.
template <class Kind>
void run_groups(const Product& p, int64_t first, int64_t last) {
  constexpr int T = Kind::kTerms;
  const int64_t block = p.weight->block, of_rows = p.rows.stride * T;
  const int64_t panels = (p.num_rows * of_rows + kPanelBytes - 1) / kPanelBytes;
  for (int64_t panel = 0; panel < panels; panel++) {
    const int64_t top = p.num_rows * panel / panels, rows = p.num_rows * (panel + 1) / panels - top;
    const int64_t at_once = 3 - T, steps = (rows + at_once * kTileRows - 1) / (at_once * kTileRows);
    const int64_t height = (rows + at_once * steps - 1) / (at_once * steps);
    const Configuration configuration(height, block < kTileInputs ? block : kTileInputs);
    keep_stored(&configuration);
    _tile_loadconfig(&configuration);
    const auto row_of = [&](int64_t tile) { return top + least(tile * height, rows - height); };
    for (int64_t group = first; group < last; group++)
      for (int64_t step = 0; step < steps; step++)
        run_tiles<Kind>(p, group, height, {row_of(step * at_once), row_of(step * at_once + 1)});
  }
  _tile_release();  // what others of this process keep in tiles they load again where they find none
}

void product(const Product& p, int64_t first, int64_t last) {
  if (p.num_rows < kRowsFrom || !takes_codes(p.weight->form)) return k_avx512_vnni.product(p, first, last);
  with_kind(*p.weight, [&](auto kind) {
    if constexpr (takes_codes(decltype(kind)::kForm)) run_groups<decltype(kind)>(p, first, last);
  });
}

}  // namespace

const Kernels& amx_kernels() {
  static const Kernels set = [] {
    Kernels made = k_avx512_vnni;
    made.name = "amx";
    made.product = product;
    return made;
  }();
  return set;
}

}  // namespace edgellm

// AMX on processors without it: its instructions in plain C++, which end the program where a
// processor would fault. Comes before every source of a program by `-include`.
#pragma once

#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace tile_model {

struct Tile {
  int rows = 0, row_bytes = 0;
  uint8_t data[16][64];
};

inline bool is_granted = false;
inline thread_local bool is_configured = false;
inline thread_local Tile tiles[8];

inline void must(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "tiles: %s\n", what);
  std::abort();
}

inline void load_configuration(const void* memory) {
  uint8_t c[64];
  std::memcpy(c, memory, 64);
  must(is_granted, "the system was not asked for them");
  must(c[0] == 1 && c[1] == 0, "palette 1, from row 0 on");
  for (int i = 2; i < 64; i++)
    must(!c[i] || (i >= 16 && i < 32) || (i >= 48 && i < 56), "what is reserved, and tiles from 8 on, must be 0");
  for (int i = 0; i < 8; i++) {
    Tile& tile = tiles[i];
    tile.rows = c[48 + i];
    tile.row_bytes = c[16 + 2 * i] | c[17 + 2 * i] << 8;
    must(tile.rows <= 16 && tile.row_bytes <= 64, "at most 16 rows of 64 bytes");
    must(!tile.rows == !tile.row_bytes, "rows and their bytes are 0 together");
    std::memset(tile.data, 0xa5, sizeof tile.data);  // a CPU writes zeros; do not rely on it
  }
  is_configured = true;
}

inline void release() { is_configured = false; }

inline Tile& usable(int index) {
  must(is_configured, "not configured");
  must(tiles[index].rows && tiles[index].row_bytes, "a tile that the configuration leaves out");
  return tiles[index];
}

inline void zero(int index) { std::memset(usable(index).data, 0, sizeof(Tile::data)); }

inline void load(int index, const void* from, int64_t stride) {
  Tile& tile = usable(index);
  std::memset(tile.data, 0, sizeof tile.data);
  for (int row = 0; row < tile.rows; row++)
    std::memcpy(tile.data[row], static_cast<const char*>(from) + row * stride, tile.row_bytes);
}

inline void store(int index, void* to, int64_t stride) {
  Tile& tile = usable(index);
  for (int row = 0; row < tile.rows; row++)
    std::memcpy(static_cast<char*>(to) + row * stride, tile.data[row], tile.row_bytes);
}

// Signed bytes of `a` times unsigned ones of `b`.
inline void multiply(int sums_index, int a_index, int b_index) {
  Tile &sums = usable(sums_index), &a = usable(a_index), &b = usable(b_index);
  must(sums_index != a_index && sums_index != b_index && a_index != b_index, "three different tiles");
  must(a.row_bytes % 4 == 0 && b.row_bytes % 4 == 0 && sums.row_bytes % 4 == 0, "rows of whole sums");
  must(sums.rows == a.rows && sums.row_bytes == b.row_bytes && a.row_bytes / 4 == b.rows, "shapes that fit");
  for (int row = 0; row < a.rows; row++)
    for (int at = 0; at < b.row_bytes; at++)
      for (int k = 0; k < b.rows; k++) {
        int32_t sum;
        std::memcpy(&sum, sums.data[row] + at / 4 * 4, 4);
        sum += int8_t(a.data[row][4 * k + at % 4]) * int(b.data[k][at]);
        std::memcpy(sums.data[row] + at / 4 * 4, &sum, 4);
      }
}

// What the processor and the system say.
inline int cpuid(unsigned leaf, unsigned part, unsigned* a, unsigned* b, unsigned* c, unsigned* d) {
  const int found = __get_cpuid_count(leaf, part, a, b, c, d);
  if (leaf == 7 && part == 0) *d |= 3u << 24;
  return found;
}
__attribute__((target("xsave"))) inline unsigned long long saved_state() { return _xgetbv(0) | 3u << 17; }
inline long ask(long call, long request, long feature) {
  must(call == SYS_arch_prctl && request == 0x1023 && feature == 18, "another request of the system");
  is_granted = true;
  return 0;
}

}  // namespace tile_model

#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbsud
#define _tile_loadconfig(from) tile_model::load_configuration(from)
#define _tile_release() tile_model::release()
#define _tile_zero(tile) tile_model::zero(tile)
#define _tile_loadd(tile, from, stride) tile_model::load(tile, from, stride)
#define _tile_stored(tile, to, stride) tile_model::store(tile, to, stride)
#define _tile_dpbsud(sums, a, b) tile_model::multiply(sums, a, b)
#define __get_cpuid_count(...) tile_model::cpuid(__VA_ARGS__)
#define _xgetbv(index) tile_model::saved_state()
#define syscall(...) tile_model::ask(__VA_ARGS__)

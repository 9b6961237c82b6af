// Which instruction sets were compiled in, and which of them this processor has.
#include <cstring>
#include <initializer_list>

#include "kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace edgellm {

#if defined(__x86_64__)
namespace {

struct Registers {
  unsigned a, b, c, d;
};

Registers ask(unsigned leaf, unsigned part) {
  Registers r{};
  __get_cpuid_count(leaf, part, &r.a, &r.b, &r.c, &r.d);
  return r;
}

// What the operating system saves of a thread; without it the processor's word does not count.
__attribute__((target("xsave"))) unsigned long long saved_state() { return _xgetbv(0); }

bool has(unsigned bits, std::initializer_list<int> places) {
  for (const int place : places)
    if (!(bits >> place & 1)) return false;
  return true;
}

// Linux saves the tiles only of a process that asked for it.
bool may_use_tiles() {
#if defined(__linux__) && defined(SYS_arch_prctl)
  constexpr long kRequest = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
#else
  return false;
#endif
}

int find_sets(const Kernels** found) {
  int count = 0;
  const Registers basic = ask(1, 0), more = ask(7, 0), late = ask(7, 1);
  const bool saves = has(basic.c, {27});
  const unsigned state = saves ? unsigned(saved_state()) : 0;
  // FMA 12, F16C 29, AVX 28; AVX2 5, BMI2 8.
  const bool avx2 = has(state, {1, 2}) && has(basic.c, {12, 28, 29}) && has(more.b, {5, 8});
  // AVX512 F 16, DQ 17, BW 30, VL 31; VNNI 11.
  const bool avx512 = avx2 && has(state, {5, 6, 7}) && has(more.b, {16, 17, 30, 31}) && has(more.c, {11});
  // BF16 5.
  const bool bf16 = avx512 && has(late.a, {5});
  // TILE 24, INT8 25.
  const bool amx = bf16 && has(state, {17, 18}) && has(more.d, {24, 25}) && may_use_tiles();
  if (amx) found[count++] = &amx_kernels();
  if (bf16) found[count++] = &k_avx512_bf16;
  if (avx512) found[count++] = &k_avx512_vnni;
  if (avx2 && has(late.a, {4})) found[count++] = &k_avx_vnni;
  if (avx2) found[count++] = &k_avx2;
  return count;
}

}  // namespace
#elif defined(__aarch64__)
namespace {

int find_sets(const Kernels** found) {
  int count = 0;
#if defined(__linux__)
  if (getauxval(AT_HWCAP2) >> 13 & 1) found[count++] = &k_neon_i8mm;
  if (getauxval(AT_HWCAP) >> 20 & 1) found[count++] = &k_neon_dotprod;
#else
  found[count++] = &k_neon_dotprod;  // every Apple processor has it
#endif
  return count;
}

}  // namespace
#else
namespace {
int find_sets(const Kernels**) { return 0; }
}  // namespace
#endif

namespace {

struct Found {
  const Kernels* sets[8];
  int count;
  Found() : count(find_sets(sets)) { sets[count++] = &k_scalar; }
};

}  // namespace

const Kernels* const* available_kernels(int* count) {
  static const Found found;
  *count = found.count;
  return found.sets;
}

const Kernels& kernels() {
  int count;
  static const Kernels& best = *available_kernels(&count)[0];
  return best;
}

const Kernels* find_kernels(const char* name) {
  int count;
  const Kernels* const* sets = available_kernels(&count);
  for (int i = 0; i < count; i++)
    if (!std::strcmp(sets[i]->name, name)) return sets[i];
  return nullptr;
}

}  // namespace edgellm

// NEON with dot products: 16 products of bytes by one instruction.
#include "instruction_set.h"
#include "neon.h"

namespace edgellm {
namespace {

struct Quads : Neon {
  static Ints add4(Ints sum, Bytes codes, Bytes x) {
    return Ints(vdotq_s32(int32x4_t(sum), int8x16_t(codes), int8x16_t(x)));
  }
  static Ints add8(Ints sum, Bytes codes, Bytes x) { return add4(sum, codes ^ 128, x); }
};

using Isa = Vector<Quads>;

}  // namespace

const Kernels k_neon_dotprod = make_kernels<Isa>("neon_dotprod");

}  // namespace edgellm

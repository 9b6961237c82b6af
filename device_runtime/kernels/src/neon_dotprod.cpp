// NEON with dot products: 16 products of bytes by one instruction.
#include "neon.h"

namespace edgellm {
namespace {

struct Quads : Neon {
  static Ints add4(Ints sum, Bytes codes, Bytes x) {
    return Ints(vdotq_s32(int32x4_t(sum), int8x16_t(codes), int8x16_t(x)));
  }
  static Ints add8(Ints sum, Bytes codes, Bytes x) { return add4(sum, codes ^ 128, x); }
};

using Set = Vector<Quads>;

}  // namespace
}  // namespace edgellm

#define EDGELLM_SET neon_dotprod
#include "instruction_set.h"

#include "scalar.h"

#include "instruction_set.h"

namespace edgellm {
namespace {

struct Isa : Vector<Scalar> {
  template <Form kForm, int H, int R, int S>
  static void dot_units(I (&acc)[H][R][S], const uint8_t* w, const int8_t* x, int64_t stride, int64_t block) {
    for (int h = 0; h < H; h++)
      for (int s = 0; s < S; s++)
        for (int lane = 0; lane < kStrip; lane++)
          for (int64_t k = h * block; k < (h + 1) * block; k++) {
            const int code = code_at(bits_of(kForm), w, kGroup, s * kStrip + lane, k);
            for (int r = 0; r < R; r++) part(acc[h][r][s], lane / kLanes)[lane % kLanes] += code * x[r * stride + k];
          }
  }
};

}  // namespace

const Kernels k_scalar = make_kernels<Isa>("scalar");

}  // namespace edgellm

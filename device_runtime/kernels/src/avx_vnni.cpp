// AVX-VNNI: the products of AVX-512's VNNI on AVX registers, as in processors without AVX-512.
#include "avx2.h"
#include "instruction_set.h"

namespace edgellm {
namespace {

struct Quads : Avx2 {
  static constexpr int kMiddle8 = 128;

  static Ints add4(Ints sum, Bytes codes, Bytes x) {
    return Ints(_mm256_dpbusd_avx_epi32(__m256i(sum), __m256i(codes), __m256i(x)));
  }
  static Ints add8(Ints sum, Bytes codes, Bytes x) { return add4(sum, codes, x); }
};

using Isa = Vector<Quads>;

}  // namespace

const Kernels k_avx_vnni = make_kernels<Isa>("avx_vnni");

}  // namespace edgellm

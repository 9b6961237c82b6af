#include "avx512.h"
#include "instruction_set.h"

namespace edgellm {

const Kernels k_avx512_bf16 = make_kernels<Avx512Bf16Isa>("avx512_bf16");

}  // namespace edgellm

#include "avx512.h"
#include "instruction_set.h"

namespace edgellm {

const Kernels k_avx512_vnni = make_kernels<Avx512Isa>("avx512_vnni");

}  // namespace edgellm

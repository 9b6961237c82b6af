// NEON with dot products: 16 products of bytes by one instruction.
#include "instruction_set.h"
#include "neon.h"

namespace edgellm {
namespace {

using Isa = Vector<Neon>;

}  // namespace

const Kernels k_neon_dotprod = make_kernels<Isa>("neon_dotprod");

}  // namespace edgellm

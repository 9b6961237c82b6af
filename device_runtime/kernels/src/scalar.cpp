#include "scalar.h"

#include "instruction_set.h"

namespace edgellm {

const Kernels k_scalar = make_kernels<Vector<Scalar>>("scalar");

}  // namespace edgellm

#include "scalar.h"

namespace edgellm {
namespace {
using Set = Vector<Scalar>;
}
}  // namespace edgellm

#define EDGELLM_SET scalar
#include "instruction_set.h"

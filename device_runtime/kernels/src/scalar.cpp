// The reference: one lane at a time, on any processor.
#include "scalar.h"

namespace edgellm {
namespace {
using Set = ScalarVector;
}
}  // namespace edgellm

#define EDGELLM_SET scalar
#include "set.inl"

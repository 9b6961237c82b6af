// The operator that computes mixtures of experts, for the list of all operators.
#pragma once

#include "ort_api.h"

namespace edgellm {

const ort::Operator* experts_operator();

}  // namespace edgellm

// The operators that attend over paged caches, for the list of all operators.
#pragma once

#include <vector>

#include "ort_api.h"

namespace edgellm {

std::vector<const ort::Operator*> attention_operators();  // by the cache's type

}  // namespace edgellm

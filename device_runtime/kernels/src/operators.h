// The operators of other files, for the list of all.
#pragma once

#include <vector>

#include "ort_api.h"

namespace edgellm {

constexpr int64_t kRowsApart = 8;  // rows that are prepared on threads

const ort::Operator* experts_operator();
std::vector<const ort::Operator*> attention_operators();  // of each type of cache
std::vector<const ort::Operator*> delta_operators();      // of linear attention

}  // namespace edgellm

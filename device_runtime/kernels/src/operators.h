// What the operators of all files share, and the list of them.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "kernels.h"
#include "ort_api.h"

namespace edgellm {

using Operators = std::vector<const OrtCustomOp*>;
Operators attention_operators();  // of each type of cache
Operators delta_operators();  // of linear attention
Operators experts_operators();
Operators low_rank_operators();

constexpr int64_t kRowsApart = 8;  // rows that are prepared on threads
constexpr int64_t kMostParts = 64;  // of one product, for threads to share

inline size_t aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

// function(row) for each, on threads where there are rows enough.
template <class Function>
void each_row(const OrtKernelContext* context, int64_t rows, const Function& function) {
  if (rows >= kRowsApart) return ort::parallel(context, rows, function);
  for (int64_t row = 0; row < rows; row++) function(row);
}

// Of `count` things, into how many parts they are cut: each has at least `least` of their `size`.
inline int64_t parts_of(int64_t count, int64_t size, int64_t least, int64_t most = kMostParts) {
  return std::max<int64_t>(1, std::min({count, size / least, most}));
}

// A packed weight that is an initializer of the graph.
inline ort::Tensor constant_input(const OrtKernelInfo* info, size_t index, const std::string& name) {
  const ort::Tensor found = ort::constant_input(info, index);
  if (!found) throw ort::Error(name + ": packed weights must be initializers");
  return found;
}

inline Weight packed_weight(const void* data, size_t bytes, const std::string& name) {
  Weight weight;
  if (const char* fault = read_weight(data, bytes, &weight)) throw ort::Error(name + ": " + fault);
  return weight;
}

}  // namespace edgellm

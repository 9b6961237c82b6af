// The kernels without ONNX Runtime, for tests and measurements. Texts returned are errors.
#include <cstdlib>
#include <memory>
#include <thread>
#include <vector>

#include "kernels.h"

#define EDGELLM_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using namespace edgellm;

template <class Function>
void in_parts(int64_t count, int threads, Function function) {
  std::vector<std::thread> others;
  for (int t = 1; t < threads; t++) others.emplace_back([=] { function(count * t / threads, count * (t + 1) / threads); });
  function(0, count / threads);
  for (std::thread& other : others) other.join();
}

}  // namespace

EDGELLM_EXPORT const char* edgellm_instruction_set(int index) {
  int count;
  const Kernels* const* sets = available_kernels(&count);
  return index < count ? sets[index]->name : nullptr;
}

struct ProductArguments {
  const char* instruction_set;
  const void* packed;
  uint64_t bytes;
  int64_t rows;
  const float *x, *skip, *gamma, *bias, *residual;
  float *sum, *y;
  float epsilon;
  int32_t threads;
};

EDGELLM_EXPORT const char* edgellm_product(const ProductArguments* a) {
  const Kernels* set = find_kernels(a->instruction_set);
  if (!set) return "this processor lacks the instruction set";
  Weight weight;
  if (const char* fault = read_weight(a->packed, a->bytes, &weight)) return fault;
  const std::unique_ptr<void, decltype(&std::free)> memory(std::aligned_alloc(64, rows_bytes(weight, a->rows)), &std::free);
  if (!memory) return "out of memory";
  const Rows rows = place_rows(weight, a->rows, memory.get());
  const Prologue before{&weight, a->x, a->skip, a->gamma, a->epsilon, a->sum, rows};
  in_parts(a->rows, a->threads, [&](int64_t first, int64_t last) { set->prepare(before, first, last); });
  const Product product{&weight, rows, a->rows, a->bias, a->residual, a->y};
  in_parts(weight.groups(), a->threads, [&](int64_t first, int64_t last) { set->product(product, first, last); });
  return nullptr;
}

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
  for (int t = 1; t < threads; t++)
    others.emplace_back([=] { function(count * t / threads, count * (t + 1) / threads); });
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
  float alpha, limit, offset, cubic;
};

EDGELLM_EXPORT const char* edgellm_product(const ProductArguments* a) {
  const Kernels* set = find_kernels(a->instruction_set);
  if (!set) return "this processor lacks the instruction set";
  Weight weight;
  if (const char* fault = read_weight(a->packed, a->bytes, &weight)) return fault;
  const std::unique_ptr<void, decltype(&std::free)> memory(std::aligned_alloc(64, rows_bytes(weight, a->rows)),
                                                           &std::free);
  if (!memory) return "out of memory";
  const Rows rows = place_rows(weight, a->rows, memory.get());
  const Prologue before{&weight, a->x, a->skip, a->gamma, a->epsilon, a->sum, rows};
  in_parts(a->rows, a->threads, [&](int64_t first, int64_t last) { set->prepare(before, first, last); });
  const Product product{&weight, rows, a->rows, a->bias, a->residual, a->y,
                        a->alpha, a->limit, a->offset, a->cubic};
  in_parts(weight.groups(), a->threads, [&](int64_t first, int64_t last) { set->product(product, first, last); });
  return nullptr;
}

EDGELLM_EXPORT const char* edgellm_channel(const void* packed, uint64_t bytes, int64_t channel, float* out) {
  Weight weight;
  if (const char* fault = read_weight(packed, bytes, &weight)) return fault;
  decode_channel(weight, channel, out);
  return nullptr;
}

EDGELLM_EXPORT const char* edgellm_attention(const char* instruction_set, Attention* a, int is_split) {
  const Kernels* set = find_kernels(instruction_set);
  if (!set) return "this processor lacks the instruction set";
  std::vector<float> queries(a->shape.rows * a->shape.heads * a->query_floats()), partials,
      work(a->work_floats(is_split ? 0 : a->shape.rows));
  std::vector<int32_t> seen(kSeen * a->shape.rows), slots(a->shape.rows * a->shape.mask_columns);
  a->scratch.queries = queries.data();
  a->scratch.seen = seen.data();
  a->scratch.slots = slots.data();
  for (int64_t row = 0; row < a->shape.rows; row++) set->write_kv(*a, row);
  if (is_split) {
    partials.resize(a->chunks() * a->shape.rows * a->shape.heads * a->partial_floats());
    a->scratch.partials = partials.data();
    for (int64_t chunk = 0; chunk < a->chunks(); chunk++)
      for (int64_t head = 0; head < a->shape.kv_heads; head++) set->attend_chunk(*a, head, chunk, work.data());
    for (int64_t row = 0; row < a->shape.rows; row++) set->merge(*a, row);
    return nullptr;
  }
  for (int64_t head = 0; head < a->shape.kv_heads; head++) set->attend_rows(*a, head, 0, a->shape.rows, work.data());
  return nullptr;
}

EDGELLM_EXPORT const char* edgellm_low_rank(const char* instruction_set, const LowRank* layer, const float* x,
                                            float* inner, const float* base, float* y) {
  const Kernels* set = find_kernels(instruction_set);
  if (!set) return "this processor lacks the instruction set";
  set->lora_down(*layer, x, 0, layer->rank, inner);
  set->lora_up(*layer, inner, 0, (layer->outputs + kStrip - 1) / kStrip, kStrip, base, y);
  return nullptr;
}

EDGELLM_EXPORT const char* edgellm_max_and_logsumexp(const char* instruction_set, const float* logits, int64_t count,
                                                     SegmentMax* found) {
  const Kernels* set = find_kernels(instruction_set);
  if (!set) return "this processor lacks the instruction set";
  *found = set->max_and_logsumexp(logits, count, true);
  return nullptr;
}

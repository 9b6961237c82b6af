// ONNX Runtime's operators of the domain "edgellm.kernels", apart from that of portable graphs' functions.
#include <algorithm>
#include <cmath>

#include "low_rank.h"

namespace edgellm {

namespace {

using ort::require;
using ort::Tensor;

constexpr int64_t kPartBytes = 32 << 10;  // of weights, below which threads are not worth their call

Weight packed_input(const OrtKernelInfo* info, const char* name) {
  const Tensor packed = constant_input(info, 1, name);
  return packed_weight(packed.data, size_t(packed.count()), name);
}

// y = epilogue(W prologue(x)). Inputs: x [..., K], packed uint8, gamma [K], skip like x, bias [N], residual like y;
// of layers that adapters change slots, places, weights and table of `Adapted`, and what adapters read, like x,
// if not x itself. Outputs: y [..., N] or [..., N / 2], x + skip.
struct QuantLinear {
  static constexpr const char* kName = "QuantLinear";
  static constexpr ort::ElementType kInputs[] = {ort::kFloat, ort::kUInt8, ort::kFloat, ort::kFloat,
                                                 ort::kFloat, ort::kFloat, ort::kInt64, ort::kInt64,
                                                 ort::kFloat, ort::kInt64, ort::kFloat};
  static constexpr ort::ElementType kOutputs[] = {ort::kFloat, ort::kFloat};
  static constexpr unsigned kNeeded = 0b11, kNeededOutputs = 1;

  Weight weight;
  float epsilon;

  explicit QuantLinear(const OrtKernelInfo* info) : epsilon(ort::float_attribute(info, "epsilon", 1e-5f)) {
    weight = packed_input(info, kName);
    const auto given = [&](const char* name, int64_t found) { return ort::int_attribute(info, name, found) == found; };
    require(given("K", weight.in_features) && given("N", weight.out_features) && given("block", weight.block) &&
                given("form", int64_t(weight.form)),
            "QuantLinear: the packed weight is not the one that the node was made for");
  }

  void run(OrtKernelContext* context) const {
    const int64_t K = weight.in_features, N = weight.out_features;
    const Tensor x = ort::input(context, 0), gamma = ort::input(context, 2), skip = ort::input(context, 3),
                 bias = ort::input(context, 4), residual = ort::input(context, 5), slots = ort::input(context, 6);
    require(!x.dims.empty() && x.last() == K, "QuantLinear: x is not as wide as the weight");
    require(!gamma || gamma.count() == K, "QuantLinear: gamma is not as wide as x");
    require(!skip || skip.dims == x.dims, "QuantLinear: skip is not shaped like x");
    require(!bias || bias.count() == N, "QuantLinear: the bias is not as wide as the weight");
    const int64_t rows = x.count(0, 1);
    require(!residual || (!weight.is_gated && residual.count() == rows * N),
            "QuantLinear: the residual is not shaped like y");
    std::vector<int64_t> dims = x.dims;
    const Tensor sum = ort::output(context, 1, dims);
    require(!sum || skip, "QuantLinear: a sum needs a skip");
    dims.back() = weight.outputs();
    const Tensor y = ort::output(context, 0, dims);
    if (!rows) return;
    const float* delta = slots && is_adapted(slots) ? added(context, x, gamma, slots) : nullptr;
    const Rows prepared = place_rows(weight, rows, ort::scratch(rows_bytes(weight, rows)));
    const Prologue before{&weight, x.as<float>(),   skip.as<float>(), gamma.as<float>(),
                          epsilon, sum.as<float>(), prepared};
    if (rows < kRowsApart)
      kernels().prepare(before, 0, rows);
    else
      ort::parallel(context, rows, [&](int64_t row) { kernels().prepare(before, row, row + 1); });
    Product product{&weight, prepared, rows, bias.as<float>(), residual.as<float>(), y.as<float>()};
    product.delta = delta;
    const int64_t groups = weight.groups(), parts = parts_of(groups, groups * weight.group_bytes() * rows, kPartBytes);
    ort::parallel(context, parts, [&](int64_t part) {
      kernels().product(product, groups * part / parts, groups * (part + 1) / parts);
    });
  }

 private:
  // What adapters add, like W x; nullptr: nothing.
  const float* added(OrtKernelContext* context, const Tensor& x, const Tensor& gamma, const Tensor& slots) const {
    const Tensor own = ort::input(context, 10);
    const int64_t N = weight.out_features, step = weight.is_gated ? 2 * kStrip : kStrip;
    require(!own || own.dims == x.dims, "QuantLinear: what adapters read is not shaped like x");
    float* delta = static_cast<float*>(ort::scratch<2>(x.count(0, 1) * N * sizeof(float)));
    const Adapted adapted{context,
                          own ? own : x,
                          own ? nullptr : gamma.as<float>(),
                          epsilon,
                          slots,
                          ort::input(context, 7),
                          ort::input(context, 8),
                          ort::input(context, 9),
                          N,
                          step};
    return add_low_rank(adapted, nullptr, delta) ? delta : nullptr;
  }
};

// Rows of an embedding that is packed as a linear layer's weight. Inputs: ids int64 [...], packed uint8; of weights
// whose packed scales are rounded, scales and minima [..., blocks] of these rows. Output: [..., K].
struct LookUp {
  static constexpr const char* kName = "LookUp";
  static constexpr ort::ElementType kInputs[] = {ort::kInt64, ort::kUInt8, ort::kFloat, ort::kFloat};
  static constexpr ort::ElementType kOutputs[] = {ort::kFloat};
  static constexpr unsigned kNeeded = 0b11, kNeededOutputs = 1;

  Weight weight;
  float middle;  // what `scales` multiply is a code plus this

  explicit LookUp(const OrtKernelInfo* info)
      : weight(packed_input(info, kName)), middle(float(ort::int_attribute(info, "middle", 0))) {
    require(!weight.is_gated, "LookUp: gated weights are no embedding");
  }

  void run(OrtKernelContext* context) const {
    const Tensor ids = ort::input(context, 0);
    std::vector<int64_t> dims = ids.dims;
    dims.push_back(weight.in_features);
    const Tensor y = ort::output(context, 0, dims);
    const int64_t rows = ids.count();
    for (int64_t row = 0; row < rows; row++)
      require(ids.as<int64_t>()[row] >= 0 && ids.as<int64_t>()[row] < weight.out_features,
              "LookUp: an id is outside of the embedding");
    const Tensor scales = ort::input(context, 2), minima = ort::input(context, 3);
    require(!scales || (takes_codes(weight.form) && !weight.has_quantized_scales &&
                        scales.count() == rows * weight.blocks()),
            "LookUp: there is not a scale for each block");
    require(!minima || (scales && minima.count() == scales.count()), "LookUp: there is not a minimum for each scale");
    if (!rows) return;
    ort::parallel(context, rows, [&](int64_t row) {
      const int64_t id = ids.as<int64_t>()[row], first = row * weight.blocks();
      float* out = y.as<float>() + row * weight.in_features;
      if (scales)
        decode_codes(weight, id, {middle, scales.as<float>() + first, minima ? minima.as<float>() + first : nullptr},
                     out);
      else
        decode_channel(weight, id, out);
    });
  }
};

// The likeliest tokens of each row; graphs call the operator Picks. Inputs: logits [..., V]; k int64 [1], 1 if left
// out. Outputs, in descending order and of equals the first: ids int64, logits float, log-softmax float, each [..., k].
struct TopK {
  static constexpr const char* kName = "Picks";
  static constexpr ort::ElementType kInputs[] = {ort::kFloat, ort::kInt64};
  static constexpr ort::ElementType kOutputs[] = {ort::kInt64, ort::kFloat, ort::kFloat};
  static constexpr unsigned kNeeded = 1, kNeededOutputs = 1;

  explicit TopK(const OrtKernelInfo*) {}

  void run(OrtKernelContext* context) const {
    const Tensor logits = ort::input(context, 0), wanted = ort::input(context, 1);
    const int64_t k = wanted ? *wanted.as<int64_t>() : 1, width = logits.last(), rows = logits.count(0, 1);
    require(!logits.dims.empty() && k > 0 && k <= width, "Picks: k is not between 1 and the number of logits");
    std::vector<int64_t> dims = logits.dims;
    dims.back() = k;
    const Tensor ids = ort::output(context, 0, dims), tops = ort::output(context, 1, dims),
                 probs = ort::output(context, 2, dims);
    if (!rows) return;
    const int64_t segments = (width + kSegment - 1) / kSegment;
    SegmentMax* found = static_cast<SegmentMax*>(ort::scratch(rows * segments * sizeof(SegmentMax)));
    constexpr int64_t kStep = 8;
    const int64_t parts = (segments + kStep - 1) / kStep;
    ort::parallel(context, rows * parts, [&](int64_t i) {
      const int64_t row = i / parts, first = i % parts * kStep;
      for (int64_t s = first; s < std::min(first + kStep, segments); s++)
        found[row * segments + s] =
            kernels().max_and_logsumexp(logits.as<float>() + row * width + s * kSegment,
                                        std::min<int64_t>(kSegment, width - s * kSegment), bool(probs));
    });
    for (int64_t row = 0; row < rows; row++) {
      const SegmentMax* maxima = found + row * segments;
      const float* x = logits.as<float>() + row * width;
      std::vector<int64_t> order = select(x, width, maxima, segments, k);
      const float total = probs ? logsumexp(maxima, segments) : 0;
      for (int64_t i = 0; i < k; i++) {
        ids.as<int64_t>()[row * k + i] = order[i];
        if (tops) tops.as<float>()[row * k + i] = x[order[i]];
        if (probs) probs.as<float>()[row * k + i] = x[order[i]] - total;
      }
    }
  }

 private:
  // The k largest, read only from segments whose maximum could be among them.
  static std::vector<int64_t> select(const float* x, int64_t width, const SegmentMax* maxima, int64_t segments,
                                     int64_t k) {
    const auto better = [x](int64_t i, int64_t j) { return x[i] != x[j] ? x[i] > x[j] : i < j; };
    std::vector<int64_t> heap;  // its front is the worst
    for (int64_t s = 0; s < segments; s++) {
      if (int64_t(heap.size()) == k && !(maxima[s].max > x[heap.front()])) continue;
      for (int64_t i = s * kSegment; i < std::min(width, (s + 1) * kSegment); i++) {
        if (int64_t(heap.size()) == k) {
          if (!(x[i] > x[heap.front()])) continue;
          std::pop_heap(heap.begin(), heap.end(), better);
          heap.pop_back();
        }
        heap.push_back(i);
        std::push_heap(heap.begin(), heap.end(), better);
      }
    }
    std::sort_heap(heap.begin(), heap.end(), better);
    return heap;
  }

  static float logsumexp(const SegmentMax* maxima, int64_t segments) {
    float top = maxima[0].max;
    for (int64_t s = 1; s < segments; s++) top = std::max(top, maxima[s].max);
    double total = 0;
    for (int64_t s = 0; s < segments; s++) total += double(maxima[s].sum_exp) * std::exp(double(maxima[s].max) - top);
    return float(top + std::log(total));
  }
};

}  // namespace
}  // namespace edgellm

extern "C" __attribute__((visibility("default"))) OrtStatus* ORT_API_CALL RegisterCustomOps(OrtSessionOptions* options,
                                                                                            const OrtApiBase* base) {
  using namespace edgellm;
  ort::api = base->GetApi(ORT_API_VERSION);
  if (!ort::api) {  // only functions of an older version can create the error
    return base->GetApi(1)->CreateStatus(ORT_FAIL, "edgellm's kernels need ONNX Runtime 1.17 or newer");
  }
  return ort::guarded([&] {
    static OrtCustomOpDomain* const domain = [] {  // of all sessions, until the process ends
      OrtCustomOpDomain* made = nullptr;
      ort::check(ort::api->CreateCustomOpDomain("edgellm.kernels", &made));
      const Operators own{ort::describe<QuantLinear>(), ort::describe<LookUp>(), ort::describe<TopK>()};
      for (const Operators& some :
           {own, attention_operators(), delta_operators(), experts_operators(), low_rank_operators()})
        for (const OrtCustomOp* op : some) ort::check(ort::api->CustomOpDomain_Add(made, op));
      return made;
    }();
    ort::check(ort::api->AddCustomOpDomain(options, domain));
  });
}

// Mixture of experts: each row is multiplied only by its selected experts.
//
// Rows are sorted by expert, so a weight is read once for all its rows. A row's products are added
// in the order of its selection, so results are batch-invariant.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "operators.h"

namespace edgellm {
namespace {

using ort::require;
using ort::Tensor;

constexpr int64_t kPartBytes = 128 << 10;  // of weights, below which threads are not worth their call
constexpr int64_t kMostTaken = 4096;  // rows times experts taken that are held at once

// Packed weights of one form: the records of each, then the headers of all.
std::vector<Weight> read_stack(const OrtKernelInfo* info, size_t index, int64_t experts) {
  const Tensor packed = constant_input(info, index, "Experts");
  const int64_t each = experts > 0 ? packed.count() / experts : 0, records = each - int64_t(sizeof(Header));
  require(each * experts == packed.count() && records > 0, "Experts: the packed weights are not those of all experts");
  std::vector<Weight> found(experts);
  const uint8_t* data = packed.as<uint8_t>();
  for (int64_t e = 0; e < experts; e++) {
    Weight& w = found[e] = packed_weight(data + experts * records + e * sizeof(Header), size_t(each), "Experts");
    w.records = data + e * records;
    const Weight& first = found[0];
    require(w.form == first.form && w.in_features == first.in_features && w.out_features == first.out_features &&
                w.block == first.block && w.is_gated == first.is_gated && w.input_terms == first.input_terms &&
                w.has_quantized_scales == first.has_quantized_scales,
            "Experts: the packed weights differ in form");
  }
  return found;
}

Rows from_row(const Weight& w, const Rows& rows, int64_t first) {
  Rows out = rows;
  out.codes += first * w.input_terms * rows.stride;
  out.scales += first * rows.blocks;
  out.starts += first * rows.blocks;
  out.offsets += first * rows.blocks;
  out.floats += first * rows.stride;
  return out;
}

// y = sum over k of shares[k] * down(act(gate, up)) of expert ids[k]. Inputs: x [..., H], ids int64
// and shares [..., K], gates and ups of all experts uint8, downs uint8, biases [E, 2 I] in the order
// of the packed channels, and [E, H]. Attributes: experts; alpha, limit, offset and cubic of `Product`.
// Without gates, act is the square of what is positive of the ups.
struct Experts {
  static constexpr const char* kName = "Experts";
  static constexpr ort::ElementType kInputs[] = {ort::kFloat, ort::kInt64, ort::kFloat, ort::kUInt8,
                                                 ort::kUInt8, ort::kFloat, ort::kFloat};
  static constexpr ort::ElementType kOutputs[] = {ort::kFloat};
  static constexpr unsigned kNeeded = 0b11111, kNeededOutputs = 1;

  struct Group {
    int64_t expert, first, count;  // consecutive rows of an expert
  };
  struct Task {
    const Group* group;
    int64_t first, last;  // groups of channels
  };
  // Rows of x, the experts they take, and where these stand when they are sorted by expert.
  struct Pass {
    const float* x;
    const int64_t* ids;
    const float* shares;
    float* y;
    int64_t rows, top_k;
    const float *inner_bias, *bias;
    std::vector<Group> groups;
    std::vector<int64_t> sorted, place;  // taken by place, and the place of each

    int64_t taken() const { return rows * top_k; }
  };

  std::vector<Weight> gates, downs;
  float alpha, limit, offset, cubic;

  explicit Experts(const OrtKernelInfo* info)
      : alpha(ort::float_attribute(info, "alpha", 1)),
        limit(ort::float_attribute(info, "limit", 0)),
        offset(ort::float_attribute(info, "offset", 0)),
        cubic(ort::float_attribute(info, "cubic", 0)) {
    const int64_t experts = ort::int_attribute(info, "experts", 0);
    gates = read_stack(info, 3, experts);
    downs = read_stack(info, 4, experts);
    require(!downs[0].is_gated && downs[0].in_features == gates[0].outputs() &&
                downs[0].out_features == gates[0].in_features,
            "Experts: gates, ups and downs do not fit each other");
  }

  void run(OrtKernelContext* context) const {
    const int64_t H = gates[0].in_features, count = int64_t(gates.size());
    const Tensor x = ort::input(context, 0), ids = ort::input(context, 1), shares = ort::input(context, 2),
                 inner_bias = ort::input(context, 5), bias = ort::input(context, 6);
    require(!x.dims.empty() && x.last() == H, "Experts: x is not as wide as the weights");
    const int64_t rows = x.count(0, 1), top_k = ids.last();
    require(ids.dims == shares.dims && ids.count() == rows * top_k, "Experts: ids and shares are not [rows, K]");
    require(!inner_bias || inner_bias.count() == count * gates[0].out_features, "Experts: the inner bias does not fit");
    require(!bias || bias.count() == count * H, "Experts: the bias does not fit");
    const Tensor y = ort::output(context, 0, x.dims);
    const int64_t step = std::max<int64_t>(1, kMostTaken / std::max<int64_t>(1, top_k));
    for (int64_t first = 0; first < rows; first += step) {
      Pass pass{x.as<float>() + first * H,
                ids.as<int64_t>() + first * top_k,
                shares.as<float>() + first * top_k,
                y.as<float>() + first * H,
                std::min(step, rows - first),
                top_k,
                inner_bias.as<float>(),
                bias.as<float>(),
                {},
                {},
                {}};
      sort(pass);
      compute(context, pass);
    }
  }

 private:
  void sort(Pass& pass) const {
    std::vector<int64_t> begins(gates.size() + 1);
    for (int64_t a = 0; a < pass.taken(); a++) {
      require(pass.ids[a] >= 0 && pass.ids[a] < int64_t(gates.size()), "Experts: an id is that of no expert");
      begins[pass.ids[a] + 1]++;
    }
    for (size_t e = 0; e < gates.size(); e++) {
      if (begins[e + 1]) pass.groups.push_back({int64_t(e), begins[e], begins[e + 1]});
      begins[e + 1] += begins[e];
    }
    pass.sorted.resize(pass.taken());
    pass.place.resize(pass.taken());
    for (int64_t a = 0; a < pass.taken(); a++) {
      pass.place[a] = begins[pass.ids[a]]++;
      pass.sorted[pass.place[a]] = a;
    }
  }

  void compute(OrtKernelContext* context, const Pass& pass) const {
    const int64_t taken = pass.taken(), I = downs[0].in_features, H = downs[0].out_features;
    const size_t own = aligned(rows_bytes(gates[0], pass.rows)), outer = aligned(rows_bytes(gates[0], taken)),
                 inner = aligned(rows_bytes(downs[0], taken)), middle = aligned(taken * I * 4),
                 last = aligned(taken * H * 4);
    char* memory = static_cast<char*>(ort::scratch(own + outer + inner + middle + last));
    const Rows prepared = place_rows(gates[0], pass.rows, memory), gathered = place_rows(gates[0], taken, memory + own),
               inner_rows = place_rows(downs[0], taken, memory + own + outer);
    float* h = reinterpret_cast<float*>(memory + own + outer + inner);
    float* parts = reinterpret_cast<float*>(memory + own + outer + inner + middle);
    Weight plain = gates[0];  // experts have multipliers of their own
    plain.multiplier = 1;
    const Prologue before{&plain, pass.x, nullptr, nullptr, 0, nullptr, prepared};
    each_row(context, pass.rows, [&](int64_t row) { kernels().prepare(before, row, row + 1); });
    each_row(context, taken, [&](int64_t at) { gather(pass, prepared, gathered, at); });
    multiply(context, pass, gates, gathered, pass.inner_bias, h);
    each_row(context, taken, [&](int64_t at) {
      if (!gates[0].is_gated) square_positive(h + at * I, I);
      const Prologue between{&downs[pass.ids[pass.sorted[at]]], h, nullptr, nullptr, 0, nullptr, inner_rows};
      kernels().prepare(between, at, at + 1);
    });
    multiply(context, pass, downs, inner_rows, pass.bias, parts);
    each_row(context, pass.rows, [&](int64_t row) { add_up(pass, parts, row, H); });
  }

  // A prepared row goes to one of its experts.
  void gather(const Pass& pass, const Rows& from, const Rows& to, int64_t at) const {
    const int64_t a = pass.sorted[at], row = a / pass.top_k;
    const Weight& w = gates[pass.ids[a]];
    const Rows in = from_row(w, from, row), out = from_row(w, to, at);
    if (!takes_codes(w.form)) {
      std::memcpy(out.floats, in.floats, w.in_features * sizeof(float));
      return;
    }
    std::memcpy(out.codes, in.codes, w.input_terms * in.stride);
    std::memcpy(out.starts, in.starts, in.blocks * sizeof(int32_t));
    for (int64_t b = 0; b < in.blocks; b++) {
      out.scales[b] = in.scales[b] * w.multiplier;
      out.offsets[b] = in.offsets[b] * w.multiplier;
    }
  }

  void multiply(OrtKernelContext* context, const Pass& pass, const std::vector<Weight>& weights, const Rows& rows,
                const float* bias, float* y) const {
    std::vector<Task> tasks;
    const int64_t groups = weights[0].groups(), bytes = groups * weights[0].group_bytes();
    for (const Group& group : pass.groups) {
      const int64_t parts = parts_of(groups, bytes * group.count, kPartBytes, groups);
      for (int64_t part = 0; part < parts; part++)
        tasks.push_back({&group, groups * part / parts, groups * (part + 1) / parts});
    }
    ort::parallel(context, int64_t(tasks.size()), [&](int64_t i) {
      const Group& group = *tasks[i].group;
      const Weight& w = weights[group.expert];
      const Product product{
          &w,      from_row(w, rows, group.first), group.count, bias ? bias + group.expert * w.out_features : nullptr,
          nullptr, y + group.first * w.outputs(),  alpha,       limit,
          offset,  cubic};
      kernels().product(product, tasks[i].first, tasks[i].last);
    });
  }

  static void square_positive(float* x, int64_t size) {
    for (int64_t i = 0; i < size; i++) x[i] = x[i] < 0 ? 0 : x[i] * x[i];  // what is no number stays so
  }

  static void add_up(const Pass& pass, const float* parts, int64_t row, int64_t H) {
    float* y = pass.y + row * H;
    std::memset(y, 0, H * sizeof(float));
    for (int64_t k = 0; k < pass.top_k; k++) {
      const float share = pass.shares[row * pass.top_k + k];
      const float* part = parts + pass.place[row * pass.top_k + k] * H;
      for (int64_t i = 0; i < H; i++) y[i] += share * part[i];
    }
  }
};

}  // namespace

Operators experts_operators() { return {ort::describe<Experts>()}; }

}  // namespace edgellm

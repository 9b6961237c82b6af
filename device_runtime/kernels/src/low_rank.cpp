// ONNX Runtime's operator of what adapters add to linear layers.
#include <algorithm>
#include <cstring>

#include "operators.h"

namespace edgellm {
namespace {

using ort::require;
using ort::Tensor;

constexpr int64_t kPartFloats = 16 << 10;  // of weights, below which threads are not worth their call

// Layers that read the same rows x [..., K], or those normalized with gamma [K]. places int64 [L, 3]: of each
// layer its place in the table, its outputs N and where they begin in y; weights float [W]; table int64
// [slots, layers, 3]: rank (0: the adapter leaves the layer alone), where A [rank, K] and B [rank, N] begin; slot 0
// is no adapter;
// rows int64: the slot of each row; base like y. y [..., width]: the base with what is added, or without one what
// is to be added: -0, which changes nothing, where no adapter does, and [0] where none does to any row.
struct LowRankSum {
  static constexpr const char* kName = "LowRank";
  static constexpr ort::Type kInputs[] = {ort::kFloat, ort::kInt64, ort::kFloat, ort::kFloat, ort::kInt64, ort::kInt64, ort::kFloat};
  static constexpr ort::Type kOutputs[] = {ort::kFloat};
  static constexpr unsigned kNeeded = 0b111011, kNeededOutputs = 1;

  struct Task {  // of a row and a layer
    LowRank layer;
    int64_t row, column;
    float* inner;
  };

  int64_t width, step;  // of y; from strip to strip of a layer's outputs
  float epsilon;

  explicit LowRankSum(const ort::Info* info)
      : width(ort::int_attribute(info, "N", 0)), step(ort::int_attribute(info, "step", kStrip)), epsilon(ort::float_attribute(info, "epsilon", 1e-5f)) {}

  void run(ort::Context* context) const {
    const Tensor slots = ort::input(context, 5), base = ort::input(context, 6);
    const int64_t* first = slots.as<int64_t>();
    if (!base && std::all_of(first, first + slots.count(), [](int64_t slot) { return slot == 0; })) {  // most passes: at once
      ort::output(context, 0, {0});
      return;
    }
    const Tensor x = ort::input(context, 0), places = ort::input(context, 1), gamma = ort::input(context, 2), weights = ort::input(context, 3),
                 table = ort::input(context, 4);
    const int64_t K = x.last(), rows = x.count(0, 1);
    require(!gamma || gamma.count() == K, "LowRank: gamma is not as wide as x");
    require(slots.count() == rows, "LowRank: there is not a slot for each row");
    require(table.dims.size() == 3 && table.last() == 3, "LowRank: the table is not [slots, layers, 3]");
    require(!base || base.count() == rows * width, "LowRank: the base is not as wide as the layers");
    std::vector<Task> tasks = find(K, places, weights, table, slots);
    std::vector<int64_t> dims = x.dims;
    dims.back() = width;
    if (tasks.empty() && !base) dims = {0};
    const Tensor y = ort::output(context, 0, dims);
    if (!y.count()) return;
    fill(tasks, rows, base.as<float>(), y.as<float>());
    if (tasks.empty()) return;
    int64_t ranks = 0;
    for (const Task& task : tasks) ranks += task.layer.rank;
    const Weight plain{Form::kFloat32, false, false, 1, K, 1, 1, 1, nullptr};
    const size_t normal = gamma ? aligned(rows_bytes(plain, rows)) : 0;
    char* memory = static_cast<char*>(ort::scratch(normal + ranks * sizeof(float)));
    const float* read = x.as<float>();
    int64_t stride = K;
    if (gamma) {
      const Rows prepared = place_rows(plain, rows, memory);
      const Prologue before{&plain, read, nullptr, gamma.as<float>(), epsilon, nullptr, prepared};
      parts(context, rows, rows * K, [&](int64_t first, int64_t last) { kernels().prepare(before, first, last); });
      read = prepared.floats;
      stride = prepared.stride;
    }
    float* inner = reinterpret_cast<float*>(memory + normal);
    for (Task& task : tasks) {
      task.inner = inner;
      inner += task.layer.rank;
    }
    each(context, tasks, [](const Task& task) { return task.layer.rank; }, K, [&](const Task& task, int64_t first, int64_t last) {
      kernels().shrink(task.layer, read + task.row * stride, first, last, task.inner);
    });
    const auto strips = [](const Task& task) { return (task.layer.outputs + kStrip - 1) / kStrip; };
    each(context, tasks, strips, kStrip * ranks / int64_t(tasks.size()), [&](const Task& task, int64_t first, int64_t last) {
      const int64_t at = task.row * width + task.column;
      kernels().widen(task.layer, task.inner, first, last, step, base ? base.as<float>() + at : nullptr, y.as<float>() + at);
    });
  }

 private:
  std::vector<Task> find(int64_t K, const Tensor& places, const Tensor& weights, const Tensor& table, const Tensor& slots) const {
    std::vector<Task> tasks;
    const int64_t layers = table.dims[1], floats = weights.count();
    for (int64_t row = 0; row < slots.count(); row++) {
      const int64_t slot = slots.as<int64_t>()[row];
      require(slot >= 0 && slot < table.dims[0], "LowRank: there is no such adapter");
      for (int64_t i = 0; i < places.dims[0]; i++) {
        const int64_t* place = places.as<int64_t>() + 3 * i;
        require(place[0] >= 0 && place[0] < layers, "LowRank: the table lacks a layer");
        const int64_t* entry = table.as<int64_t>() + (slot * layers + place[0]) * 3;
        if (!entry[0]) continue;
        const auto holds = [&](int64_t at, int64_t size) { return at >= 0 && size >= 0 && at <= floats - size; };
        require(entry[0] > 0 && entry[0] <= floats && holds(entry[1], entry[0] * K) && holds(entry[2], entry[0] * place[1]),
                "LowRank: the weights of an adapter are cut off");
        const float* w = weights.as<float>();
        tasks.push_back({{K, entry[0], place[1], w + entry[1], w + entry[2]}, row, place[2], nullptr});
      }
    }
    return tasks;
  }

  // y as it is where no adapter adds anything.
  void fill(const std::vector<Task>& tasks, int64_t rows, const float* base, float* y) const {
    if (base) {
      std::memcpy(y, base, rows * width * sizeof(float));
      return;
    }
    std::vector<int64_t> written(rows);
    for (const Task& task : tasks) written[task.row] += task.layer.outputs;
    for (int64_t row = 0; row < rows; row++)
      if (written[row] < width) std::fill(y + row * width, y + (row + 1) * width, -0.f);
  }

  // function(first, last) for all of `count` things, which have `floats` to read.
  template <class Function>
  static void parts(ort::Context* context, int64_t count, int64_t floats, const Function& function) {
    const int64_t some = parts_of(count, floats, kPartFloats);
    ort::parallel(context, some, [&](int64_t part) { function(count * part / some, count * (part + 1) / some); });
  }

  // function(task, first, last) for all pieces of all tasks, of which each reads about `floats`.
  template <class Size, class Function>
  static void each(ort::Context* context, const std::vector<Task>& tasks, const Size& size, int64_t floats, const Function& function) {
    std::vector<int64_t> ends;
    int64_t total = 0;
    for (const Task& task : tasks) ends.push_back(total += size(task));
    parts(context, total, total * floats, [&](int64_t first, int64_t last) {
      size_t at = std::upper_bound(ends.begin(), ends.end(), first) - ends.begin();
      for (; first < last; at++) {
        const int64_t begin = ends[at] - size(tasks[at]), end = std::min(last, ends[at]);
        function(tasks[at], first - begin, end - begin);
        first = end;
      }
    });
  }
};

}  // namespace

Operators low_rank_operators() { return {ort::describe<LowRankSum>()}; }

}  // namespace edgellm

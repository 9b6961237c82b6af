// What adapters add to linear layers; ONNX Runtime's operator for layers whose product is not edgellm's.
#include "low_rank.h"

#include <algorithm>
#include <cstring>

namespace edgellm {
namespace {

using ort::require;
using ort::Tensor;

constexpr int64_t kPartFloats = 16 << 10;  // of weights, below which threads are not worth their call

struct Task {  // of a row and a layer
  LowRank layer;
  int64_t row, column;
  float* inner;
};

std::vector<Task> find(const Adapted& a, int64_t K) {
  std::vector<Task> tasks;
  const int64_t layers = a.table.dims[1], floats = a.weights.count();
  for (int64_t row = 0; row < a.slots.count(); row++) {
    const int64_t slot = a.slots.as<int64_t>()[row];
    require(slot >= 0 && slot < a.table.dims[0], "adapters: there is no such adapter");
    for (int64_t i = 0; i < a.places.dims[0]; i++) {
      const int64_t* place = a.places.as<int64_t>() + 3 * i;
      require(place[0] >= 0 && place[0] < layers, "adapters: the table lacks a layer");
      const int64_t* entry = a.table.as<int64_t>() + (slot * layers + place[0]) * 3;
      if (!entry[0]) continue;
      const auto holds = [&](int64_t at, int64_t size) { return at >= 0 && size >= 0 && at <= floats - size; };
      require(
          entry[0] > 0 && entry[0] <= floats && holds(entry[1], entry[0] * K) && holds(entry[2], entry[0] * place[1]),
          "adapters: the weights of an adapter are cut off");
      const float* w = a.weights.as<float>();
      tasks.push_back({{K, entry[0], place[1], w + entry[1], w + entry[2]}, row, place[2], nullptr});
    }
  }
  return tasks;
}

// y as it is where no adapter adds anything.
void fill(const std::vector<Task>& tasks, int64_t rows, int64_t width, const float* base, float* y) {
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
void parts(OrtKernelContext* context, int64_t count, int64_t floats, const Function& function) {
  const int64_t some = parts_of(count, floats, kPartFloats);
  ort::parallel(context, some, [&](int64_t part) { function(count * part / some, count * (part + 1) / some); });
}

// function(task, first, last) for all pieces of all tasks, of which each reads about `floats`.
template <class Size, class Function>
void each(OrtKernelContext* context, const std::vector<Task>& tasks, const Size& size, int64_t floats,
          const Function& function) {
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

// As LowRank: y [..., N] is base, like y, with what is added. Of ONNX Runtime's products of floats.
struct LowRankSum {
  static constexpr const char* kName = "LowRank";
  static constexpr ort::ElementType kInputs[] = {ort::kFloat, ort::kFloat, ort::kInt64,
                                                 ort::kInt64, ort::kFloat, ort::kInt64};
  static constexpr ort::ElementType kOutputs[] = {ort::kFloat};
  static constexpr unsigned kNeeded = 0b111111, kNeededOutputs = 1;

  explicit LowRankSum(const OrtKernelInfo*) {}

  void run(OrtKernelContext* context) const {
    const Tensor x = ort::input(context, 0), base = ort::input(context, 1), slots = ort::input(context, 2);
    const int64_t rows = x.count(0, 1), width = base.last();
    require(!base.dims.empty() && base.count() == rows * width, "LowRank: the base has other rows than x");
    const Tensor y = ort::output(context, 0, base.dims);
    if (!y.count()) return;
    if (!is_adapted(slots) || !add_low_rank({context, x, nullptr, 0, slots, ort::input(context, 3),
                                             ort::input(context, 4), ort::input(context, 5), width, kStrip},
                                            base.as<float>(), y.as<float>()))
      std::memcpy(y.data, base.data, y.count() * sizeof(float));
  }
};

}  // namespace

bool is_adapted(const Tensor& slots) {
  const int64_t* first = slots.as<int64_t>();
  return std::any_of(first, first + slots.count(), [](int64_t slot) { return slot != 0; });
}

bool add_low_rank(const Adapted& a, const float* base, float* y) {
  const int64_t K = a.x.last(), rows = a.x.count(0, 1);
  require(a.slots.count() == rows, "adapters: there is not a slot for each row");
  require(a.table.dims.size() == 3 && a.table.last() == 3, "adapters: the table is not [slots, layers, 3]");
  require(a.places.dims.size() == 2 && a.places.last() == 3, "adapters: the places are not [layers, 3]");
  std::vector<Task> tasks = find(a, K);
  if (tasks.empty()) return false;
  fill(tasks, rows, a.width, base, y);
  int64_t ranks = 0;
  for (const Task& task : tasks) ranks += task.layer.rank;
  const Weight plain{Form::kFloat32, false, false, false, 1, K, 1, 1, 1, nullptr};
  const size_t normal = a.gamma ? aligned(rows_bytes(plain, rows)) : 0;
  char* memory = static_cast<char*>(ort::scratch(normal + ranks * sizeof(float)));
  const float* read = a.x.as<float>();
  int64_t stride = K;
  if (a.gamma) {
    const Rows prepared = place_rows(plain, rows, memory);
    const Prologue before{&plain, read, nullptr, a.gamma, a.epsilon, nullptr, prepared};
    parts(a.context, rows, rows * K, [&](int64_t first, int64_t last) { kernels().prepare(before, first, last); });
    read = prepared.floats;
    stride = prepared.stride;
  }
  float* inner = reinterpret_cast<float*>(memory + normal);
  for (Task& task : tasks) {
    task.inner = inner;
    inner += task.layer.rank;
  }
  each(
      a.context, tasks, [](const Task& task) { return task.layer.rank; }, K,
      [&](const Task& task, int64_t first, int64_t last) {
        kernels().lora_down(task.layer, read + task.row * stride, first, last, task.inner);
      });
  const auto strips = [](const Task& task) { return (task.layer.outputs + kStrip - 1) / kStrip; };
  each(a.context, tasks, strips, kStrip * ranks / int64_t(tasks.size()),
       [&](const Task& task, int64_t first, int64_t last) {
         const int64_t at = task.row * a.width + task.column;
         kernels().lora_up(task.layer, task.inner, first, last, a.step, base ? base + at : nullptr, y + at);
       });
  return true;
}

Operators low_rank_operators() { return {ort::describe<LowRankSum>()}; }

}  // namespace edgellm

// The gated delta rule over rows that may be a tree, and what accepted rows make of a state.
//
// A head's rows are computed one by one, each from its parent's matrix, so results are batch-invariant. A matrix is
// kept while rows depend on it; a chain has one.
#include <algorithm>
#include <cmath>

#include "operators.h"

namespace edgellm {
namespace {

using ort::require;
using ort::Tensor;

// Of each row the one before it, or -1 - n for state n.
const int64_t* read_parents(const Tensor& given, int64_t rows, int64_t states) {
  require(given.count() == rows, "not a parent for each row");
  const int64_t* parents = given.as<int64_t>();
  for (int64_t row = 0; row < rows; row++)
    require(parents[row] >= -states && parents[row] < row, "a parent is not before its row");
  return parents;
}

// Where the matrices of rows go, and whose they were: `from` of -1 - n is state n.
struct Places {
  struct Row {
    int64_t from, to;
  };
  std::vector<Row> rows;
  int64_t count = 0;

  Places(const int64_t* parents, int64_t num_rows) : rows(num_rows) {
    std::vector<int64_t> last(num_rows, -1), free;
    for (int64_t row = 0; row < num_rows; row++)
      if (parents[row] >= 0) last[parents[row]] = row;
    for (int64_t row = 0; row < num_rows; row++) {
      const int64_t parent = parents[row], from = parent < 0 ? parent : rows[parent].to;
      int64_t to = from;
      if (parent < 0 || last[parent] != row) {
        if (free.empty()) free.push_back(count++);
        to = free.back();
        free.pop_back();
      }
      rows[row] = {from, to};
      if (last[row] < 0) free.push_back(to);  // nothing begins with it
    }
  }
};

// What both operators read: k [1, S, J * dk], g [1, S, H * C] and states [B, H, dk, dv]. C is 1, or dk for a decay of
// each channel.
struct Heads {
  int64_t rows, heads, keys, values, key_heads, decays;
  const float *k, *g;

  Heads(const Tensor& k, const Tensor& g, const Tensor& state) : k(k.as<float>()), g(g.as<float>()) {
    require(state.dims.size() == 4 && k.dims.size() == 3,
            "GatedDelta: the states are not [B, H, dk, dv], or k not [1, S, J * dk]");
    rows = k.dims[1], heads = state.dims[1], keys = state.dims[2], values = state.dims[3];
    key_heads = keys ? k.dims[2] / keys : 0;
    require(key_heads && heads % key_heads == 0 && key_heads * keys == k.dims[2],
            "GatedDelta: heads do not share keys evenly");
    decays = g.dims.size() == 3 && g.dims[2] == heads * keys ? keys : 1;
    require(g.count() == rows * heads * decays, "GatedDelta: g is not [1, S, H] or [1, S, H * dk]");
  }

  int64_t matrix() const { return keys * values; }
  int64_t key_at(int64_t row, int64_t head) const { return row * key_heads * keys + head / (heads / key_heads) * keys; }
  int64_t value_at(int64_t row, int64_t head) const { return (row * heads + head) * values; }

  bool by_channel() const { return decays > 1; }

  // `work` is [2, dk]: the decays of channels, and the decayed key.
  DeltaRow row(int64_t row, int64_t head, float* work) const {
    DeltaRow found{};
    found.keys = keys, found.values = values;
    found.k = k + key_at(row, head);
    const float* const logarithms = g + (row * heads + head) * decays;
    if (by_channel()) {
      kernels().delta_decays(logarithms, found.k, keys, work, work + keys);
      found.decays = work, found.decay = 1;
    } else {
      found.decay = std::exp(*logarithms);
    }
    return found;
  }
};

// Inputs: q, k [1, S, J * dk], v [1, S, H * dv], g [1, S, H * C], b [1, S, H], states [B, H, dk, dv], parents int64 [S]:
// a row before, or -1 - n for state n.
// Outputs: y and d [1, S, H * dv]; without b there is no d, but v takes its place.
struct GatedDelta {
  static constexpr const char* kName = "GatedDelta";
  static constexpr ort::ElementType kInputs[] = {ort::kFloat, ort::kFloat, ort::kFloat, ort::kFloat,
                                                 ort::kFloat, ort::kFloat, ort::kInt64};
  static constexpr ort::ElementType kOutputs[] = {ort::kFloat, ort::kFloat};
  static constexpr unsigned kNeeded = 0b1101111, kNeededOutputs = 1;

  explicit GatedDelta(const OrtKernelInfo*) {}

  void run(OrtKernelContext* context) const {
    const Tensor q = ort::input(context, 0), k = ort::input(context, 1), v = ort::input(context, 2),
                 g = ort::input(context, 3), b = ort::input(context, 4), state = ort::input(context, 5),
                 parents = ort::input(context, 6);
    const Heads heads(k, g, state);
    require(q.dims == k.dims && (!b || b.count() == heads.rows * heads.heads),
            "GatedDelta: q is not shaped like k, or b not [1, S, H]");
    require(v.count() == heads.rows * heads.heads * heads.values, "GatedDelta: v is not [1, S, H * dv]");
    const Tensor y = ort::output(context, 0, v.dims), found = ort::output(context, 1, v.dims);
    require(bool(b) == bool(found), "GatedDelta: rates and deltas go together");
    if (!heads.rows) return;
    const Places places(read_parents(parents, heads.rows, state.dims[0]), heads.rows);
    ort::parallel(context, heads.heads, [&](int64_t head) {
      float* const matrices = static_cast<float*>(ort::scratch(places.count * heads.matrix() * sizeof(float)));
      float* const work = static_cast<float*>(ort::scratch<1>(2 * heads.keys * sizeof(float)));
      const auto at = [&](int64_t place) { return matrices + place * heads.matrix(); };
      for (int64_t row = 0; row < heads.rows; row++) {
        const Places::Row place = places.rows[row];
        DeltaRow one = heads.row(row, head, work);
        const int64_t of_state = (-1 - place.from) * heads.heads + head;
        one.from = place.from < 0 ? state.as<float>() + of_state * heads.matrix() : at(place.from);
        one.to = at(place.to);
        one.q = q.as<float>() + heads.key_at(row, head);
        one.v = v.as<float>() + heads.value_at(row, head);
        one.delta = (b ? found : v).as<float>() + heads.value_at(row, head);
        one.y = y.as<float>() + heads.value_at(row, head);
        if (b) {
          one.rate = b.as<float>()[row * heads.heads + head];
          DeltaRow recalled = one;
          if (heads.by_channel()) recalled.k = work + heads.keys;
          kernels().delta_recall(recalled);
        }
        kernels().delta_update(one);
      }
    });
  }
};

// The state behind rows one after the other. Inputs: state [1, H, dk, dv], k [1, M, J * dk], d [1, M, H * dv],
// g [1, M, H * C]. Output: [1, H, dk, dv].
struct GatedDeltaUpdate {
  static constexpr const char* kName = "GatedDeltaUpdate";
  static constexpr ort::ElementType kInputs[] = {ort::kFloat, ort::kFloat, ort::kFloat, ort::kFloat};
  static constexpr ort::ElementType kOutputs[] = {ort::kFloat};
  static constexpr unsigned kNeeded = 0b1111, kNeededOutputs = 1;

  explicit GatedDeltaUpdate(const OrtKernelInfo*) {}

  void run(OrtKernelContext* context) const {
    const Tensor state = ort::input(context, 0), k = ort::input(context, 1), d = ort::input(context, 2),
                 g = ort::input(context, 3);
    const Heads heads(k, g, state);
    require(state.dims[0] == 1, "GatedDeltaUpdate: not the state of one sequence");
    require(d.count() == heads.rows * heads.heads * heads.values, "GatedDeltaUpdate: d is not [1, M, H * dv]");
    const Tensor next = ort::output(context, 0, state.dims);
    ort::parallel(context, heads.heads, [&](int64_t head) {
      const float* from = state.as<float>() + head * heads.matrix();
      float* const to = next.as<float>() + head * heads.matrix();
      float* const work = static_cast<float*>(ort::scratch(2 * heads.keys * sizeof(float)));
      if (!heads.rows) std::copy(from, from + heads.matrix(), to);
      for (int64_t row = 0; row < heads.rows; row++, from = to) {
        DeltaRow one = heads.row(row, head, work);
        one.from = from;
        one.to = to;
        one.delta = d.as<float>() + heads.value_at(row, head);
        kernels().delta_update(one);
      }
    });
  }
};

// A causal convolution of each channel over a row and those before it. Inputs: x [1, S, W], windows [B, K - 1, W],
// weight [K, 1, W], parents as above. Output like x. Sums run from the newest row to the oldest.
struct Convolution {
  static constexpr const char* kName = "Convolution";
  static constexpr ort::ElementType kInputs[] = {ort::kFloat, ort::kFloat, ort::kFloat, ort::kInt64};
  static constexpr ort::ElementType kOutputs[] = {ort::kFloat};
  static constexpr unsigned kNeeded = 0b1111, kNeededOutputs = 1;

  explicit Convolution(const OrtKernelInfo*) {}

  void run(OrtKernelContext* context) const {
    const Tensor x = ort::input(context, 0), windows = ort::input(context, 1), weight = ort::input(context, 2),
                 given = ort::input(context, 3);
    require(x.dims.size() == 3 && windows.dims.size() == 3 && weight.count(),
            "Convolution: x is not [1, S, W], or windows not [B, K - 1, W]");
    const int64_t rows = x.dims[1], width = x.dims[2], states = windows.dims[0], kept = windows.dims[1];
    require(windows.dims[2] == width && weight.count() == (kept + 1) * width,
            "Convolution: windows or weight are not as wide as x");
    const int64_t* parents = read_parents(given, rows, states);
    const Tensor y = ort::output(context, 0, x.dims);
    each_row(context, rows, [&](int64_t row) {
      const float *from = x.as<float>() + row * width, *taps = weight.as<float>() + kept * width;
      float* to = y.as<float>() + row * width;
      for (int64_t i = 0; i < width; i++) to[i] = from[i] * taps[i];
      int64_t at = row, back = kept;  // behind a state's window, its rows that are left
      const float* window = nullptr;
      for (int64_t step = 0; step < kept; step++) {
        if (!window && (at = parents[at]) < 0) window = windows.as<float>() + (-1 - at) * kept * width;
        from = window ? window + --back * width : x.as<float>() + at * width;
        taps -= width;
        for (int64_t i = 0; i < width; i++) to[i] += from[i] * taps[i];
      }
    });
  }
};

}  // namespace

Operators delta_operators() {
  return {ort::describe<GatedDelta>(), ort::describe<GatedDeltaUpdate>(), ort::describe<Convolution>()};
}

}  // namespace edgellm

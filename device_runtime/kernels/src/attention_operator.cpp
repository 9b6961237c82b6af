// Attention over a cache, as an operator of ONNX Runtime.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels.h"
#include "operators.h"

namespace edgellm {
namespace {

using ort::require;
using ort::Tensor;

constexpr int64_t kRowsTogether = 16;  // rows from which a tile takes all chunks of its keys

// Of a prompt: what reads the cache together; of a long one more, which still leaves tasks enough.
constexpr int64_t kRowsOfTask = 4, kQueriesOfTask = 128, kLongPrompt = 4096;

// Rope, append and attention. Inputs: q [1, S, heads * D], or q, k and v side by side with k and v
// left out; k, v [1, S, kv_heads * D]; past key and value [1, kv_heads, C, D] of float, half or int8;
// write_index int64 [1]; cos, sin [P, R / 2]; positions int64 [1, S]; mask bool [S, M];
// q_norm, k_norm [D]; sinks [heads]; k_scale, v_scale [1].
// Outputs: y [1, S, heads * D], and the caches, which are written in place where they are the past's.
template <ort::Type kCache>
struct CachedAttention {
  static constexpr const char* kName = "CachedAttention";
  static constexpr ort::Type kInputs[] = {
      ort::kFloat, ort::kFloat, ort::kFloat, kCache, kCache, ort::kInt64, ort::kFloat, ort::kFloat,
      ort::kInt64, ort::kBool, ort::kFloat, ort::kFloat, ort::kFloat, ort::kFloat, ort::kFloat};
  static constexpr ort::Type kOutputs[] = {ort::kFloat, kCache, kCache};
  static constexpr unsigned kNeeded = 0b111001, kNeededOutputs = 3;

  int64_t heads, kv_heads, window, is_interleaved;
  float scale, softcap, epsilon;

  explicit CachedAttention(const ort::Info* info)
      : heads(ort::int_attribute(info, "num_heads", 0)),
        kv_heads(ort::int_attribute(info, "kv_num_heads", 0)),
        window(ort::int_attribute(info, "local_window_size", 0)),
        is_interleaved(ort::int_attribute(info, "rotary_interleaved", 0)),
        scale(ort::float_attribute(info, "scale", 0)),
        softcap(ort::float_attribute(info, "softcap", 0)),
        epsilon(ort::float_attribute(info, "epsilon", 1e-6f)) {
    require(heads > 0 && kv_heads > 0 && heads % kv_heads == 0, "CachedAttention: num_heads is no multiple of kv_num_heads");
    require(window >= 0, "CachedAttention: local_window_size is negative");
  }

  void run(ort::Context* context) const {
    Tensor in[15];
    for (size_t i = 0; i < 15; i++) in[i] = ort::input(context, i);
    Attention a{};
    read_rows(in, a);
    read_cache(in, a);
    read_rules(in, a);
    std::vector<int64_t> dims = in[0].dims;
    dims.back() = heads * a.head_dim;
    a.y = ort::output(context, 0, dims).as<float>();
    a.keys = carry(context, 1, in[3], a);
    a.values = carry(context, 2, in[4], a);
    if (a.rows) attend(context, a);
  }

 private:
  void read_rows(const Tensor* in, Attention& a) const {
    require(in[3].dims.size() == 4 && in[3].dims[0] == 1 && in[3].dims[1] == kv_heads, "CachedAttention: the cache is not [1, kv_num_heads, C, D]");
    require(in[4].dims == in[3].dims, "CachedAttention: the caches of keys and values differ in shape");
    a.heads = heads;
    a.kv_heads = kv_heads;
    a.capacity = in[3].dims[2];
    a.head_dim = in[3].dims[3];
    require(a.head_dim > 0 && a.head_dim <= 256, "CachedAttention: heads of more than 256 values are not known");
    const int64_t width = heads * a.head_dim, kv_width = kv_heads * a.head_dim;
    require(in[0].dims.size() == 3 && in[0].dims[0] == 1, "CachedAttention: q is not [1, S, width]");
    a.rows = in[0].dims[1];
    a.q = in[0].as<float>();
    a.q_stride = in[0].last();
    if (in[1] && in[2]) {
      require(a.q_stride == width && in[1].count() == a.rows * kv_width && in[2].count() == a.rows * kv_width,
              "CachedAttention: q, k and v do not fit the heads");
      a.k = in[1].as<float>();
      a.v = in[2].as<float>();
      a.k_stride = a.v_stride = kv_width;
      return;
    }
    require(!in[1] && !in[2] && a.q_stride == width + 2 * kv_width, "CachedAttention: q, k and v do not fit the heads");
    a.k = a.q + width;
    a.v = a.k + kv_width;
    a.k_stride = a.v_stride = a.q_stride;
  }

  void read_cache(const Tensor* in, Attention& a) const {
    a.cache_type = kCache == ort::kFloat ? CacheType::kFloat32 : kCache == ort::kHalf ? CacheType::kFloat16 : CacheType::kInt8;
    require(in[5].count() == 1, "CachedAttention: write_index is not one number");
    a.write_index = *in[5].as<int64_t>();
    require(a.write_index >= 0 && a.write_index <= a.capacity - a.rows, "CachedAttention: the new rows do not fit into the cache");
    a.k_scale = a.v_scale = 1;
    if (a.cache_type == CacheType::kInt8) {
      require(in[13].count() == 1 && in[13].data && in[14].count() == 1 && in[14].data, "CachedAttention: a cache of int8 needs k_scale and v_scale");
      a.k_scale = *in[13].as<float>();
      a.v_scale = *in[14].as<float>();
      require(a.k_scale > 0 && a.v_scale > 0, "CachedAttention: scales of the cache must be positive");
    }
  }

  void read_rules(const Tensor* in, Attention& a) const {
    a.scale = scale > 0 ? scale : 1 / std::sqrt(float(a.head_dim));
    a.softcap = softcap;
    a.epsilon = epsilon;
    a.window = window;
    a.is_interleaved = is_interleaved;
    if (in[6] || in[7]) {
      require(in[6].dims.size() == 2 && in[6].dims == in[7].dims && 2 * in[6].last() <= a.head_dim, "CachedAttention: cos and sin do not fit the heads");
      a.cos = in[6].as<float>();
      a.sin = in[7].as<float>();
      a.rotary_dim = 2 * in[6].last();
      a.table_rows = in[6].dims[0];
      a.positions = in[8].as<int64_t>();
      require(in[8] ? in[8].count() == a.rows : a.table_rows >= a.rows, "CachedAttention: rows and positions differ in number");
      for (int64_t row = 0; a.positions && row < a.rows; row++)
        require(a.positions[row] >= 0 && a.positions[row] < a.table_rows, "CachedAttention: a position is outside of the rope tables");
    }
    a.mask = in[9].as<uint8_t>();
    if (in[9]) {
      require(in[9].dims.size() == 2 && in[9].dims[0] == a.rows && in[9].last() >= a.rows && in[9].last() <= a.write_index + a.rows,
              "CachedAttention: the mask is not [S, M] over the last M slots");
      a.mask_columns = in[9].last();
    }
    require((!in[10] || in[10].count() == a.head_dim) && (!in[11] || in[11].count() == a.head_dim), "CachedAttention: q_norm and k_norm do not fit the heads");
    a.q_norm = in[10].as<float>();
    a.k_norm = in[11].as<float>();
    require(!in[12] || in[12].count() == heads, "CachedAttention: there is not one sink for each head");
    a.sinks = in[12].as<float>();
  }

  // The cache that is written: with the past's live rows, if it is not the past itself.
  void* carry(ort::Context* context, size_t index, const Tensor& past, const Attention& a) const {
    const Tensor present = ort::output(context, index, past.dims);
    if (present.data == past.data) return present.data;
    const int64_t size = a.cache_type == CacheType::kFloat32 ? 4 : a.cache_type == CacheType::kFloat16 ? 2 : 1;
    const int64_t row = a.head_dim * size;
    for (int64_t h = 0; h < kv_heads; h++) {
      char* head = present.as<char>() + h * a.capacity * row;
      std::memcpy(head, past.as<char>() + h * a.capacity * row, a.write_index * row);
      std::memset(head + (a.write_index + a.rows) * row, 0, (a.capacity - a.write_index - a.rows) * row);
    }
    return present.data;
  }

  void attend(ort::Context* context, Attention& a) const {
    const bool splits = a.rows < kRowsTogether;
    const auto up = [](int64_t bytes) { return (bytes + 63) / 64 * 64; };
    const int64_t queries = up(a.rows * heads * a.padded_dim() * 4), seen = up(a.rows * 8), slots = up(a.rows * a.mask_columns * 4),
                  partials = splits ? a.chunks() * a.rows * heads * a.partial_floats() * 4 : 0;
    char* memory = static_cast<char*>(ort::scratch(queries + seen + slots + partials));
    a.queries = reinterpret_cast<float*>(memory);
    a.seen = reinterpret_cast<int32_t*>(memory + queries);
    a.slots = reinterpret_cast<int32_t*>(memory + queries + seen);
    a.partials = reinterpret_cast<float*>(memory + queries + seen + slots);
    const auto each_row = [&](void (*function)(const Attention&, int64_t)) {
      if (a.rows < kRowsApart)
        for (int64_t row = 0; row < a.rows; row++) function(a, row);
      else
        ort::parallel(context, a.rows, [&](int64_t row) { function(a, row); });
    };
    each_row(kernels().append);
    const auto work = [&](int64_t rows) { return static_cast<float*>(ort::scratch<1>(a.work_floats(rows) * 4)); };
    if (splits) {
      ort::parallel(context, kv_heads * a.chunks(), [&](int64_t i) { kernels().attend_chunk(a, i % kv_heads, i / kv_heads, work(0)); });
      return each_row(kernels().merge);
    }
    const int64_t together = a.rows * heads < kLongPrompt ? kQueriesOfTask : 2 * kQueriesOfTask;
    const int64_t step = std::max(kRowsOfTask, together * kv_heads / heads), tiles = (a.rows + step - 1) / step;
    ort::parallel(context, kv_heads * tiles, [&](int64_t i) {
      const int64_t first = i / kv_heads * step;
      kernels().attend_rows(a, i % kv_heads, first, std::min(first + step, a.rows), work(step));
    });
  }
};

}  // namespace

std::vector<const ort::Operator*> attention_operators() {
  return {ort::describe<CachedAttention<ort::kFloat>>(), ort::describe<CachedAttention<ort::kHalf>>(), ort::describe<CachedAttention<ort::kInt8>>()};
}

}  // namespace edgellm

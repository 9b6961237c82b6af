// RoPE, KV cache writes and attention of a pass over the pages of several sequences' caches.
//
// Each sequence is computed for itself: a row's bits know neither the others' rows nor where pages lie.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "operators.h"

namespace edgellm {
namespace {

using ort::require;
using ort::Tensor;

constexpr int64_t kRowsTogether = 16;  // rows from which a tile takes all chunks of its keys

// Of a prompt: what reads the cache together; of a long one more, which still leaves tasks enough.
constexpr int64_t kRowsOfTask = 4, kQueriesOfTask = 128, kLongPrompt = 4096;

constexpr int64_t kFacts = 3;  // of a sequence: rows before, rows of the pass, columns of its mask

// The concatenated sequences of a pass, and their distribution over threads.
struct Pass {
  struct Part {
    Attention a;
    int64_t first_row, first_task, tasks, step;  // step: rows of a task; 0: a task is a chunk of all rows
    bool splits() const { return step == 0; }
  };
  std::vector<Part> parts;
  int64_t rows = 0, tasks = 0;

  void add(const Attention& a) {
    Part part{a, rows, tasks, 0, 0};
    if (a.shape.rows < kRowsTogether) {
      part.tasks = a.shape.kv_heads * a.chunks();
    } else {
      const int64_t together = a.shape.rows * a.shape.heads < kLongPrompt ? kQueriesOfTask : 2 * kQueriesOfTask;
      part.step = std::max(kRowsOfTask, together * a.shape.kv_heads / a.shape.heads);
      part.tasks = a.shape.kv_heads * ((a.shape.rows + part.step - 1) / part.step);
    }
    rows += a.shape.rows;
    tasks += part.tasks;
    parts.push_back(part);
  }

  // Gives every sequence memory of this thread.
  void place() {
    int64_t size = 0;
    std::vector<int64_t> starts;
    for (const Part& part : parts) {
      const Attention& a = part.a;
      starts.push_back(size);
      size += aligned(a.shape.rows * a.shape.heads * a.query_floats() * 4) + aligned(a.shape.rows * kSeen * 4) +
              aligned(a.shape.rows * a.shape.mask_columns * 4);
      if (part.splits()) size += a.chunks() * a.shape.rows * a.shape.heads * a.partial_floats() * 4;
    }
    char* const memory = static_cast<char*>(ort::scratch(size));
    for (size_t i = 0; i < parts.size(); i++) {
      Attention& a = parts[i].a;
      char* at = memory + starts[i];
      const auto take = [&](int64_t bytes) { return std::exchange(at, at + aligned(bytes)); };
      a.scratch.queries = reinterpret_cast<float*>(take(a.shape.rows * a.shape.heads * a.query_floats() * 4));
      a.scratch.seen = reinterpret_cast<int32_t*>(take(a.shape.rows * kSeen * 4));
      a.scratch.slots = reinterpret_cast<int32_t*>(take(a.shape.rows * a.shape.mask_columns * 4));
      a.scratch.partials = reinterpret_cast<float*>(at);
    }
  }

  template <class Function>
  void each_row(OrtKernelContext* context, Function function) const {
    edgellm::each_row(context, rows, [&](int64_t row) {
      const Part& part = *(
          std::upper_bound(parts.begin(), parts.end(), row, [](int64_t r, const Part& p) { return r < p.first_row; }) -
          1);
      function(part, row - part.first_row);
    });
  }

  void attend(OrtKernelContext* context) const {
    ort::parallel(context, tasks, [&](int64_t task) {
      const Part& part = *(std::upper_bound(parts.begin(), parts.end(), task,
                                            [](int64_t t, const Part& p) { return t < p.first_task; }) -
                           1);
      const Attention& a = part.a;
      const int64_t kv_head = (task - part.first_task) % a.shape.kv_heads,
                    at = (task - part.first_task) / a.shape.kv_heads;
      float* work = static_cast<float*>(ort::scratch<1>(a.work_floats(part.step) * 4));
      if (part.splits()) return kernels().attend_chunk(a, kv_head, at, work);
      kernels().attend_rows(a, kv_head, at * part.step, std::min((at + 1) * part.step, a.shape.rows), work);
    });
  }
};

enum {
  kQ,
  kK,
  kV,
  kPastKey,
  kPastValue,
  kSequences,
  kPages,
  kCos,
  kSin,
  kPositions,
  kMasks,
  kQNorm,
  kKNorm,
  kSinks,
  kKScale,
  kVScale,
  kRecentPages,
  kRecentKey,
  kRecentValue,
  kCount
};

// Inputs: q [1, S, heads * D], or q, k and v concatenated, with k and v left out; k, v [1, S, kv_heads * D]. With q
// alone nothing is written: the rows are in the cache already, which another layer owns. With the attribute `causal`
// rows attend to no later ones, even if their mask has some.
// past key and value [pages, kv_heads, page rows, D] of float, half, bfloat16 (as uint16) or int8; sequences int64 [B, 3], in the
// order of their rows: rows before, rows of this pass, columns of the mask (0: causal); page tables int64
// [B, P]; cos, sin [., R / 2]; positions int64 [1, S]; masks bool, of each sequence [rows, columns] over its
// last slots, behind each other; q_norm, k_norm [D]; sinks [heads]; k_scale, v_scale [1].
// Rows of 4 bits are uint8 as `int4_rows.h` says, with D as the attribute `head_dim`; their recent ones in float16 are
// uint8 [pages, kv_heads, page rows, 2 * padded D], too, with page tables of their own.
// Outputs: y [1, S, heads * D], and if rows are written the caches, in place where they are the past's.
template <ort::ElementType kCache>
struct CachedAttention {
  static constexpr const char* kName = "CachedAttention";
  static constexpr ort::ElementType kInputs[] = {
      ort::kFloat, ort::kFloat, ort::kFloat, kCache,      kCache,      ort::kInt64, ort::kInt64, ort::kFloat,
      ort::kFloat, ort::kInt64, ort::kBool,  ort::kFloat, ort::kFloat, ort::kFloat, ort::kFloat, ort::kFloat,
      ort::kInt64, ort::kUInt8, ort::kUInt8};
  static constexpr ort::ElementType kOutputs[] = {ort::kFloat, kCache, kCache, ort::kUInt8, ort::kUInt8};
  static constexpr unsigned kNeeded = 0b1111001, kNeededOutputs = 1;

  int64_t heads, kv_heads, head_dim, window, is_interleaved, is_bidirectional, is_causal;
  float scale, softcap, epsilon;

  explicit CachedAttention(const OrtKernelInfo* info)
      : heads(ort::int_attribute(info, "num_heads", 0)),
        kv_heads(ort::int_attribute(info, "kv_num_heads", 0)),
        head_dim(ort::int_attribute(info, "head_dim", 0)),
        window(ort::int_attribute(info, "local_window_size", 0)),
        is_interleaved(ort::int_attribute(info, "rotary_interleaved", 0)),
        is_bidirectional(ort::int_attribute(info, "bidirectional", 0)),
        is_causal(ort::int_attribute(info, "causal", 0)),
        scale(ort::float_attribute(info, "scale", 0)),
        softcap(ort::float_attribute(info, "softcap", 0)),
        epsilon(ort::float_attribute(info, "epsilon", 1e-6f)) {
    require(heads > 0 && kv_heads > 0 && heads % kv_heads == 0,
            "CachedAttention: num_heads is no multiple of kv_num_heads");
    require(window >= 0, "CachedAttention: local_window_size is negative");
  }

  void run(OrtKernelContext* context) const {
    Tensor in[kCount];
    for (size_t i = 0; i < kCount; i++) in[i] = ort::input(context, i);
    Attention all{};
    read_rows(in, all);
    read_scales(in, all);
    read_rules(in, all);
    std::vector<int64_t> dims = in[kQ].dims;
    dims.back() = heads * all.shape.head_dim;
    all.y = ort::output(context, 0, dims).as<float>();
    Pass pass = cut(in, all);
    const bool writes = all.inputs.k != nullptr;
    void* const keys = writes ? copy_past(context, 1, in[kPastKey], all) : in[kPastKey].data;
    void* const values = writes ? copy_past(context, 2, in[kPastValue], all) : in[kPastValue].data;
    if (!all.shape.rows) return;
    const bool is_int4 = all.cache.type == CacheType::kInt4, writes_recent = writes && is_int4;
    void* const recent_keys = writes_recent ? copy_past(context, 3, in[kRecentKey], all) : in[kRecentKey].data;
    void* const recent_values = writes_recent ? copy_past(context, 4, in[kRecentValue], all) : in[kRecentValue].data;
    for (Pass::Part& part : pass.parts) {
      part.a.cache.keys = keys;
      part.a.cache.values = values;
      part.a.cache.recent_keys = static_cast<uint16_t*>(recent_keys);
      part.a.cache.recent_values = static_cast<uint16_t*>(recent_values);
    }
    pass.place();
    pass.each_row(context, [](const Pass::Part& part, int64_t row) { kernels().write_kv(part.a, row); });
    pass.attend(context);
    pass.each_row(context, [](const Pass::Part& part, int64_t row) {
      if (part.splits()) kernels().merge(part.a, row);
    });
  }

 private:
  void read_rows(const Tensor* in, Attention& a) const {
    Attention::Shape& shape = a.shape;
    Attention::Inputs& inputs = a.inputs;
    const std::vector<int64_t>& cache = in[kPastKey].dims;
    require(cache.size() == 4 && cache[1] == kv_heads,
            "CachedAttention: the cache is not [pages, kv_num_heads, page rows, D]");
    require(in[kPastValue].dims == cache, "CachedAttention: the caches of keys and values differ in shape");
    shape.heads = heads;
    shape.kv_heads = kv_heads;
    a.cache.page_rows = cache[2];
    a.cache.type = kCache == ort::kFloat  ? CacheType::kFloat32
                   : kCache == ort::kHalf ? CacheType::kFloat16
                   : kCache == ort::kInt8 ? CacheType::kInt8
                   : kCache == ort::kUInt16 ? CacheType::kBFloat16
                                            : CacheType::kInt4;
    shape.head_dim = a.cache.type == CacheType::kInt4 ? head_dim : cache[3];
    require(a.row_elements() == cache[3], "CachedAttention: head_dim does not fit the rows of 4 bits");
    if (a.cache.type == CacheType::kInt4) {
      const std::vector<int64_t>& recent = in[kRecentKey].dims;
      require(recent.size() == 4 && recent[1] == kv_heads && recent[2] == cache[2] && recent[3] == 2 * a.padded_dim() &&
                  in[kRecentValue].dims == recent && in[kRecentPages],
              "CachedAttention: a cache of 4 bits needs the recent rows in float16");
    }
    require(a.cache.page_rows > 0 && a.cache.page_rows % kStrip == 0 && kChunk % a.cache.page_rows == 0,
            "CachedAttention: pages of this size are not known");
    require(shape.head_dim > 0 && shape.head_dim <= 512,
            "CachedAttention: heads of more than 512 values are not known");
    const int64_t width = heads * shape.head_dim, kv_width = kv_heads * shape.head_dim;
    require(in[kQ].dims.size() == 3 && in[kQ].dims[0] == 1, "CachedAttention: q is not [1, S, width]");
    shape.rows = in[kQ].dims[1];
    inputs.q = in[kQ].as<float>();
    inputs.q_stride = in[kQ].last();
    if (in[kK] && in[kV]) {
      require(inputs.q_stride == width && in[kK].count() == shape.rows * kv_width &&
                  in[kV].count() == shape.rows * kv_width,
              "CachedAttention: q, k and v do not fit the heads");
      inputs.k = in[kK].as<float>();
      inputs.v = in[kV].as<float>();
      inputs.k_stride = inputs.v_stride = kv_width;
      return;
    }
    require(!in[kK] && !in[kV], "CachedAttention: q, k and v do not fit the heads");
    if (inputs.q_stride == width) return;
    require(inputs.q_stride == width + 2 * kv_width, "CachedAttention: q, k and v do not fit the heads");
    inputs.k = inputs.q + width;
    inputs.v = inputs.k + kv_width;
    inputs.k_stride = inputs.v_stride = inputs.q_stride;
  }

  void read_scales(const Tensor* in, Attention& a) const {
    Attention::Cache& cache = a.cache;
    cache.k_scale = cache.v_scale = 1;
    if (cache.type != CacheType::kInt8) return;
    const Tensor &k = in[kKScale], &v = in[kVScale];
    require(k.count() == 1 && k.data && v.count() == 1 && v.data,
            "CachedAttention: a cache of int8 needs k_scale and v_scale");
    cache.k_scale = *k.as<float>();
    cache.v_scale = *v.as<float>();
    require(cache.k_scale > 0 && cache.v_scale > 0, "CachedAttention: scales of the cache must be positive");
  }

  void read_rules(const Tensor* in, Attention& a) const {
    Attention::Inputs& inputs = a.inputs;
    a.rules = {window, scale > 0 ? scale : 1 / std::sqrt(float(a.shape.head_dim)), softcap, epsilon,
               is_interleaved != 0, is_bidirectional != 0, is_causal != 0};
    const Tensor &cos = in[kCos], &sin = in[kSin], &positions = in[kPositions];
    if (cos || sin) {
      require(cos.dims.size() == 2 && cos.dims == sin.dims && 2 * cos.last() <= a.shape.head_dim,
              "CachedAttention: cos and sin do not fit the heads");
      inputs.cos = cos.as<float>();
      inputs.sin = sin.as<float>();
      inputs.rotary_dim = 2 * cos.last();
      inputs.table_rows = cos.dims[0];
      inputs.positions = positions.as<int64_t>();
      require(positions ? positions.count() == a.shape.rows : inputs.table_rows >= a.shape.rows,
              "CachedAttention: rows and positions differ in number");
      for (int64_t row = 0; inputs.positions && row < a.shape.rows; row++)
        require(inputs.positions[row] >= 0 && inputs.positions[row] < inputs.table_rows,
                "CachedAttention: a position is outside of the rope tables");
    }
    inputs.mask = in[kMasks].as<uint8_t>();
    require((!in[kQNorm] || in[kQNorm].count() == a.shape.head_dim) &&
                (!in[kKNorm] || in[kKNorm].count() == a.shape.head_dim),
            "CachedAttention: q_norm and k_norm do not fit the heads");
    inputs.q_norm = in[kQNorm].as<float>();
    inputs.k_norm = in[kKNorm].as<float>();
    require(!in[kSinks] || in[kSinks].count() == heads, "CachedAttention: there is not one sink for each head");
    inputs.sinks = in[kSinks].as<float>();
  }

  // Splits `all` into the attention of each sequence.
  Pass cut(const Tensor* in, const Attention& all) const {
    const Tensor &facts = in[kSequences], &tables = in[kPages], &recent = in[kRecentPages];
    require(facts.dims.size() == 2 && facts.last() == kFacts, "CachedAttention: sequences are not [B, 3]");
    require(tables.dims.size() == 2 && tables.dims[0] == facts.dims[0],
            "CachedAttention: there is not one page table for each sequence");
    const bool is_int4 = all.cache.type == CacheType::kInt4;
    require(!is_int4 || recent.dims == tables.dims, "CachedAttention: page tables differ in shape");
    Pass pass;
    int64_t masked = 0;
    for (int64_t i = 0; i < facts.dims[0]; i++) {
      const int64_t* fact = facts.as<int64_t>() + i * kFacts;
      Attention a = all;
      Attention::Shape& shape = a.shape;
      shape.write_index = fact[0];
      shape.rows = fact[1];
      shape.mask_columns = fact[2];
      a.cache.pages = tables.as<int64_t>() + i * tables.last();
      if (is_int4) a.cache.recent_pages = recent.as<int64_t>() + i * recent.last();
      require(shape.rows >= 0 && shape.rows <= all.shape.rows - pass.rows,
              "CachedAttention: sequences and rows differ in number");
      require(shape.write_index >= 0 && shape.write_index <= tables.last() * a.cache.page_rows - shape.rows,
              "CachedAttention: the new rows do not fit into the pages");
      const bool has_mask = shape.mask_columns != 0;
      require(!has_mask || !is_bidirectional, "CachedAttention: bidirectional attention takes no mask");
      require(!has_mask || (shape.mask_columns >= shape.rows && shape.mask_columns <= a.end_slot()),
              "CachedAttention: a mask is not of the last slots of its sequence");
      const int64_t size = shape.rows * shape.mask_columns;
      require(size <= in[kMasks].count() * bool(in[kMasks]) - masked,
              "CachedAttention: sequences have more masks than are given");
      if (!shape.rows) continue;
      a.inputs.mask = has_mask ? all.inputs.mask + masked : nullptr;
      masked += size;
      take_rows(a, pass.rows);
      require_pages(a, a.cache.pages, a.first_slot(), in[kPastKey].dims[0]);
      if (is_int4) require_pages(a, a.cache.recent_pages, a.first_in(kRecent), in[kRecentKey].dims[0]);
      pass.add(a);
    }
    require(pass.rows == all.shape.rows, "CachedAttention: sequences and rows differ in number");
    return pass;
  }

  static void take_rows(Attention& a, int64_t first) {
    Attention::Inputs& inputs = a.inputs;
    inputs.q += first * inputs.q_stride;
    if (inputs.k) {
      inputs.k += first * inputs.k_stride;
      inputs.v += first * inputs.v_stride;
    }
    a.y += first * a.shape.heads * a.shape.head_dim;
    if (inputs.positions) {
      inputs.positions += first;
    } else if (inputs.cos) {
      inputs.cos += first * inputs.rotary_dim / 2;
      inputs.sin += first * inputs.rotary_dim / 2;
    }
  }

  static void require_pages(const Attention& a, const int64_t* pages, int64_t first_slot, int64_t count) {
    for (int64_t page = first_slot / a.cache.page_rows; page * a.cache.page_rows < a.end_slot(); page++)
      require(pages[page] >= 0 && pages[page] < count, "CachedAttention: a page is outside of the cache");
  }

  // The cache that is written: a copy of the past, if it is not the past itself.
  static void* copy_past(OrtKernelContext* context, size_t index, const Tensor& past, const Attention& a) {
    const Tensor present = ort::output(context, index, past.dims);
    require(present.data || !past.count(), "CachedAttention: the caches are written, but no outputs");
    const int64_t size = kCache == ort::kFloat ? 4 : kCache == ort::kHalf || kCache == ort::kUInt16 ? 2 : 1;
    if (present.data != past.data) std::memcpy(present.data, past.data, past.count() * size);
    return present.data;
  }
};

}  // namespace

Operators attention_operators() {
  return {ort::describe<CachedAttention<ort::kFloat>>(), ort::describe<CachedAttention<ort::kHalf>>(),
          ort::describe<CachedAttention<ort::kInt8>>(), ort::describe<CachedAttention<ort::kUInt16>>(),
          ort::describe<CachedAttention<ort::kUInt8>>()};
}

}  // namespace edgellm

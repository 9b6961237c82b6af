// Every instruction set of this processor against the scalar reference, bit for bit.
// For processors that are emulated, and for the compilers' sanitizers; exits with 1 at a difference.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "kernels.h"

using namespace edgellm;

namespace {

using Sets = std::vector<const Kernels*>;  // the last one is the scalar reference, computed once for all
using Faults = std::vector<int>;           // of each set

std::mt19937 generator(1);

float uniform() { return std::uniform_real_distribution<float>(-1, 1)(generator); }
int64_t below(int64_t count) { return int64_t(generator() % uint32_t(count)); }

std::vector<float> floats(int64_t count) {
  std::vector<float> out(count);
  for (float& x : out) x = 3 * uniform();
  return out;
}

struct Shape {
  int64_t K, N, block, rows;
  bool zero, gated, scaled;  // scaled: scales are quantized
  int terms;
};

Shape random_shape(Form form, int trial) {
  const bool quantized = takes_codes(form);
  const bool many = trial == 0 && quantized;  // more than a panel
  const bool always_scaled = form == Form::kInt3 || form == Form::kInt6;
  const bool can_be_scaled = form == Form::kInt2 || form == Form::kInt4 || form == Form::kInt5;
  Shape s{};
  s.gated = trial % 5 == 4;
  s.scaled = always_scaled || (can_be_scaled && trial % 3 == 1);
  s.K = s.scaled ? kSpan * (1 + below(3)) : many ? 600 : 1 + below(300);
  s.N = s.gated ? 64 : many ? 40 : 1 + below(100);
  s.rows = many ? 1000 : 1 + below(trial % 3 ? 10 : 60);
  s.block = s.scaled ? (form == Form::kInt4 || form == Form::kInt5 ? 32 : 16) : quantized ? 16 << below(4) : 1;
  if (form == Form::kFp4) s.block = 16 << below(2);
  if (form == Form::kInt5 && !s.scaled) s.block = 32 << below(3);
  if (form == Form::kFp8) s.block = 1 + below(s.K);
  const bool can_have_zero = form == Form::kInt4 || form == Form::kInt5 || form == Form::kInt8;
  s.zero = s.scaled ? !always_scaled : can_have_zero && trial % 2;
  s.terms = form == Form::kInt8 && trial % 3 ? 2 : 1;
  return s;
}

// Random codes, and in the places of halves random halves near 1.
std::vector<uint8_t> random_weight(Form form, const Shape& s) {
  Weight w{form, s.zero, s.gated, s.scaled, s.terms, s.K, s.N, s.block, 1, nullptr};
  Header h{{'e', 'd', 'g', 'e', 'l', 'l', 'm', 'W'},
           2,
           uint32_t(form),
           uint32_t(s.K),
           uint32_t(s.N),
           uint32_t(s.block),
           s.zero,
           s.gated,
           0.5f,
           uint64_t(sizeof(Header) + w.groups() * w.group_bytes()),
           uint32_t(s.terms),
           s.scaled,
           {}};
  std::vector<uint8_t> out(h.bytes);
  std::memcpy(out.data(), &h, sizeof h);
  for (size_t at = sizeof h; at < out.size(); at += w.record_bytes())
    for (int64_t i = 0; i < w.record_bytes(); i++) {
      const bool is_half =
          i >= w.halves_at() || form == Form::kFloat16 || form == Form::kBFloat16 || form == Form::kFloat32;
      const int odd = form == Form::kFloat32 ? 3 : 1;  // where exponents stand
      out[at + i] = is_half && i % (odd + 1) == odd ? uint8_t(0x38 + below(8) + 128 * below(2)) : uint8_t(generator());
    }
  return out;
}

std::vector<float> multiply(const Kernels& set, const Weight& w, const std::vector<float>& x,
                            const std::vector<float>& gamma) {
  const int64_t rows = int64_t(x.size()) / w.in_features;
  std::vector<float> y(rows * w.outputs());
  std::vector<char> memory(rows_bytes(w, rows) + 64);
  char* aligned = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64);
  const Rows placed = place_rows(w, rows, aligned);
  set.prepare({&w, x.data(), nullptr, gamma.data(), 1e-5f, nullptr, placed}, 0, rows);
  set.product({&w, placed, rows, nullptr, nullptr, y.data()}, 0, w.groups());
  return y;
}

bool equal(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && !std::memcmp(a.data(), b.data(), a.size() * sizeof(float));
}

void test_products(const Sets& sets, Faults& faults) {
  for (const Form form :
       {Form::kInt4, Form::kInt8, Form::kFp4, Form::kFloat16, Form::kBFloat16, Form::kFp8, Form::kFloat32, Form::kInt2,
        Form::kInt3, Form::kInt5, Form::kInt6})
    for (int trial = 0; trial < 24; trial++) {
      const Shape s = random_shape(form, trial);
      const std::vector<uint8_t> packed = random_weight(form, s);
      Weight w;
      if (const char* fault = read_weight(packed.data(), packed.size(), &w)) {
        std::printf("%s\n", fault);
        faults.back()++;
        return;
      }
      const std::vector<float> x = floats(s.rows * s.K), gamma = floats(s.K);
      const std::vector<float> expected = multiply(*sets.back(), w, x, gamma);
      for (size_t i = 0; i + 1 < sets.size(); i++) {
        if (equal(multiply(*sets[i], w, x, gamma), expected)) continue;
        std::printf("%s: form %d, K %d, N %d, block %d, rows %d\n", sets[i]->name, int(form), int(s.K), int(s.N),
                    int(s.block), int(s.rows));
        faults[i]++;
      }
    }
}

std::vector<float> attend(const Kernels& set, Attention a, std::vector<uint8_t> keys, std::vector<uint8_t> values,
                          bool is_split) {
  std::vector<float> y(a.shape.rows * a.shape.heads * a.shape.head_dim),
      queries(a.shape.rows * a.shape.heads * a.query_floats());
  std::vector<float> partials(a.chunks() * a.shape.rows * a.shape.heads * a.partial_floats());
  std::vector<int32_t> seen(kSeen * a.shape.rows), slots(a.shape.rows * a.shape.mask_columns);
  std::vector<float> work(a.work_floats(a.shape.rows));
  a.y = y.data();
  a.scratch.queries = queries.data();
  a.scratch.partials = partials.data();
  a.scratch.seen = seen.data();
  a.scratch.slots = slots.data();
  a.cache.keys = keys.data();
  a.cache.values = values.data();
  std::vector<uint16_t> recent(2 * keys.size() / a.row_elements() * a.padded_dim() * (a.cache.type == CacheType::kInt4));
  for (size_t i = 0; i < recent.size(); i++) recent[i] = uint16_t(0x3800 + i * 37 % 1024);
  a.cache.recent_pages = a.cache.pages;
  a.cache.recent_keys = recent.data();
  a.cache.recent_values = recent.data() + recent.size() / 2;
  for (int64_t row = 0; row < a.shape.rows; row++) set.write_kv(a, row);
  for (int64_t head = 0; head < a.shape.kv_heads; head++) {
    for (int64_t chunk = 0; is_split && chunk < a.chunks(); chunk++) set.attend_chunk(a, head, chunk, work.data());
    if (!is_split) set.attend_rows(a, head, 0, a.shape.rows, work.data());
  }
  for (int64_t row = 0; is_split && row < a.shape.rows; row++) set.merge(a, row);
  y.insert(y.end(), queries.begin(), queries.end());
  y.resize(y.size() + keys.size() / 4);
  std::memcpy(y.data() + y.size() - keys.size() / 4, keys.data(), keys.size() / 4 * 4);
  return y;
}

void test_attention(const Sets& sets, Faults& faults) {
  for (int trial = 0; trial < 80; trial++) {
    Attention a{};
    a.shape.rows = 1 + below(trial % 4 ? 6 : 30);
    a.shape.kv_heads = 1 + below(2);
    a.shape.heads = a.shape.kv_heads * (1 + below(5));
    a.shape.head_dim = 8 * (1 + below(9 + trial % 2 * 8));
    a.shape.write_index = below(trial % 3 ? 40 : 600);
    a.cache.page_rows = kStrip << below(5);
    a.inputs.rotary_dim = a.shape.head_dim / 2;
    a.inputs.table_rows = a.shape.rows;
    a.rules.is_interleaved = trial % 2;
    a.rules.window = trial % 5 ? 0 : 1 + below(100);
    a.rules.scale = 0.2f;
    a.rules.softcap = trial % 7 ? 0 : 3;
    a.rules.epsilon = 1e-6f;
    a.cache.k_scale = 0.02f;
    a.cache.v_scale = 0.03f;
    a.cache.type = CacheType(below(5));
    const std::vector<float> q = floats(a.shape.rows * a.shape.heads * a.shape.head_dim),
                             k = floats(a.shape.rows * a.shape.kv_heads * a.shape.head_dim), v = floats(k.size()),
                             tables = floats(a.shape.rows * a.inputs.rotary_dim), norm = floats(a.shape.head_dim),
                             sinks = floats(a.shape.heads);
    a.inputs.q = q.data();
    a.inputs.k = k.data();
    a.inputs.v = v.data();
    a.inputs.q_stride = a.shape.heads * a.shape.head_dim;
    a.inputs.k_stride = a.inputs.v_stride = a.shape.kv_heads * a.shape.head_dim;
    a.inputs.cos = tables.data();
    a.inputs.sin = tables.data() + tables.size() / 2;
    a.inputs.q_norm = a.inputs.k_norm = trial % 3 ? nullptr : norm.data();
    a.inputs.sinks = trial % 4 ? nullptr : sinks.data();
    std::vector<uint8_t> mask(a.shape.rows * a.shape.rows);
    for (int64_t i = 0; i < a.shape.rows * a.shape.rows; i++)
      mask[i] = i % a.shape.rows <= i / a.shape.rows && below(3);
    a.inputs.mask = trial % 2 ? mask.data() : nullptr;
    a.shape.mask_columns = a.inputs.mask ? a.shape.rows : 0;
    const bool is_half = a.cache.type == CacheType::kFloat16 || a.cache.type == CacheType::kBFloat16;
    const int64_t size = a.cache.type == CacheType::kFloat32 ? 4 : is_half ? 2 : 1;
    std::vector<int64_t> pages((a.shape.write_index + a.shape.rows + a.cache.page_rows - 1) / a.cache.page_rows);
    for (size_t i = 0; i < pages.size(); i++) pages[i] = i;
    std::shuffle(pages.begin(), pages.end(), generator);
    a.cache.pages = pages.data();
    std::vector<uint8_t> cache(pages.size() * a.cache.page_rows * a.shape.kv_heads * a.row_elements() * size);
    for (size_t i = 0; i < cache.size(); i++)
      cache[i] = a.cache.type == CacheType::kInt4 ? uint8_t(below(0x38))  // scales below 1/2
                 : size == 1 || i % size < size_t(size - 1) ? uint8_t(generator()) : uint8_t(0x38 + below(8));
    const std::vector<float> expected = attend(*sets.back(), a, cache, cache, true);
    for (size_t i = 0; i < sets.size(); i++)
      for (const bool is_split : {true, false}) {
        if (is_split && i + 1 == sets.size()) continue;  // the reference itself
        if (equal(attend(*sets[i], a, cache, cache, is_split), expected)) continue;
        std::printf("%s: attention of trial %d differs\n", sets[i]->name, trial);
        faults[i]++;
      }
  }
}

void test_max_and_logsumexp(const Sets& sets, Faults& faults) {
  for (const int64_t count : {1, 16, 31, 1000, 1024}) {
    const std::vector<float> x = floats(count);
    const SegmentMax expected = sets.back()->max_and_logsumexp(x.data(), count, true);
    for (size_t i = 0; i + 1 < sets.size(); i++) {
      const SegmentMax found = sets[i]->max_and_logsumexp(x.data(), count, true);
      faults[i] += found.max != expected.max || found.sum_exp != expected.sum_exp;
    }
  }
}

void test_delta_rule(const Sets& sets, Faults& faults) {
  for (int trial = 0; trial < 20; trial++) {
    const int64_t keys = 1 + below(70), values = 1 + below(70);
    const std::vector<float> from = floats(keys * values), q = floats(keys), k = floats(keys), v = floats(values),
                             g = floats(keys);
    const bool by_channel = trial % 2, in_place = trial % 3 == 0;
    std::vector<float> expected;
    for (size_t i = sets.size(); i-- > 0;) {  // the reference first
      std::vector<float> found(2 * keys + 2 * values), to = from;
      float *decays = found.data(), *decayed = decays + keys, *delta = decayed + keys;
      sets[i]->delta_decays(g.data(), k.data(), keys, decays, decayed);
      DeltaRow row{keys, values, in_place ? to.data() : from.data(), to.data(), q.data(), k.data(), v.data()};
      row.decays = by_channel ? decays : nullptr;
      row.decay = by_channel ? 1 : decays[0];
      row.rate = 0.5f;
      row.delta = delta;
      row.y = delta + values;
      DeltaRow recalled = row;
      if (by_channel) recalled.k = decayed;
      sets[i]->delta_recall(recalled);
      sets[i]->delta_update(row);
      found.insert(found.end(), to.begin(), to.end());
      if (expected.empty()) expected = found;
      if (std::memcmp(expected.data(), found.data(), found.size() * sizeof(float))) {
        std::printf("%s: the delta rule of trial %d differs\n", sets[i]->name, trial);
        faults[i]++;
      }
    }
  }
}

}  // namespace

int main() {
  int count;
  const Kernels* const* available = available_kernels(&count);
  const Sets sets(available, available + count);
  Faults faults(sets.size());
  test_products(sets, faults);
  test_attention(sets, faults);
  test_max_and_logsumexp(sets, faults);
  test_delta_rule(sets, faults);
  for (size_t i = 0; i < sets.size(); i++) std::printf("%s: %d faults\n", sets[i]->name, faults[i]);
  return std::count(faults.begin(), faults.end(), 0) != count;
}

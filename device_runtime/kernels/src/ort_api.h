// The part of ONNX Runtime's C interface that custom operators need, by its published layout: a
// table of functions and a table of callbacks, both of which only ever grow at their ends.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

namespace edgellm::ort {

constexpr uint32_t kVersion = 17;  // of the table; 1.17 is the first that has all of it

struct Status;
struct Value;
struct Info;
struct Context;
struct Shape;
struct Domain;
struct Options;

enum Type { kUndefined = 0, kFloat = 1, kUInt8 = 2, kInt8 = 3, kInt64 = 7, kBool = 9, kHalf = 10 };
enum Slot {
  kCreateStatus = 0,
  kGetErrorMessage = 2,
  kCreateDomain = 26,
  kAddOperator = 27,
  kAddDomain = 28,
  kGetData = 51,
  kGetElementType = 60,
  kGetRank = 61,
  kGetDimensions = 62,
  kGetShape = 65,
  kGetFloat = 85,
  kGetInt = 86,
  kGetInputCount = 88,
  kGetOutputCount = 89,
  kGetInput = 90,
  kGetOutput = 91,
  kReleaseStatus = 93,
  kReleaseShape = 99,
  kGetConstant = 249,
  kParallelFor = 274,
};

struct ApiBase {
  const void* const* (*get_api)(uint32_t version);
  const char* (*get_version)();
};

extern const void* const* table;

template <class Result, class... Arguments>
Result raw(Slot slot, Arguments... arguments) {
  return reinterpret_cast<Result (*)(Arguments...)>(const_cast<void*>(table[slot]))(arguments...);
}

// What becomes an error of the session.
struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline void require(bool holds, const char* fault) {
  if (!holds) throw Fault(fault);
}

template <class... Arguments>
void call(Slot slot, Arguments... arguments) {
  Status* status = raw<Status*>(slot, arguments...);
  if (!status) return;
  const std::string text = raw<const char*>(kGetErrorMessage, static_cast<const Status*>(status));
  raw<void>(kReleaseStatus, status);
  throw Fault(text);
}

// Runs what must not throw into ONNX Runtime.
template <class Function>
Status* guarded(Function function) {
  constexpr int kFail = 1, kInvalidArgument = 2;
  try {
    function();
    return nullptr;
  } catch (const Fault& fault) {
    return raw<Status*>(kCreateStatus, kInvalidArgument, fault.what());
  } catch (const std::exception& error) {
    return raw<Status*>(kCreateStatus, kFail, error.what());
  }
}

template <class T>
T attribute(const Info* info, Slot slot, const char* name, T missing) {
  T found = missing;
  Status* status = raw<Status*>(slot, info, name, &found);
  if (!status) return found;
  raw<void>(kReleaseStatus, status);
  return missing;
}
inline int64_t int_attribute(const Info* info, const char* name, int64_t missing) {
  return attribute(info, kGetInt, name, missing);
}
inline float float_attribute(const Info* info, const char* name, float missing) {
  return attribute(info, kGetFloat, name, missing);
}

struct Tensor {
  void* data = nullptr;
  int type = kUndefined;
  std::vector<int64_t> dims;

  explicit operator bool() const { return data || !dims.empty(); }
  int64_t count(size_t first = 0, size_t behind = 0) const {
    int64_t product = 1;
    for (size_t i = first; i + behind < dims.size(); i++) product *= dims[i];
    return product;
  }
  int64_t last() const { return dims.empty() ? 1 : dims.back(); }
  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
};

inline Tensor read(const Value* value) {
  Tensor tensor;
  if (!value) return tensor;
  Shape* shape = nullptr;
  call(kGetShape, value, &shape);
  size_t rank = 0;
  call(kGetRank, static_cast<const Shape*>(shape), &rank);
  tensor.dims.resize(rank);
  call(kGetDimensions, static_cast<const Shape*>(shape), tensor.dims.data(), rank);
  call(kGetElementType, static_cast<const Shape*>(shape), &tensor.type);
  raw<void>(kReleaseShape, shape);
  call(kGetData, const_cast<Value*>(value), &tensor.data);
  return tensor;
}

inline Tensor input(const Context* context, size_t index) {
  size_t count = 0;
  call(kGetInputCount, context, &count);
  if (index >= count) return {};
  const Value* value = nullptr;
  call(kGetInput, context, index, &value);
  return read(value);
}

// Empty if the output is unused.
inline Tensor output(Context* context, size_t index, const std::vector<int64_t>& dims) {
  size_t count = 0;
  call(kGetOutputCount, static_cast<const Context*>(context), &count);
  Value* value = nullptr;
  if (index < count) call(kGetOutput, context, index, dims.data(), dims.size(), &value);
  return read(value);
}

// function(i) for i below `count`, on the session's threads.
template <class Function>
void parallel(const Context* context, int64_t count, const Function& function) {
  if (count == 1) return function(0);
  void (*step)(void*, size_t) = [](void* data, size_t i) { (*static_cast<const Function*>(data))(int64_t(i)); };
  call(kParallelFor, context, step, size_t(count), size_t(0), const_cast<void*>(static_cast<const void*>(&function)));
}

// Memory of a thread for the length of one call; `kUse`: of calls within calls.
template <int kUse = 0>
void* scratch(size_t bytes) {
  thread_local std::unique_ptr<void, decltype(&std::free)> memory(nullptr, &std::free);
  thread_local size_t size = 0;
  if (bytes > size) {
    size = 0;
    memory.reset(std::aligned_alloc(64, (bytes + 63) & ~size_t(63)));
    if (!memory) throw std::bad_alloc();
    size = bytes;
  }
  return memory.get();
}

// Callbacks of an operator, as ONNX Runtime declares them.
struct Operator {
  uint32_t version;
  void* (*create)(const Operator*, const void* const*, const Info*);
  const char* (*name)(const Operator*);
  const char* (*provider)(const Operator*);
  int (*input_type)(const Operator*, size_t);
  size_t (*input_count)(const Operator*);
  int (*output_type)(const Operator*, size_t);
  size_t (*output_count)(const Operator*);
  void (*compute)(void*, Context*);
  void (*destroy)(void*);
  int (*input_kind)(const Operator*, size_t);
  int (*output_kind)(const Operator*, size_t);
  int (*input_memory)(const Operator*, size_t);
  int (*variadic[4])(const Operator*);
  Status* (*try_create)(const Operator*, const void* const*, const Info*, void**);
  Status* (*try_compute)(void*, Context*);
  Status* (*infer_shapes)(const Operator*, void*);
  int (*first_version)(const Operator*);
  int (*last_version)(const Operator*);
};

// `Kernel` has a name, types of inputs and outputs of which the first few must be there, a
// constructor from Info, and `run`.
template <class Kernel>
const Operator* describe() {
  static const Operator described = [] {
    Operator o{};
    o.version = kVersion;
    o.name = [](const Operator*) { return Kernel::kName; };
    o.provider = [](const Operator*) -> const char* { return nullptr; };
    o.input_type = [](const Operator*, size_t i) -> int { return Kernel::kInputs[i]; };
    o.input_count = [](const Operator*) { return sizeof Kernel::kInputs / sizeof Kernel::kInputs[0]; };
    o.output_type = [](const Operator*, size_t i) -> int { return Kernel::kOutputs[i]; };
    o.output_count = [](const Operator*) { return sizeof Kernel::kOutputs / sizeof Kernel::kOutputs[0]; };
    o.destroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
    o.input_kind = [](const Operator*, size_t i) { return int(!(Kernel::kNeeded >> i & 1)); };
    o.output_kind = [](const Operator*, size_t i) { return int(i >= Kernel::kNeededOutputs); };
    o.input_memory = [](const Operator*, size_t) { return 0; };
    for (auto& none : o.variadic) none = [](const Operator*) { return 1; };
    o.try_create = [](const Operator*, const void* const*, const Info* info, void** kernel) {
      return guarded([&] { *kernel = new Kernel(info); });
    };
    o.try_compute = [](void* kernel, Context* context) {
      return guarded([&] { static_cast<Kernel*>(kernel)->run(context); });
    };
    o.first_version = [](const Operator*) { return 1; };
    o.last_version = [](const Operator*) { return 1 << 30; };
    return o;
  }();
  return &described;
}

}  // namespace edgellm::ort

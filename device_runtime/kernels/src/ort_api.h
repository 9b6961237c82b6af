// A thin C++ layer over ONNX Runtime's C API for custom operators: errors are exceptions, tensors are values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <iterator>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "third_party/onnxruntime/onnxruntime_c_api.h"  // last: it defines macros

namespace edgellm::ort {

// The functions of version ORT_API_VERSION. ONNX Runtime only appends to the structures of its C API, so all newer
// versions provide them.
inline const OrtApi* api = nullptr;  // set by RegisterCustomOps

using ElementType = ONNXTensorElementDataType;
constexpr ElementType kUndefined = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
constexpr ElementType kFloat = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
constexpr ElementType kUInt8 = ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8;
constexpr ElementType kUInt16 = ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT16;
constexpr ElementType kInt8 = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8;
constexpr ElementType kInt64 = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;
constexpr ElementType kBool = ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL;
constexpr ElementType kHalf = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16;

// An invalid input or a failed call; the session reports its message.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline void require(bool holds, const char* message) {
  if (!holds) throw Error(message);
}

[[noreturn]] __attribute__((noinline, cold)) inline void fail(OrtStatus* status) {
  const std::string message = api->GetErrorMessage(status);
  api->ReleaseStatus(status);
  throw Error(message);
}

// Throws the error of a call.
inline void check(OrtStatus* status) {
  if (status) fail(status);
}

// Runs a function for ONNX Runtime, into which exceptions must not propagate.
template <class Function>
OrtStatus* guarded(Function function) {
  try {
    function();
    return nullptr;
  } catch (const Error& error) {
    return api->CreateStatus(ORT_INVALID_ARGUMENT, error.what());
  } catch (const std::exception& error) {
    return api->CreateStatus(ORT_FAIL, error.what());
  }
}

// An attribute of a node, or its default if the node lacks it.
template <class T, class Get>
T attribute(Get get, const OrtKernelInfo* info, const char* name, T missing) {
  T found = missing;
  OrtStatus* status = get(info, name, &found);
  if (!status) return found;
  api->ReleaseStatus(status);
  return missing;
}
inline int64_t int_attribute(const OrtKernelInfo* info, const char* name, int64_t missing) {
  return attribute(api->KernelInfoGetAttribute_int64, info, name, missing);
}
inline float float_attribute(const OrtKernelInfo* info, const char* name, float missing) {
  return attribute(api->KernelInfoGetAttribute_float, info, name, missing);
}

struct Tensor {
  void* data = nullptr;
  ElementType type = kUndefined;
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

inline Tensor read(const OrtValue* value) {
  Tensor tensor;
  if (!value) return tensor;
  OrtTensorTypeAndShapeInfo* shape = nullptr;
  check(api->GetTensorTypeAndShape(value, &shape));
  const std::unique_ptr<OrtTensorTypeAndShapeInfo, decltype(api->ReleaseTensorTypeAndShapeInfo)> owner(
      shape, api->ReleaseTensorTypeAndShapeInfo);
  size_t rank = 0;
  check(api->GetDimensionsCount(shape, &rank));
  tensor.dims.resize(rank);
  check(api->GetDimensions(shape, tensor.dims.data(), rank));
  check(api->GetTensorElementType(shape, &tensor.type));
  check(api->GetTensorMutableData(const_cast<OrtValue*>(value), &tensor.data));
  return tensor;
}

// Empty if the input is absent.
inline Tensor input(const OrtKernelContext* context, size_t index) {
  size_t count = 0;
  check(api->KernelContext_GetInputCount(context, &count));
  if (index >= count) return {};
  const OrtValue* value = nullptr;
  check(api->KernelContext_GetInput(context, index, &value));
  return read(value);
}

// Empty if the output is unused.
inline Tensor output(OrtKernelContext* context, size_t index, const std::vector<int64_t>& dims) {
  size_t count = 0;
  check(api->KernelContext_GetOutputCount(context, &count));
  OrtValue* value = nullptr;
  if (index < count) check(api->KernelContext_GetOutput(context, index, dims.data(), dims.size(), &value));
  return read(value);
}

// An input that was known when the graph was opened; empty if it was not.
inline Tensor constant_input(const OrtKernelInfo* info, size_t index) {
  int is_constant = 0;
  const OrtValue* value = nullptr;
  check(api->KernelInfoGetConstantInput_tensor(info, index, &is_constant, &value));
  return is_constant ? read(value) : Tensor{};
}

// Calls function(i) for i below `count` on the session's threads.
template <class Function>
void parallel(const OrtKernelContext* context, int64_t count, const Function& function) {
  if (count == 1) return function(0);
  void (*step)(void*, size_t) = [](void* data, size_t i) { (*static_cast<const Function*>(data))(int64_t(i)); };
  void* data = const_cast<void*>(static_cast<const void*>(&function));
  check(api->KernelContext_ParallelFor(context, step, size_t(count), 0, data));
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

// The operator of a class. `Kernel` has a name, element types of inputs and outputs, a bit for each required input,
// the number of required outputs, a constructor from OrtKernelInfo, and `run`.
template <class Kernel>
const OrtCustomOp* describe() {
  static const OrtCustomOp described = [] {
    OrtCustomOp op{};
    op.version = ORT_API_VERSION;
    op.GetName = [](const OrtCustomOp*) { return Kernel::kName; };
    op.GetExecutionProviderType = [](const OrtCustomOp*) -> const char* { return nullptr; };
    op.GetInputType = [](const OrtCustomOp*, size_t i) { return Kernel::kInputs[i]; };
    op.GetInputTypeCount = [](const OrtCustomOp*) { return std::size(Kernel::kInputs); };
    op.GetOutputType = [](const OrtCustomOp*, size_t i) { return Kernel::kOutputs[i]; };
    op.GetOutputTypeCount = [](const OrtCustomOp*) { return std::size(Kernel::kOutputs); };
    op.KernelDestroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
    op.GetInputCharacteristic = [](const OrtCustomOp*, size_t i) {
      return Kernel::kNeeded >> i & 1 ? INPUT_OUTPUT_REQUIRED : INPUT_OUTPUT_OPTIONAL;
    };
    op.GetOutputCharacteristic = [](const OrtCustomOp*, size_t i) {
      return i < Kernel::kNeededOutputs ? INPUT_OUTPUT_REQUIRED : INPUT_OUTPUT_OPTIONAL;
    };
    op.GetInputMemoryType = [](const OrtCustomOp*, size_t) { return OrtMemTypeDefault; };
    // ONNX Runtime calls these of every operator, also of those without variadic inputs and outputs.
    op.GetVariadicInputMinArity = op.GetVariadicInputHomogeneity = [](const OrtCustomOp*) { return 1; };
    op.GetVariadicOutputMinArity = op.GetVariadicOutputHomogeneity = op.GetVariadicInputMinArity;
    op.CreateKernelV2 = [](const OrtCustomOp*, const OrtApi*, const OrtKernelInfo* info, void** kernel) {
      return guarded([&] { *kernel = new Kernel(info); });
    };
    op.KernelComputeV2 = [](void* kernel, OrtKernelContext* context) {
      return guarded([&] { static_cast<Kernel*>(kernel)->run(context); });
    };
    op.GetStartVersion = [](const OrtCustomOp*) { return 1; };
    op.GetEndVersion = [](const OrtCustomOp*) { return 1 << 30; };
    return op;
  }();
  return &described;
}

}  // namespace edgellm::ort

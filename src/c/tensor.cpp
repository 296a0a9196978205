#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "src/c/arguments.h"
#include "src/c/handles.h"

#include <c10/core/GradMode.h>
#include <c10/util/StringUtil.h>
#include <c10/util/safe_numerics.h>
#include <torch/types.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <string>

// Tensors for callers that have no binding of LibTorch.

using semitone::Error;
using namespace semitone::c;  // NOLINT(google-build-using-namespace)

namespace semitone::c {
namespace {

constexpr std::array kDtypes{at::kByte, at::kChar,  at::kShort,  at::kInt,  at::kLong,
                             at::kHalf, at::kFloat, at::kDouble, at::kBool, at::kBFloat16};
static_assert(static_cast<int>(at::kByte) == SEMITONE_UINT8);
static_assert(static_cast<int>(at::kChar) == SEMITONE_INT8);
static_assert(static_cast<int>(at::kShort) == SEMITONE_INT16);
static_assert(static_cast<int>(at::kInt) == SEMITONE_INT32);
static_assert(static_cast<int>(at::kLong) == SEMITONE_INT64);
static_assert(static_cast<int>(at::kHalf) == SEMITONE_FLOAT16);
static_assert(static_cast<int>(at::kFloat) == SEMITONE_FLOAT32);
static_assert(static_cast<int>(at::kDouble) == SEMITONE_FLOAT64);
static_assert(static_cast<int>(at::kBool) == SEMITONE_BOOL);
static_assert(static_cast<int>(at::kBFloat16) == SEMITONE_BFLOAT16);

at::ScalarType element_type(int32_t number, const char* function) {
  const auto* const found = std::find_if(kDtypes.begin(), kDtypes.end(), [&](at::ScalarType type) {
    return static_cast<int32_t>(type) == number;
  });
  if (found == kDtypes.end())
    throw Error(function, "a dtype, SEMITONE_FLOAT32 …", "the number " + std::to_string(number));
  return *found;
}

std::uint64_t bytes_of(at::IntArrayRef shape, at::ScalarType type, const char* function) {
  std::uint64_t bytes = c10::elementSize(type);
  for (const int64_t size : shape) {
    if (size < 0) throw Error(function, "sizes of at least 0", std::to_string(size));
    if (c10::mul_overflows(bytes, static_cast<std::uint64_t>(size), &bytes))
      throw Error(function, "fewer than 2^64 bytes", c10::str("the sizes ", shape));
  }
  return bytes;
}

Error wrong_bytes(std::uint64_t needed, at::ScalarType type, size_t bytes, const char* function) {
  return {function,
          c10::str(needed, " bytes for ", needed / c10::elementSize(type), " elements of ",
                   semitone::dtype_name(type)),
          std::to_string(bytes)};
}

}  // namespace
}  // namespace semitone::c

SemitoneStatus semitone_tensor_create(const void* data, size_t bytes, int32_t dtype,
                                      const int64_t* sizes, size_t dims, SemitoneTensor** tensor) {
  return run(__func__, [&](const char* function) {
    require_pointer(tensor, "pointer for the tensor", function);
    if (dims > 0) require_pointer(sizes, "list of sizes", function);
    const at::ScalarType type = element_type(dtype, function);
    const at::IntArrayRef shape(sizes, dims);
    const std::uint64_t needed = bytes_of(shape, type, function);
    if (data == nullptr) {
      if (bytes != 0) require_pointer(data, "pointer to the elements", function);
    } else if (bytes != needed) {
      throw wrong_bytes(needed, type, bytes, function);
    }
    at::Tensor made = torch::zeros(shape, type);
    if (bytes > 0) std::memcpy(made.data_ptr(), data, bytes);
    *tensor = new_tensor(std::move(made));
  });
}

SemitoneStatus semitone_tensor_destroy(SemitoneTensor* tensor) {
  return run(__func__, [&](const char*) { delete reinterpret_cast<at::Tensor*>(tensor); });
}

SemitoneStatus semitone_tensor_dtype(const SemitoneTensor* tensor, int32_t* dtype) {
  return run(__func__, [&](const char* function) {
    require_pointer(dtype, "pointer for the dtype", function);
    *dtype = static_cast<int32_t>(tensor_of(tensor, function).scalar_type());
  });
}

SemitoneStatus semitone_tensor_sizes(const SemitoneTensor* tensor, int64_t* sizes, size_t capacity,
                                     size_t* dims) {
  return run(__func__, [&](const char* function) {
    require_pointer(dims, "pointer for the number of dimensions", function);
    const at::IntArrayRef found = tensor_of(tensor, function).sizes();
    if (capacity > 0) {
      require_pointer(sizes, "list for the sizes", function);
      if (found.size() > capacity) {
        throw Error(function, "space for " + std::to_string(found.size()) + " sizes",
                    "a capacity of " + std::to_string(capacity));
      }
      std::copy(found.begin(), found.end(), sizes);
    }
    *dims = found.size();
  });
}

SemitoneStatus semitone_tensor_read(const SemitoneTensor* tensor, void* data, size_t bytes) {
  return run(__func__, [&](const char* function) {
    const at::Tensor& source = tensor_of(tensor, function);
    element_type(static_cast<int32_t>(source.scalar_type()), function);
    if (source.nbytes() != bytes)
      throw wrong_bytes(source.nbytes(), source.scalar_type(), bytes, function);
    if (bytes == 0) return;
    require_pointer(data, "pointer for the elements", function);
    const at::Tensor dense = source.detach().resolve_neg().to(at::kCPU).contiguous();
    std::memcpy(data, dense.const_data_ptr(), bytes);
  });
}

SemitoneStatus semitone_tensor_set_requires_grad(SemitoneTensor* tensor, int32_t requires_grad) {
  return run(__func__, [&](const char* function) {
    tensor_of(tensor, function).set_requires_grad(requires_grad != 0);
  });
}

SemitoneStatus semitone_tensor_grad(const SemitoneTensor* tensor, SemitoneTensor** grad) {
  return run(__func__, [&](const char* function) {
    require_pointer(grad, "pointer for the gradient", function);
    const at::Tensor& found = tensor_of(tensor, function).grad();
    *grad = found.defined() ? new_tensor(found) : nullptr;
  });
}

SemitoneStatus semitone_tensor_set_grad(SemitoneTensor* tensor, const SemitoneTensor* grad) {
  return run(__func__, [&](const char* function) {
    at::Tensor& target = tensor_of(tensor, function);
    if (grad == nullptr) {
      target.mutable_grad() = at::Tensor();
      return;
    }
    const at::Tensor& value = tensor_of(grad, function);
    if (value.is_same(target)) {
      throw Error(function, "a gradient that is another tensor", "the tensor itself",
                  "pass a copy (detach and clone)");
    }
    if (value.sizes() != target.sizes() || value.scalar_type() != target.scalar_type() ||
        value.device() != target.device()) {
      throw Error(
          function, "a gradient of the tensor's sizes, dtype and device",
          c10::str(value.toString(), value.sizes(), " for ", target.toString(), target.sizes()));
    }
    target.mutable_grad() = value;
  });
}

SemitoneStatus semitone_tensor_backward(const SemitoneTensor* tensor) {
  return run(__func__, [&](const char* function) { tensor_of(tensor, function).backward(); });
}

SemitoneStatus semitone_set_grad_enabled(int32_t enabled, int32_t* before) {
  return run(__func__, [&](const char*) {
    if (before != nullptr) *before = c10::GradMode::is_enabled() ? 1 : 0;
    c10::GradMode::set_enabled(enabled != 0);
  });
}

#pragma once

#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/util/ArrayRef.h>

#include <cstddef>
#include <cstdint>

// What all that watches the operators of a thread has in common.
namespace semitone::report {

// As long as an object exists, LibTorch calls start() before and end() after each operator and each
// node of the graph of this thread, and of the threads that work for it. Neither may throw: LibTorch
// would swallow it. Objects with the same functions nest, with one call for all of them. End it on
// the same thread; elsewhere the calls go on.
class OperatorCallbacks {
 public:
  using Start = at::RecordFunctionCallback::StartCallback;
  using End = at::RecordFunctionCallback::EndCallback;

  OperatorCallbacks(Start start, End end);
  ~OperatorCallbacks();
  OperatorCallbacks(const OperatorCallbacks&) = delete;
  OperatorCallbacks& operator=(const OperatorCallbacks&) = delete;

  // Leaves this thread's records as they are, when it is not the one that began.
  void abandon() { abandoned_ = true; }

 private:
  Start start_;
  bool abandoned_ = false;
};

// Calls visit(tensor, index in a list or -1) for the tensors of an argument or a result.
template <typename Visit>
void for_tensors(const c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    visit(value.toTensor(), -1);
  } else if (value.isTensorList()) {
    std::int64_t index = 0;
    for (const at::Tensor& tensor : value.toTensorVector()) visit(tensor, index++);
  } else if (value.isOptionalTensorList()) {
    std::int64_t index = 0;
    for (const auto& tensor : value.toOptionalTensorVector())
      visit(tensor.value_or(at::Tensor()), index++);
  }
}

// The last values of a stack, which in the JIT has more than one operator's.
template <typename Values>
c10::ArrayRef<c10::IValue> last(const Values& values, std::size_t count) {
  const c10::ArrayRef<c10::IValue> all(values.data(), values.size());
  return all.size() <= count ? all : all.slice(all.size() - count, count);
}

}  // namespace semitone::report

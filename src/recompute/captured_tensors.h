#pragma once

#include "src/core/autograd_node.h"

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

// The tensors that a function reads without getting them as inputs.
namespace semitone::nn {

class RngStates;

// A tensor as it was when this object was made.
class SeenTensor {
 public:
  explicit SeenTensor(const at::Tensor& tensor);

  // The tensor, if it has been written to. Nothing if it does not exist any more: then it cannot
  // have another value for anyone.
  std::optional<at::Tensor> changed() const;
  bool exists() const { return !tensor_.expired(); }

 private:
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> tensor_;
  std::int64_t version_;
  std::uint64_t fingerprint_;
};

// Looks at LibTorch's operators and Semitone's kernels on this thread while it exists. A tensor that
// one of them gets, and that neither is an input of the function nor the result of an operator, is a
// captured one.
class CapturedTensors {
 public:
  // @param known   inputs of the function, and buffers that it may change
  // @param random  the generators that are looked at; may be null. It must outlive this object.
  CapturedTensors(const std::vector<at::Tensor>& known, const RngStates* random);
  ~CapturedTensors();
  CapturedTensors(const CapturedTensors&) = delete;
  CapturedTensors& operator=(const CapturedTensors&) = delete;

  // Those that the function has not changed itself.
  std::vector<SeenTensor> unchanged() const;
  // One that it has changed.
  std::optional<at::Tensor> changed() const;
  // The nodes in the autograd graph of those that are views.
  const std::vector<NodePtr>& nodes_of_views() const { return nodes_of_views_; }
  // Whether an operator or a kernel has drawn random numbers.
  bool draws() const { return draws_; }

 private:
  static std::unique_ptr<at::ObserverContext> start(const at::RecordFunction& record);
  static void end(const at::RecordFunction& record, at::ObserverContext* context);
  static void read_by_kernel(const at::Tensor& tensor);
  static void drawn_by_kernel();
  void see_argument(const at::Tensor& tensor);
  void see_result(const at::Tensor& tensor);

  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

  CapturedTensors* outer_;                                   // of a call around this one
  at::CallbackHandle handle_ = at::INVALID_CALLBACK_HANDLE;  // the outermost has one for all
  std::vector<NodePtr> nodes_of_views_;
  const RngStates* random_;
  bool draws_ = false;
  // By address. A weak reference keeps an address from being used again.
  std::unordered_map<const c10::TensorImpl*, SeenTensor> captured_;
  std::unordered_map<const c10::TensorImpl*, WeakTensor> known_;
};

}  // namespace semitone::nn

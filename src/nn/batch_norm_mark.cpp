#include "src/nn/batch_norm_mark.h"

#include <torch/csrc/autograd/cpp_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <functional>
#include <utility>

namespace semitone::nn {
namespace {

using Hook = torch::autograd::hooks_list::value_type;

// The mark's entry, or null.
Hook* find(const at::Tensor& tensor) {
  if (!tensor.defined()) return nullptr;
  const auto* meta = torch::autograd::impl::get_autograd_meta(tensor);
  if (meta == nullptr || meta->cpp_hooks_list_ == nullptr) return nullptr;
  for (Hook& hook : *meta->cpp_hooks_list_) {
    if (hook.target<BatchNormMark>() != nullptr) return &hook;
  }
  return nullptr;
}

}  // namespace

void set_batch_norm_mark(const at::Tensor& tensor, BatchNormMark mark) {
  if (Hook* hook = find(tensor)) {
    *hook = std::move(mark);
    return;
  }
  // Not Tensor::register_hook, which refuses tensors that need no gradient.
  auto* meta = torch::autograd::impl::materialize_autograd_meta(tensor);
  if (meta->cpp_hooks_list_ == nullptr) torch::autograd::impl::create_cpp_hook(tensor);
  meta->cpp_hooks_list_->emplace_back(std::move(mark));
}

void remove_batch_norm_mark(const at::Tensor& tensor) {
  // Leaves an empty entry, as Tensor::remove_hook does, so that the others keep their numbers.
  if (Hook* hook = find(tensor)) *hook = nullptr;
}

const BatchNormMark* batch_norm_mark(const at::Tensor& tensor) {
  const Hook* hook = find(tensor);
  return hook == nullptr ? nullptr : hook->target<BatchNormMark>();
}

}  // namespace semitone::nn

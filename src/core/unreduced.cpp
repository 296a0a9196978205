#include "src/core/unreduced.h"

#include <torch/csrc/autograd/cpp_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

namespace semitone {
namespace {

using Hook = torch::autograd::hooks_list::value_type;

// An entry in a tensor's list of hooks, which are never called for a gradient that needs no
// gradient. It stays when the mark is cleared, for the next mark: each step would add another entry.
struct Unreduced {
  UnreducedMark mark;
  at::TensorBase operator()(const at::TensorBase& gradient) const { return gradient; }
};

// The mark's entry, or null.
Hook* find(const at::Tensor& gradient) {
  if (!gradient.defined()) return nullptr;
  const auto* meta = torch::autograd::impl::get_autograd_meta(gradient);
  if (meta == nullptr || meta->cpp_hooks_list_ == nullptr) return nullptr;
  for (Hook& hook : *meta->cpp_hooks_list_) {
    if (hook.target<Unreduced>() != nullptr) return &hook;
  }
  return nullptr;
}

}  // namespace

void mark_unreduced(const at::Tensor& gradient, UnreducedMark mark) {
  if (!gradient.defined() || mark == nullptr) return;
  if (Hook* const hook = find(gradient)) {
    hook->target<Unreduced>()->mark = std::move(mark);
    return;
  }
  auto* meta = torch::autograd::impl::materialize_autograd_meta(gradient);
  if (meta->cpp_hooks_list_ == nullptr) torch::autograd::impl::create_cpp_hook(gradient);
  meta->cpp_hooks_list_->emplace_back(Unreduced{std::move(mark)});
}

void clear_unreduced(const at::Tensor& gradient) {
  if (Hook* const hook = find(gradient)) hook->target<Unreduced>()->mark = nullptr;
}

UnreducedMark unreduced_mark(const at::Tensor& gradient) {
  Hook* const hook = find(gradient);
  return hook == nullptr ? nullptr : hook->target<Unreduced>()->mark;
}

}  // namespace semitone

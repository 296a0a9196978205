#include "src/scaling/unscaled_gradients.h"

#include "src/scaling/step_watch.h"

#include <torch/csrc/autograd/engine.h>

namespace semitone::amp {

UnscaledGradients::UnscaledGradients(const UnscaledGradients& other)
    : std::enable_shared_from_this<UnscaledGradients>(other) {
  const std::lock_guard lock(other.mutex_);
  entries_ = other.entries_;
  backwards_ = other.backwards_;
}

UnscaledGradients::Entry UnscaledGradients::entry_of(const at::Tensor& parameter) {
  const at::Tensor& grad = parameter.grad();
  return {Weak(parameter.getIntrusivePtr()), grad.defined() ? grad.unsafeGetTensorImpl() : nullptr,
          grad.defined() ? version_of(grad) : 0};
}

void UnscaledGradients::note(const at::Tensor& parameter) {
  if (!parameter.grad().defined()) return;
  const std::lock_guard lock(mutex_);
  entries_.insert_or_assign(parameter.unsafeGetTensorImpl(), entry_of(parameter));
}

bool UnscaledGradients::has(const at::Tensor& parameter) const {
  const std::lock_guard lock(mutex_);
  return entries_.contains(parameter.unsafeGetTensorImpl());
}

void UnscaledGradients::clear() {
  const std::lock_guard lock(mutex_);
  entries_.clear();
}

std::int64_t UnscaledGradients::backwards() const {
  const std::lock_guard lock(mutex_);
  return backwards_;
}

void UnscaledGradients::begin_backward() {
  const std::lock_guard lock(mutex_);
  if (!under_way_.expired()) return;
  const auto pass = std::make_shared<const int>(0);
  under_way_ = pass;
  ++backwards_;
  for (auto& [identity, entry] : entries_) {
    if (const auto parameter = entry.parameter.lock(); parameter.defined())
      entry = entry_of(at::Tensor(parameter));
  }
  torch::autograd::Engine::get_default_engine().queue_callback(
      [self = shared_from_this(), pass] { self->end_backward(); });
}

// What the pass has changed is scaled.
void UnscaledGradients::end_backward() {
  const std::lock_guard lock(mutex_);
  under_way_.reset();
  std::erase_if(entries_, [](const auto& item) {
    const auto parameter = item.second.parameter.lock();
    if (!parameter.defined()) return true;
    const Entry now = entry_of(at::Tensor(parameter));
    return now.grad != item.second.grad || now.version != item.second.version;
  });
}

}  // namespace semitone::amp

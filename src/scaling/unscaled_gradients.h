#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>

namespace semitone::amp {

// Which parameters have gradients that were unscaled, for optimizers that share some. Programs may
// change or replace such gradients; a backward pass of a scaled loss makes them scaled again. The
// losses share this object with their scaler, since they tell it when their backward passes begin:
// in the thread of the device.
class UnscaledGradients : public std::enable_shared_from_this<UnscaledGradients> {
 public:
  UnscaledGradients() = default;
  // Losses that exist stay with the original.
  UnscaledGradients(const UnscaledGradients& other);
  UnscaledGradients& operator=(const UnscaledGradients&) = delete;
  ~UnscaledGradients() = default;

  // The parameter's gradient, if it has one, is unscaled from now on.
  void note(const at::Tensor& parameter);
  bool has(const at::Tensor& parameter) const;
  void clear();

  // The number of backward passes that have begun.
  std::int64_t backwards() const;
  // To be called inside a backward pass of a scaled loss, before it reaches a parameter.
  void begin_backward();

 private:
  using Weak = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  // A gradient as it was before a backward pass.
  struct Entry {
    Weak parameter;
    const c10::TensorImpl* grad = nullptr;
    std::uint32_t version = 0;
  };

  void end_backward();
  static Entry entry_of(const at::Tensor& parameter);

  mutable std::mutex mutex_;
  std::unordered_map<const c10::TensorImpl*, Entry> entries_;  // by parameter
  std::int64_t backwards_ = 0;
  // Expires with the backward pass under way: callbacks own it. Of several losses in one pass, the
  // hook of the last may run after gradients have changed.
  std::weak_ptr<const int> under_way_;
};

}  // namespace semitone::amp

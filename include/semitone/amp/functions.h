#pragma once

#include "semitone/amp/autocast.h"
#include "semitone/amp/cast_policy.h"
#include "semitone/amp/cast_tree.h"

#include <torch/csrc/autograd/custom_function.h>

#include <optional>
#include <string_view>
#include <utility>

/// Functions and autograd nodes of your own under autocast.
///
/// An operator that is registered with LibTorch (TORCH_LIBRARY) needs only a row in the policy:
/// policy.lower("mylib::my_op"). A plain function is wrapped; a torch::autograd::Function uses
/// CustomForward and CustomBackward.
namespace semitone::amp {

namespace detail {

/// Casts one argument as the region of its device says; outside a region it stays as it is.
at::Tensor cast_to_lower(const at::Tensor& tensor);
at::Tensor cast_to_fp32(const at::Tensor& tensor);
c10::IValue cast_to_lower(const c10::IValue& value);
c10::IValue cast_to_fp32(const c10::IValue& value);
/// The dtype for promoting: fp32 if a tensor seen is fp32, or fp16 and bf16 were both seen.
class Widest {
 public:
  at::Tensor operator()(const at::Tensor& tensor);
  c10::IValue operator()(const c10::IValue& value);
  at::Tensor cast(const at::Tensor& tensor) const;
  c10::IValue cast(const c10::IValue& value) const;

 private:
  std::optional<c10::ScalarType> widest_;
};
bool in_any_region();

}  // namespace detail

/// A callable that casts its tensor arguments (nested ones too) to the region's 16-bit dtype and
/// runs f with casts off, as if f were one operator of the policy's `lower` rows. Outside a region
/// it calls f as it is.
template <typename Function>
auto half_function(Function f) {
  return [f = std::move(f)](auto&&... arguments) {
    if (!detail::in_any_region()) return f(std::forward<decltype(arguments)>(arguments)...);
    const auto cast = [](const auto& value) { return detail::cast_to_lower(value); };
    const DisableCasts no_casts;
    return f(map_tensors(arguments, cast)...);
  };
}

/// The same to fp32: for code that needs the range or the precision.
template <typename Function>
auto float_function(Function f) {
  return [f = std::move(f)](auto&&... arguments) {
    if (!detail::in_any_region()) return f(std::forward<decltype(arguments)>(arguments)...);
    const auto cast = [](const auto& value) { return detail::cast_to_fp32(value); };
    const DisableCasts no_casts;
    return f(map_tensors(arguments, cast)...);
  };
}

/// The same to the widest dtype among the arguments.
template <typename Function>
auto promote_function(Function f) {
  return [f = std::move(f)](auto&&... arguments) {
    if (!detail::in_any_region()) return f(std::forward<decltype(arguments)>(arguments)...);
    detail::Widest widest;
    const auto look = [&widest](const auto& value) { return widest(value); };
    (map_tensors(arguments, look), ...);
    const auto cast = [&widest](const auto& value) { return widest.cast(value); };
    const DisableCasts no_casts;
    return f(map_tensors(arguments, cast)...);
  };
}

/// Apex's names. For an operator registered with LibTorch: a row in a policy. For a callable: a
/// wrapped callable — in C++ a function cannot be replaced behind its callers' backs, so call the
/// wrapped one.
inline CastPolicy& register_half_function(CastPolicy& policy, std::string_view op) {
  return policy.lower(op);
}
inline CastPolicy& register_float_function(CastPolicy& policy, std::string_view op) {
  return policy.keep_fp32(op);
}
inline CastPolicy& register_promote_function(CastPolicy& policy, std::string_view op) {
  return policy.widest(op);
}
template <typename Function>
auto register_half_function(Function f) {
  return half_function(std::move(f));
}
template <typename Function>
auto register_float_function(Function f) {
  return float_function(std::move(f));
}
template <typename Function>
auto register_promote_function(Function f) {
  return promote_function(std::move(f));
}

/// The job of torch.amp.custom_fwd, at the top of a custom autograd function's forward:
///
///     static torch::Tensor forward(torch::autograd::AutogradContext* ctx, torch::Tensor x,
///     torch::Tensor w) {
///       const amp::CustomForward scope(ctx, torch::kFloat);   // or without a dtype: run as the
///       caller's region says x = scope.cast(x); w = scope.cast(w); …
///     }
///
/// Remembers the regions for CustomBackward. With a dtype: inside a region, cast() casts to it and
/// casts are off until the end of the scope; outside a region both do nothing.
class [[nodiscard]] CustomForward {
 public:
  explicit CustomForward(torch::autograd::AutogradContext* ctx,
                         std::optional<c10::ScalarType> cast_inputs = std::nullopt);

  /// A tensor, or tensors in containers, in cast_inputs' dtype.
  template <typename T>
  auto cast(const T& value) const {
    return map_tensors(value, [this](const auto& leaf) {
      return active_.has_value() ? cast_floating(leaf, *active_) : leaf;
    });
  }

 private:
  std::optional<c10::ScalarType> active_;
  std::optional<DisableCasts> no_casts_;
};

/// The job of torch.amp.custom_bwd, at the top of the backward: runs it in the regions of the
/// forward.
class [[nodiscard]] CustomBackward {
 public:
  explicit CustomBackward(torch::autograd::AutogradContext* ctx);

 private:
  AutocastState::Scope scope_;
};

}  // namespace semitone::amp

#pragma once

#include "semitone/amp/autocast.h"
#include "semitone/amp/cast_policy.h"
#include "semitone/amp/cast_tree.h"

#include <torch/csrc/autograd/custom_function.h>

#include <functional>
#include <optional>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

/// Functions and autograd nodes of your own under autocast.
///
/// An operator that is registered with LibTorch (TORCH_LIBRARY) needs only a row in the policy:
/// policy.lower("mylib::my_op"). A plain function is wrapped; a torch::autograd::Function uses
/// CustomForward and CustomBackward.
namespace semitone::amp {

namespace detail {

/// Casts one argument as the region of its device says, weights through the region's cache; outside
/// a region it stays as it is.
at::Tensor cast_to_lower(const at::Tensor& tensor);
at::Tensor cast_to_fp32(const at::Tensor& tensor);

/// The dtype for promoting: fp32 if a tensor seen is fp32, or fp16 and bf16 were both seen.
class Widest {
 public:
  at::Tensor look(const at::Tensor& tensor);
  at::Tensor cast(const at::Tensor& tensor) const;

 private:
  std::optional<c10::ScalarType> widest_;
};

bool in_any_region();

/// An argument with its tensors replaced; one that can hold none is passed on as it came.
template <typename T, typename Transform>
decltype(auto) with_tensors(T&& argument, const Transform& transform) {
  if constexpr (HoldsTensors<std::remove_cvref_t<T>>::value) {
    return map_tensors(argument, transform);
  } else {
    return std::forward<T>(argument);
  }
}

/// Casts the arguments, which takes the region, then calls f with casts off.
template <typename Function, typename Cast, typename... Arguments>
auto call_casted(const Function& f, const Cast& cast, Arguments&&... arguments) {
  std::tuple<decltype(with_tensors(std::forward<Arguments>(arguments), cast))...> casted(
      with_tensors(std::forward<Arguments>(arguments), cast)...);
  const DisableCasts no_casts;
  return std::apply(f, std::move(casted));
}

}  // namespace detail

/// A callable that casts its tensor arguments (nested ones too) to the region's 16-bit dtype and
/// runs f with casts off, as if f were one operator of the policy's `lower` rows. Outside a region
/// it calls f as it is. f takes tensors by value or const reference; other arguments are passed on
/// as they come.
template <typename Function>
auto half_function(Function f) {
  return [f = std::move(f)](auto&&... arguments) {
    if (!detail::in_any_region())
      return std::invoke(f, std::forward<decltype(arguments)>(arguments)...);
    return detail::call_casted(f, detail::cast_to_lower,
                               std::forward<decltype(arguments)>(arguments)...);
  };
}

/// The same to fp32: for code that needs the range or the precision.
template <typename Function>
auto float_function(Function f) {
  return [f = std::move(f)](auto&&... arguments) {
    if (!detail::in_any_region())
      return std::invoke(f, std::forward<decltype(arguments)>(arguments)...);
    return detail::call_casted(f, detail::cast_to_fp32,
                               std::forward<decltype(arguments)>(arguments)...);
  };
}

/// The same to the widest dtype among the arguments: fp32 if one is fp32, or if fp16 meets bf16.
template <typename Function>
auto promote_function(Function f) {
  return [f = std::move(f)](auto&&... arguments) {
    if (!detail::in_any_region())
      return std::invoke(f, std::forward<decltype(arguments)>(arguments)...);
    detail::Widest widest;
    const auto look = [&widest](const at::Tensor& tensor) { return widest.look(tensor); };
    (static_cast<void>(detail::with_tensors(arguments, look)), ...);
    const auto cast = [&widest](const at::Tensor& tensor) { return widest.cast(tensor); };
    return detail::call_casted(f, cast, std::forward<decltype(arguments)>(arguments)...);
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
///     static torch::Tensor forward(torch::autograd::AutogradContext* ctx, torch::Tensor x) {
///       const amp::CustomForward scope(ctx, torch::kFloat);  // no dtype: as the region says
///       x = scope.cast(x);
///       …
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
    return map_tensors(value, [this](const at::Tensor& tensor) {
      return active_.has_value() ? cast_floating(tensor, *active_) : tensor;
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

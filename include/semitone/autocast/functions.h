#pragma once

#include "semitone/autocast/autocast.h"
#include "semitone/autocast/cast_policy.h"
#include "semitone/autocast/cast_tree.h"

#include <torch/csrc/autograd/custom_function.h>

#include <functional>
#include <optional>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

/// Functions and autograd nodes of your own under autocast.
///
/// An operator that is registered with LibTorch (TORCH_LIBRARY) needs only a row in the policy:
/// policy.lower("mylib::my_op"). A plain function is wrapped; a torch::autograd::Function uses
/// CustomForward and CustomBackward.
namespace semitone::amp {

namespace detail {

/// Casts a tensor to the 16-bit dtype of its device's region (cast_to_lower) or to fp32
/// (cast_to_fp32). Weights use the region's cache. Outside of regions the tensor is returned
/// unchanged.
at::Tensor cast_to_lower(const at::Tensor& tensor);
at::Tensor cast_to_fp32(const at::Tensor& tensor);

/// Returns the devices that have a region with casts on this thread.
std::vector<c10::DeviceType> devices_with_casts();

/// Returns an argument with its tensors replaced. Arguments that cannot hold tensors are passed
/// through.
template <typename T, typename Transform>
decltype(auto) with_tensors(T&& argument, const Transform& transform) {
  if constexpr (semitone::detail::holding<std::remove_cvref_t<T>>() !=
                semitone::detail::Holding::none) {
    return map_tensors(argument, transform);
  } else {
    return std::forward<T>(argument);
  }
}

/// Casts to 16 bits, or to fp32 if one of the arguments of its constructor is a parameter that the
/// region's policy keeps in fp32.
class CastToLower {
 public:
  template <typename... Arguments>
  explicit CastToLower(const Arguments&... arguments) {
    const auto see = [this](const at::Tensor& tensor) { return look(tensor); };
    (static_cast<void>(with_tensors(arguments, see)), ...);
  }
  at::Tensor operator()(const at::Tensor& tensor) const {
    return has_kept_ ? cast_to_fp32(tensor) : cast_to_lower(tensor);
  }

 private:
  at::Tensor look(const at::Tensor& tensor);

  bool has_kept_ = false;
};

/// Casts to the widest dtype of the arguments of its constructor. Nothing is cast to 16 bits.
class CastToWidest {
 public:
  template <typename... Arguments>
  explicit CastToWidest(const Arguments&... arguments) {
    const auto see = [this](const at::Tensor& tensor) { return look(tensor); };
    (static_cast<void>(with_tensors(arguments, see)), ...);
  }
  at::Tensor operator()(const at::Tensor& tensor) const;

 private:
  at::Tensor look(const at::Tensor& tensor);

  std::optional<c10::ScalarType> widest_;
};

/// Turns casts off and keeps Emulation on, for code that receives 16-bit tensors.
struct EmulationOnly {
  AutocastState::Scope scope = AutocastState::current().without_casts().enter();
};

/// Returns f with its tensor arguments cast by the result of make_cast(arguments...). Inside f a
/// NoCasts object turns casts off. Outside of regions f is called unchanged.
template <typename NoCasts, typename Function, typename MakeCast>
auto casting(Function f, MakeCast make_cast) {
  return [f = std::move(f), make_cast = std::move(make_cast)](auto&&... arguments) {
    if (devices_with_casts().empty())
      return std::invoke(f, std::forward<decltype(arguments)>(arguments)...);
    const auto cast = make_cast(arguments...);
    std::tuple<decltype(with_tensors(std::forward<decltype(arguments)>(arguments), cast))...>
    casted(with_tensors(std::forward<decltype(arguments)>(arguments), cast)...);
    const NoCasts no_casts;
    return std::apply(f, std::move(casted));
  };
}

}  // namespace detail

/// Returns a callable that casts its tensor arguments to the region's 16-bit dtype and runs f with
/// casts off, as if f were one operator in the policy's `lower` rows: all arguments are cast to fp32
/// if one is a parameter of keep_fp32_params(). Nested tensors are cast too (see map_tensors). 16-bit
/// matrix products inside f are computed as the policy's Emulation says. Outside of regions f is
/// called unchanged. f takes tensors by value or const reference; other arguments are passed through.
template <typename Function>
auto half_function(Function f) {
  return detail::casting<detail::EmulationOnly>(
      std::move(f), [](const auto&... arguments) { return detail::CastToLower(arguments...); });
}

/// As half_function, with a cast to fp32: for code that needs the range or the precision.
template <typename Function>
auto float_function(Function f) {
  return detail::casting<DisableCasts>(std::move(f),
                                       [](const auto&...) { return detail::cast_to_fp32; });
}

/// As half_function, with a cast to the widest dtype of the arguments: fp32 if one is fp32, or if
/// fp16 meets bf16.
template <typename Function>
auto promote_function(Function f) {
  return detail::casting<detail::EmulationOnly>(
      std::move(f), [](const auto&... arguments) { return detail::CastToWidest(arguments...); });
}

/// Apex's names. With an operator that is registered with LibTorch, they set a row of a policy.
/// With a callable, they return a wrapped callable. C++ cannot replace a function for its callers,
/// so call the wrapped one.
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

/// The counterpart of torch.amp.custom_fwd, at the top of a custom autograd function's forward:
///
///     static torch::Tensor forward(torch::autograd::AutogradContext* ctx, torch::Tensor x) {
///       const amp::CustomForward scope(ctx, torch::kFloat);
///       x = scope.cast(x);
///       …
///     }
///
/// Saves the regions for CustomBackward. With a dtype and inside a region, cast() casts tensors on
/// the region's device to that dtype, and casts are off until the end of the scope. With a 16-bit
/// dtype, matrix products are computed as the policy's Emulation says. Without a dtype, cast()
/// returns its argument, and operators run as the region says. Outside of regions cast() also
/// returns its argument.
class [[nodiscard]] CustomForward {
 public:
  explicit CustomForward(torch::autograd::AutogradContext* ctx,
                         std::optional<c10::ScalarType> cast_inputs = std::nullopt);

  /// Casts a tensor, or the tensors in containers, to cast_inputs.
  template <typename T>
  auto cast(const T& value) const {
    return map_tensors(value, [this](const at::Tensor& tensor) { return cast_tensor(tensor); });
  }

 private:
  at::Tensor cast_tensor(const at::Tensor& tensor) const;

  std::vector<c10::DeviceType> devices_;  // whose tensors are cast
  c10::ScalarType dtype_ = c10::ScalarType::Undefined;
  std::optional<DisableCasts> no_casts_;
  std::optional<detail::EmulationOnly> emulation_only_;
};

/// The counterpart of torch.amp.custom_bwd, at the top of the backward: enters the regions of the
/// forward.
class [[nodiscard]] CustomBackward {
 public:
  explicit CustomBackward(torch::autograd::AutogradContext* ctx);

 private:
  AutocastState::Scope scope_;
};

}  // namespace semitone::amp

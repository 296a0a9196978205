#pragma once

#include "semitone/core/map_tensors.h"
#include "semitone/recompute/detail/checkpointed_call.h"

#include <ATen/core/Tensor.h>
#include <torch/arg.h>

#include <cstddef>
#include <functional>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace semitone::nn {

/// Options of nn::checkpoint.
struct CheckpointOptions {
  /// Whether the function draws the same random numbers when it runs again: those of the default
  /// generators of the CPU and of the inputs' devices. The generators then continue as if it had
  /// run once. false saves copying their states, which a capture of a CUDA graph does not allow.
  TORCH_ARG(bool, preserve_rng_state) = true;
  /// Tensors that the function changes in place, such as running statistics of batch norms. They
  /// keep their values when it runs again, so that they are updated once. The buffers of a module
  /// that is the function need not be given.
  TORCH_ARG(std::vector<at::Tensor>, buffers);
};

namespace detail {

/// A module holder, or another pointer to a module.
template <typename T>
concept PointsToModule = requires(const T& pointer) { pointer->buffers(); };

template <typename Function, typename... Arguments>
auto call(Function& function, const Arguments&... arguments) {
  if constexpr (PointsToModule<Function>) {
    return function->forward(arguments...);
  } else {
    return std::invoke(function, arguments...);
  }
}

/// The tensors that map_tensors finds, in its order.
template <typename... Values>
std::vector<at::Tensor> tensors_in(const Values&... values) {
  std::vector<at::Tensor> tensors;
  const auto note = [&](const at::Tensor& tensor) {
    tensors.push_back(tensor);
    return tensor;
  };
  (static_cast<void>(map_tensors(values, note)), ...);
  return tensors;
}

/// A value with other tensors in place of its own, in the order of tensors_in.
template <typename T>
auto with_tensors(const T& value, const std::vector<at::Tensor>& tensors, std::size_t& next) {
  return map_tensors(value, [&](const at::Tensor&) { return tensors[next++]; });
}

}  // namespace detail

/// Calls a function without keeping what its backward pass needs. The backward pass runs the
/// function again instead (activation checkpointing, recomputation):
///
///     for (auto& block : blocks) x = nn::checkpoint(block, x);
///
/// Only the inputs of the function are kept. While the gradients of one call are computed, memory
/// holds what that call alone would have kept, so a network of equal blocks needs the memory of one
/// block and of all blocks' inputs. In return the forward pass is computed twice, which makes a step
/// about a third longer. Results and gradients are bit for bit those of a plain call if the function
/// is deterministic. The counterpart of torch.utils.checkpoint with use_reentrant=False, and of
/// Paddle's recompute.
///
/// @param function  a module, in a holder or shared pointer, of which it calls forward(), or anything
///                  that can be called. It is copied, and kept until the backward pass has run.
/// @param inputs    its arguments. Tensors in them, in any nesting that map_tensors knows, are
///                  kept as inputs; all else is copied. Gradients reach the inputs, and also what the
///                  function refers to: parameters and tensors that a lambda has captured.
/// @return  what the function returns: a tensor, or several in any nesting that map_tensors knows
///
/// - Both runs are in the same regions of autocast (Semitone's and LibTorch's). A run casts each
///   weight once by itself: casts made outside are not used inside.
/// - Calls may nest. Hooks on parameters run once per backward pass, so DistributedDataParallel,
///   amp::MixedPrecision and their optimizers work as without checkpoint. torch::autograd::grad,
///   retain_graph and create_graph work too.
/// - Without gradients (torch::NoGradGuard, InferenceMode) it just calls the function.
/// - A function that reads what changes meanwhile, or does something else the second time, would
///   have other gradients. The backward pass is an Error if a parameter that the function uses was
///   changed in place meanwhile, if the second run has other shapes or dtypes, or if it uses other
///   parameters or captured tensors. LibTorch raises its own error if an input was changed in place.
/// - In a result that shares its memory with an input the memory is copied.
/// - All of the function runs again, also operators after the last one that gradients need.
template <typename Function, typename... Inputs>
auto checkpoint(CheckpointOptions options, Function function, const Inputs&... inputs) {
  if (!detail::CheckpointedCall::is_needed()) return detail::call(function, inputs...);
  if constexpr (detail::PointsToModule<Function>) {
    for (const at::Tensor& buffer : function->buffers()) options.buffers().push_back(buffer);
  }
  detail::CheckpointedCall call(detail::tensors_in(inputs...), options.preserve_rng_state(),
                                options.buffers());
  auto run = [function = std::move(function),
              kept = std::tuple<semitone::detail::Mapped<Inputs>...>(
                  map_tensors(inputs, [](const at::Tensor&) { return at::Tensor(); })...)](
                 const std::vector<at::Tensor>& tensors) mutable {
    return std::apply(
        [&](const auto&... parts) {
          std::size_t next = 0;
          // Braces: in this order.
          std::tuple<std::remove_cvref_t<decltype(parts)>...> arguments{
              detail::with_tensors(parts, tensors, next)...};
          return std::apply([&](const auto&... each) { return detail::call(function, each...); },
                            arguments);
        },
        kept);
  };
  const auto result = run(call.inputs());
  const std::vector<at::Tensor> outputs = std::move(call).finish(
      detail::tensors_in(result), [run](const std::vector<at::Tensor>& tensors) mutable {
        return detail::tensors_in(run(tensors));
      });
  std::size_t next = 0;
  return detail::with_tensors(result, outputs, next);
}

/// The same with the default options.
template <typename Function, typename... Inputs>
  requires(!std::is_same_v<Function, CheckpointOptions>)
auto checkpoint(Function function, const Inputs&... inputs) {
  return checkpoint(CheckpointOptions(), std::move(function), inputs...);
}

}  // namespace semitone::nn

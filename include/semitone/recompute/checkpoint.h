#pragma once

#include "semitone/core/map_tensors.h"
#include "semitone/recompute/detail/checkpointed_call.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/arg.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/any.h>

#include <concepts>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace semitone::nn {

/// Options of nn::checkpoint.
struct CheckpointOptions {
  /// Whether the second run draws the same random numbers as the first, from the default generators
  /// of the CPU and of the inputs' devices. Afterwards the generators are as if there had been one
  /// run. false: for functions without random numbers, since others would have wrong gradients
  /// (dropout gets another mask). It saves copying the generators' states. On a device with graphs,
  /// true is an Error in a step of amp::CapturedStep.
  TORCH_ARG(bool, preserve_rng_state) = true;
  /// Tensors that the function reads and updates in place, such as running statistics of batch
  /// norms. The second run reads the values that the first one read, and changes nothing. Copies are
  /// kept of those that the first run changed, and of those of at most 65,536 elements. The others
  /// must not change before the backward pass. If the function is a module, its own buffers are
  /// added. Captured tensors that are not named here are updated by both runs; a warning says so
  /// once. Default: none.
  TORCH_ARG(std::vector<at::Tensor>, buffers);
};

namespace detail {

/// Shared pointers to modules.
template <typename T>
concept PointsToModule = requires(const T& pointer) {
  { pointer.get()->is_training() } -> std::same_as<bool>;
};

/// ModuleHolder and AnyModule.
template <typename T>
concept HoldsModule = requires(const T& holder) {
  { holder.ptr()->is_training() } -> std::same_as<bool>;
};

template <typename Function>
std::shared_ptr<torch::nn::Module> module_of(const Function& function) {
  if constexpr (HoldsModule<Function>) {
    return function.ptr();
  } else if constexpr (PointsToModule<Function>) {
    return function;
  } else {
    return nullptr;
  }
}

template <typename Function, typename... Arguments>
auto call(Function& function, const Arguments&... arguments) {
  if constexpr (std::is_same_v<Function, torch::nn::AnyModule>) {
    return function.forward(arguments...);
  } else if constexpr (HoldsModule<Function> || PointsToModule<Function>) {
    return function->forward(arguments...);
  } else {
    static_assert(
        std::is_invocable_v<Function&, const Arguments&...>,
        "nn::checkpoint: expected a module in a holder or a shared pointer, or a function "
        "that takes these arguments, tensors by value or by reference to const");
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
/// about a third longer. Results equal those of a plain call bit for bit if the function is
/// deterministic, and so do gradients. Exceptions: a tensor that is also used outside of the call
/// gets its gradient in two sums, whose rounding may differ (in 16 bits, for weights that autocast
/// casts both inside and outside); and so does a weight that is used twice inside the call, if a
/// region of LibTorch's own autocast casts it. The counterpart of torch.utils.checkpoint with
/// use_reentrant=False, and of Paddle's recompute.
///
/// @param function  a module, in a holder or shared pointer, of which it calls forward(), or anything
///                  that can be called. It is copied, and kept until the backward pass has run. What
///                  it refers to must live as long: a lambda captures by value. References to local
///                  variables ([&]) would dangle, and so would `this` of a replica of DataParallel.
/// @param options   see CheckpointOptions
/// @param inputs    its arguments. Tensors in them, in any nesting that map_tensors knows, are
///                  kept as inputs; all else is copied. Gradients reach the inputs, and also what the
///                  function refers to: parameters and tensors that a lambda has captured.
/// @return  what the function returns: a tensor, or several in any nesting that map_tensors knows
///
/// - Both runs are in the same regions of autocast (Semitone's and LibTorch's). Casts made outside
///   are not used inside. In Semitone's regions a run casts each weight once by itself. In
///   LibTorch's it casts a weight for each use, whose gradients are then added in fp32, not in 16
///   bits.
/// - All results of a call have one backward pass: passes from two of them, one after the other, need
///   retain_graph in the first.
/// - Calls may nest. Hooks on parameters run once per backward pass, so DistributedDataParallel,
///   amp::MixedPrecision and their optimizers work as without checkpoint. torch::autograd::grad,
///   retain_graph and create_graph work too. With create_graph, later passes read buffers as they are
///   then: clone() those that change and that a derivative reads. On CUDA, a function that itself
///   calls torch::autograd::grad with create_graph is an Error in the backward pass.
/// - Without gradients (torch::NoGradGuard, InferenceMode), and with forward-mode derivatives of an
///   input, it just calls the function. Those of captured tensors are an Error.
/// - The function must do the same in both runs, and must not change its inputs in place. The
///   backward pass throws Error if a parameter, captured tensor or large buffer that the function
///   uses was changed in place after the forward pass, if the module is in another mode (train or
///   eval), if the second run has other shapes or dtypes, draws other random numbers, or uses other
///   parameters or captured tensors that need a gradient (or requires_grad of one has changed).
///   LibTorch throws if an input was changed in place. A tensor without a gradient, such as a mask
///   in a member, is read anew: the program must not put another one in its place before the pass.
/// - Changes that no version counter sees (through data(), as in the step of torch::optim::SGD) go
///   unnoticed in inputs, and on a GPU everywhere. On the CPU the other tensors are compared by 32
///   of their elements, if these have 2, 4 or 8 bytes: a step that changes few elements between the
///   forward and the backward pass may go unnoticed in parameters too.
/// - No other thread may draw from the same generators while the function runs, in either pass,
///   unless preserve_rng_state is false.
/// - Tensors that leave the function in another way than as its result, such as a loss that a module
///   keeps in a member, have their gradients too, and memory for them is kept.
/// - A differentiable result that shares memory with an input, a captured tensor or another result
///   is returned as a copy.
/// - The second run executes the whole function, also operators that no gradient needs.
template <typename Function, typename... Inputs>
auto checkpoint(CheckpointOptions options, Function function, const Inputs&... inputs) {
  std::vector<at::Tensor> input_tensors = detail::tensors_in(inputs...);
  if (!detail::CheckpointedCall::is_needed(input_tensors)) return detail::call(function, inputs...);
  const auto module = detail::module_of(function);
  if (module != nullptr) {
    for (const at::Tensor& buffer : module->buffers()) options.buffers().push_back(buffer);
  }
  detail::CheckpointedCall call(std::move(input_tensors),
                                {options.preserve_rng_state(), options.buffers(), module});
  // A class may show map_tensors only its defined tensors: it shows as many of the stand-ins.
  const auto emptied = [stand_in = at::empty({0})](const at::Tensor& tensor) {
    return tensor.defined() ? stand_in : tensor;
  };
  auto kept = std::tuple<semitone::detail::Mapped<Inputs>...>(map_tensors(inputs, emptied)...);
  auto run = [function = std::move(function),
              kept = std::move(kept)](const std::vector<at::Tensor>& tensors) mutable {
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

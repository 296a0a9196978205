#pragma once

#include "semitone/core/events.h"
#include "src/autocast/compiled_policy.h"
#include "src/autocast/emulation.h"
#include "src/autocast/fast_kernels.h"
#include "src/autocast/operator_arguments.h"
#include "src/nn/plain.h"

#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <optional>
#include <span>
#include <string_view>
#include <utility>

namespace semitone::amp {

constexpr c10::DispatchKeySet below(c10::DispatchKey key) {
  return {c10::DispatchKeySet::FULL_AFTER, key};
}

// The kernels that can compute an operator, once CastKernel (cast_kernel.h) has chosen the dtypes:
//
// - LibTorch's kernel,
// - Semitone's in its place, where a policy takes fast kernels and the arguments allow it,
// - LibTorch's in fp32, where there is no 16-bit kernel, or a wrong one (goes_through_fp32),
// - the stock kernel: the one that LibTorch, or the operator's library, has on the Autocast key.
class ComputeKernels {
 public:
  using Arguments = std::span<c10::IValue>;
  using Stack = torch::jit::Stack;

  ComputeKernels(const c10::OperatorHandle& op, std::string_view name, c10::DeviceType device,
                 c10::DispatchKey key);

  bool has_stock() const { return stock_.has_value(); }
  void run_stock(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) const {
    if (stock_.has_value()) {
      stock_->callBoxed(op, keys, stack);
    } else {
      op.redispatchBoxed(keys & below(key_), stack);
    }
  }

  // Nothing if the operator is not a matrix product.
  const std::optional<MatrixProduct>& product() const { return product_; }

  bool multiplies_sparse(Arguments arguments) const {
    return product_.has_value() && device_ == c10::DeviceType::CPU && has_sparse(arguments);
  }

  // Whether a matrix product in this 16-bit dtype is computed in fp32.
  bool goes_through_fp32(Arguments arguments, const CompiledPolicy& policy,
                         c10::ScalarType dtype) const;

  // Replaces arguments by others with the same result, if LibTorch's kernel would fail for them.
  void avoid_faults(Arguments arguments, const CompiledPolicy& policy) const;

  // Semitone's kernel if the policy takes it, else null.
  const FastKernel* fast_kernel(const CompiledPolicy& policy, OpId id) const {
    return policy.uses_fast_kernel(id) ? fast_ : nullptr;
  }

  // Replaces the arguments by the operator's result, if the kernel supports them.
  static bool run_fast(const FastKernel* fast, Arguments arguments, Stack* stack,
                       bool widen = false) {
    if (fast == nullptr || !are_plain(arguments)) return false;
    const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
    auto result = fast->run(arguments);
    if (!result.has_value()) return false;
    if (fast->widens && !widen) result = result->to(arguments[0].toTensor().scalar_type());
    torch::jit::drop(*stack, arguments.size());
    stack->emplace_back(std::move(*result));
    events::emit(events::OperatorReplaced{fast->op, "semitone"});
    return true;
  }

  // Semitone's kernel if it is given and supports the arguments, else LibTorch's. The caller has
  // excluded every Autocast key.
  void run(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack,
           Arguments arguments, const FastKernel* fast) const {
    if (!run_fast(fast, arguments, stack)) run_without_casts(op, keys, stack);
  }

  // Runs LibTorch's kernel with the arguments as they are. Autocast stays on for operators that
  // this kernel calls.
  void run_uncast(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) const {
    op.redispatchBoxed(keys & below(key_), stack);
  }

 private:
  static bool are_plain(Arguments arguments) {
    bool plain = true;
    for_each_tensor(arguments, [&](const at::Tensor& tensor) {
      plain = plain && (!tensor.defined() || nn::is_plain(tensor));
    });
    return plain;
  }

  void run_without_casts(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                         Stack* stack) const {
    op.redispatchBoxed((keys & below(key_)) - c10::autocast_dispatch_keyset, stack);
  }

  c10::DeviceType device_;
  c10::DispatchKey key_;
  std::optional<MatrixProduct> product_;
  const FastKernel* fast_;  // null: none
  std::optional<c10::SafeKernelFunction> stock_;
};

}  // namespace semitone::amp

#pragma once

#include "src/autocast/caster.h"
#include "src/autocast/compute_kernels.h"
#include "src/autocast/fp8_product.h"
#include "src/autocast/regions.h"

#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

namespace semitone::amp {

// The boxed kernel on an Autocast key: casts an operator's arguments as the thread's policy says, and
// leaves the computation to ComputeKernels.
class CastKernel final : public c10::OperatorKernel {
 public:
  using Arguments = ComputeKernels::Arguments;
  using Stack = ComputeKernels::Stack;

  CastKernel(const c10::OperatorHandle& op, OpId id, c10::DeviceType device, c10::DispatchKey key);

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) const;

  bool has_row(const CompiledPolicy& policy) const {
    return policy.action(id_).has_value() || policy.keeps_operator(id_);
  }
  bool has_fast_kernel(const CompiledPolicy& policy) const { return policy.uses_fast_kernel(id_); }

 private:
  void run(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack,
           Arguments arguments, const Regions& regions, const CompiledPolicy& policy) const;
  void run_lowered(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack,
                   Arguments arguments, const Caster& cast, c10::ScalarType dtype, bool emulated,
                   const FastKernel* fast = nullptr) const;
  // Where the policy computes this product in fp8; the result has the dtype.
  bool run_in_fp8(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack,
                  Arguments arguments, const CompiledPolicy& policy, c10::ScalarType dtype) const;
  void run_in_fp32(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack,
                   Arguments arguments, const Caster& cast, const FastKernel* fast) const;
  // This operator is not cast, but those inside it may be.
  void run_uncast(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack,
                  Arguments arguments, const Caster& cast, const CompiledPolicy& policy,
                  const FastKernel* fast) const;
  // An fp32 argument that meets 16-bit weights is cast to their dtype.
  void lower_mixed(Arguments arguments, const Caster& cast) const;
  // Whether LibTorch's own kernel must run, or that of the operator's library.
  bool belongs_to_stock(std::optional<CastAction> action, Arguments arguments,
                        const CompiledPolicy& policy) const;
  // The dtype that promote and widest choose for these arguments.
  CastAction without_promotion(CastAction action, Arguments arguments,
                               const CompiledPolicy& policy) const;
  static bool has_kept_argument(Arguments arguments, const CompiledPolicy& policy);
  void refuse_16bit(const c10::OperatorHandle& op, Arguments arguments,
                    const CompiledPolicy& policy) const;

  OpId id_;
  c10::DeviceType device_;
  std::string name_;
  bool is_aten_;
  bool is_script_cast_;
  bool is_bmm_;
  bool widens_mixed_;
  bool lacks_16bit_;
  bool is_recurrent_;
  bool follows_weights_;
  std::optional<Fp8Operator> fp8_;
  ComputeKernels compute_;
  std::optional<std::size_t> dtype_argument_;
  // Arguments that the operator writes to, although its schema does not say so.
  std::vector<std::size_t> statistics_;
};

c10::KernelFunction make_cast_kernel(const c10::OperatorHandle& op, OpId id, c10::DeviceType device,
                                     c10::DispatchKey key);

}  // namespace semitone::amp

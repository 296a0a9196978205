#include "src/autocast/compute_kernels.h"

#include "src/autocast/convolution_faults.h"

namespace semitone::amp {

ComputeKernels::ComputeKernels(const c10::OperatorHandle& op, std::string_view name,
                               c10::DeviceType device, c10::DispatchKey key)
    : device_(device), key_(key), product_(matrix_product(op)), fast_(find_fast_kernel(name)) {
  if (op.hasKernelForDispatchKey(key) && !op.isKernelFallthroughKernel(key))
    stock_ = op.getComputedKernelForDispatchKey(key);
}

bool ComputeKernels::goes_through_fp32(Arguments arguments, const CompiledPolicy& policy,
                                       c10::ScalarType dtype) const {
  if (!runs_natively(*product_, arguments, policy.native(dtype))) return true;
  if (product_->has_steps) return policy.repairs() && has_small_steps(arguments);
  if (!product_->convolves() || !policy.repairs()) return false;
  // Every convolution operator takes (input, weight, …).
  return may_be_wrong(*product_, arguments) ||
         (product_->is_convolution() && arguments[1].isTensor() &&
          convolves_wrongly(arguments[1].toTensor(), dtype));
}

void ComputeKernels::avoid_faults(Arguments arguments, const CompiledPolicy& policy) const {
  if (product_.has_value() && product_->convolves() && policy.repairs())
    amp::avoid_faults(*product_, arguments);
}

}  // namespace semitone::amp

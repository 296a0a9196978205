#include "src/autocast/compiled_policy.h"

#include "src/core/replica_parameters.h"

#include <c10/core/UndefinedTensorImpl.h>

#include <utility>

namespace semitone::amp {
namespace {

NativeKernels kernels_for(Emulation emulation, c10::DeviceType device, c10::ScalarType dtype) {
  if (emulation == Emulation::automatic) return native_kernels(device, dtype);
  const bool all = emulation == Emulation::never || device != c10::DeviceType::CPU;
  return all ? NativeKernels::all() : NativeKernels::none();
}

}  // namespace

BoundParameter::BoundParameter(const at::Tensor& parameter, bool keep)
    : impl(parameter.getIntrusivePtr()), keep_fp32(keep) {}

CompiledPolicy::CompiledPolicy(std::string name, CastTarget target, Emulation emulation,
                               bool as_libtorch)
    : name_(std::move(name)),
      target_(target),
      as_libtorch_(as_libtorch),
      repairs_(target.device == c10::DeviceType::CPU && emulation != Emulation::never),
      native_fp16_(kernels_for(emulation, target.device, at::kHalf)),
      native_bf16_(kernels_for(emulation, target.device, at::kBFloat16)) {}

std::shared_ptr<const CompiledPolicy> CompiledPolicy::without_casts() const {
  auto policy = std::make_shared<CompiledPolicy>(name_, target_, Emulation::never,
                                                 /*as_libtorch=*/false);
  policy->casts_ = false;
  policy->repairs_ = repairs_;
  policy->set_native(native_fp16_, native_bf16_);
  return policy;
}

bool CompiledPolicy::keeps_fp32(const at::Tensor& tensor) const {
  const auto kept = [this](const at::Tensor& candidate) {
    const auto found = parameters_.find(original_of(candidate));
    return found != parameters_.end() && found->second.keep_fp32;
  };
  return kept(tensor) || (tensor.is_view() && kept(at::Tensor(tensor._base())));
}

void CompiledPolicy::set_action(OpId op, CastAction action) {
  if (op >= actions_.size()) actions_.resize(op + 1);
  actions_[op] = action;
}

void CompiledPolicy::keep_operator(OpId op) {
  if (op >= kept_operators_.size()) kept_operators_.resize(op + 1);
  kept_operators_[op] = true;
}

void CompiledPolicy::use_fast_kernel(OpId op) {
  if (op >= fast_.size()) fast_.resize(op + 1);
  fast_[op] = true;
}

void CompiledPolicy::add(const BoundParameter& parameter) {
  const auto [found, added] = parameters_.emplace(parameter.impl._unsafe_get_target(), parameter);
  // A shared parameter has several names: one that matches is enough.
  if (!added) found->second.keep_fp32 = found->second.keep_fp32 || parameter.keep_fp32;
}

}  // namespace semitone::amp

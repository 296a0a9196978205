#include "src/autocast/watching_kernels.h"

#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "src/autocast/attention_scores.h"
#include "src/autocast/cast_kernel.h"
#include "src/autocast/op_names.h"

#include <ATen/Operators.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include <memory>
#include <string>
#include <utility>

namespace semitone::amp {
namespace {

class WatchingKernel : public c10::OperatorKernel {
 public:
  WatchingKernel(const c10::OperatorHandle& op, OpId id, c10::DeviceType device,
                 c10::DispatchKey key)
      : op_(op), boxed_(op, id, device, key), device_(device), key_(key) {}

 protected:
  struct InForce {
    const Regions* regions;
    const CompiledPolicy* policy;  // null: no region of ours, or one that is off
  };
  InForce in_force() const {
    const Regions* regions = Regions::current();
    const Regions::Region* region = regions == nullptr ? nullptr : regions->find(device_);
    return {regions, region == nullptr ? nullptr : region->policy.get()};
  }

  template <typename... Arguments>
  at::Tensor run_boxed(c10::DispatchKeySet keys, const Arguments&... arguments) const {
    torch::jit::Stack stack;
    torch::jit::push(stack, arguments...);
    boxed_(op_, keys, &stack);
    return std::move(stack.back()).toTensor();
  }

  c10::OperatorHandle op_;
  CastKernel boxed_;
  c10::DeviceType device_;
  c10::DispatchKey key_;
};

class ViewKernel final : public WatchingKernel {
 public:
  using WatchingKernel::WatchingKernel;

  at::Tensor operator()(c10::DispatchKeySet keys, const at::Tensor& self,
                        c10::SymIntArrayRef sizes) const {
    const auto [regions, policy] = in_force();
    if (policy != nullptr) {
      if (attention_scores::are_viewed(self, sizes)) {
        const Caster cast(*regions, *policy, "view");
        // A trace has to have the cast, and so has a forward gradient.
        if (torch::jit::tracer::isTracing() || self._fw_grad(/*level=*/0).defined()) {
          const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
          return cast.to_fp32(self).view_symint(sizes);
        }
        cast.converts_to_fp32(self);
        attention_scores::widen(self);
        return at::_ops::view::redispatch(keys & below(key_), self, sizes);
      }
      const bool may_be_fast =
          boxed_.has_fast_kernel(*policy) && self.dim() == 4 && !self.is_contiguous();
      if (may_be_fast || boxed_.has_row(*policy)) return run_boxed(keys, self, sizes);
    }
    return at::_ops::view::redispatch(keys & below(key_), self, sizes);
  }
};

// add_ and sub_: torch::optim::SGD and hand-written optimizers use them to write to weights through
// tensor.data(), without a change of the version counter.
template <typename Operator>
class WritingKernel final : public WatchingKernel {
 public:
  using WatchingKernel::WatchingKernel;

  at::Tensor& operator()(c10::DispatchKeySet keys, at::Tensor& self, const at::Tensor& other,
                         const at::Scalar& alpha) const {
    const auto [regions, policy] = in_force();
    if (policy != nullptr) {
      if (!self.requires_grad()) regions->cache->erase_memory_of(self);
      if (boxed_.has_row(*policy) || boxed_.has_fast_kernel(*policy)) {
        run_boxed(keys, self, other, alpha);
        return self;
      }
    }
    return Operator::redispatch(keys & below(key_), self, other, alpha);
  }
};

// torch::load gives each tensor the memory of what it has read, whatever its dtype is: the weights
// of O2 and O3 would be the bytes of fp32 numbers, read as 16-bit ones, until the next call of
// MixedPrecision.
class SettingKernel final : public WatchingKernel {
 public:
  using WatchingKernel::WatchingKernel;

  at::Tensor& operator()(c10::DispatchKeySet keys, at::Tensor& self,
                         const at::Tensor& source) const {
    if (in_force().policy != nullptr && self.scalar_type() != source.scalar_type()) {
      throw Error("autocast",
                  "values in " + dtype_name(self.scalar_type()) +
                      " for set_() inside a region, which torch::load calls",
                  dtype_name(source.scalar_type()),
                  "load before the region begins, or with MixedPrecision::load_model");
    }
    return at::_ops::set__source_Tensor::redispatch(keys & below(key_), self, source);
  }
};

template <typename Functor>
c10::KernelFunction unboxed(const c10::OperatorHandle& op, OpId id, c10::DeviceType device,
                            c10::DispatchKey key) {
  return c10::KernelFunction::makeFromUnboxedFunctor<false, Functor>(
      std::make_unique<Functor>(op, id, device, key));
}

}  // namespace

c10::KernelFunction make_watching_kernel(const c10::OperatorHandle& op, OpId id,
                                         c10::DeviceType device, c10::DispatchKey key) {
  const std::string name = display_name(op.operator_name());
  if (name == "view") return unboxed<ViewKernel>(op, id, device, key);
  if (name == "add_.Tensor")
    return unboxed<WritingKernel<at::_ops::add__Tensor>>(op, id, device, key);
  if (name == "set_.source_Tensor") return unboxed<SettingKernel>(op, id, device, key);
  return unboxed<WritingKernel<at::_ops::sub__Tensor>>(op, id, device, key);
}

}  // namespace semitone::amp

#include "semitone/amp/functions.h"

#include "semitone/core/error.h"
#include "src/amp/regions.h"

#include <torch/custom_class.h>

#include <string>

namespace semitone::amp {
namespace {

constexpr const char* kStateKey = "semitone.autocast";

// AutogradContext keeps IValues: this makes one of a state.
struct StateHolder : torch::CustomClassHolder {
  explicit StateHolder(AutocastState kept) : state(std::move(kept)) {}
  AutocastState state;
};

const Regions::Region* active_region(c10::DeviceType device) {
  const Regions* regions = Regions::current();
  const Regions::Region* region = regions == nullptr ? nullptr : regions->find(device);
  return region != nullptr && region->policy != nullptr && autocast_enabled(device) ? region
                                                                                    : nullptr;
}

template <typename Cast>
c10::IValue map_ivalue(const c10::IValue& value, Cast&& cast) {
  if (value.isTensor()) return cast(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> result;
    for (const at::Tensor& tensor : value.toTensorVector()) result.push_back(cast(tensor));
    return result;
  }
  return value;
}

}  // namespace

namespace detail {

at::Tensor cast_to_lower(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  const auto* region = active_region(tensor.device().type());
  return region == nullptr ? tensor : cast_floating(tensor, region->dtype);
}

at::Tensor cast_to_fp32(const at::Tensor& tensor) {
  if (!tensor.defined() || active_region(tensor.device().type()) == nullptr) return tensor;
  return cast_floating(tensor, at::kFloat);
}

c10::IValue cast_to_lower(const c10::IValue& value) {
  return map_ivalue(value, [](const at::Tensor& tensor) { return cast_to_lower(tensor); });
}

c10::IValue cast_to_fp32(const c10::IValue& value) {
  return map_ivalue(value, [](const at::Tensor& tensor) { return cast_to_fp32(tensor); });
}

at::Tensor Widest::operator()(const at::Tensor& tensor) {
  if (tensor.defined() && tensor.is_floating_point() && tensor.scalar_type() != at::kDouble) {
    const auto dtype = tensor.scalar_type();
    widest_ = !widest_.has_value() || *widest_ == dtype ? dtype : at::kFloat;
  }
  return tensor;
}

c10::IValue Widest::operator()(const c10::IValue& value) {
  return map_ivalue(value, [this](const at::Tensor& tensor) { return (*this)(tensor); });
}

at::Tensor Widest::cast(const at::Tensor& tensor) const {
  return widest_.has_value() ? cast_floating(tensor, *widest_) : tensor;
}

c10::IValue Widest::cast(const c10::IValue& value) const {
  return map_ivalue(value, [this](const at::Tensor& tensor) { return cast(tensor); });
}

bool in_any_region() {
  const Regions* regions = Regions::current();
  if (regions == nullptr) return false;
  for (const auto& region : regions->innermost) {
    if (region.policy != nullptr && autocast_enabled(region.device)) return true;
  }
  return false;
}

}  // namespace detail

CustomForward::CustomForward(torch::autograd::AutogradContext* ctx,
                             std::optional<c10::ScalarType> cast_inputs) {
  if (cast_inputs.has_value() && detail::in_any_region()) {
    active_ = cast_inputs;
    no_casts_.emplace();
  }
  const AutocastState state =
      active_.has_value() ? AutocastState::disabled() : AutocastState::current();
  ctx->saved_data[kStateKey] = c10::IValue::make_capsule(c10::make_intrusive<StateHolder>(state));
}

namespace {

AutocastState::Scope enter_saved(torch::autograd::AutogradContext* ctx) {
  const auto found = ctx->saved_data.find(kStateKey);
  if (found == ctx->saved_data.end()) {
    throw Error("amp.custom_backward", "a forward that constructed a CustomForward", "none",
                "put amp::CustomForward scope(ctx) at the top of forward()");
  }
  const auto capsule = found->second.toCapsule();
  return dynamic_cast<const StateHolder&>(*capsule).state.enter();
}

}  // namespace

CustomBackward::CustomBackward(torch::autograd::AutogradContext* ctx) : scope_(enter_saved(ctx)) {}

}  // namespace semitone::amp

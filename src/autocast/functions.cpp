#include "semitone/autocast/functions.h"

#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "src/autocast/caster.h"
#include "src/autocast/regions.h"

#include <torch/custom_class.h>

#include <algorithm>
#include <string_view>

namespace semitone::amp {
namespace {

constexpr const char* kStateKey = "semitone.autocast";

// AutogradContext stores IValues; this wraps a state in one.
struct StateHolder : torch::CustomClassHolder {
  explicit StateHolder(AutocastState kept) : state(std::move(kept)) {}
  AutocastState state;
};

// Calls cast(caster, region) if the tensor is one that its device's region casts.
template <typename Cast>
at::Tensor in_region_of(const at::Tensor& tensor, std::string_view caller, Cast&& cast) {
  const Regions* regions = Regions::current();
  if (regions == nullptr || !tensor.defined()) return tensor;
  const auto* region = regions->find_active(tensor.device().type());
  if (region == nullptr || !region->policy->casts()) return tensor;
  return cast(Caster(*regions, *region->policy, caller), *region);
}

}  // namespace

namespace detail {

at::Tensor cast_to_lower(const at::Tensor& tensor) {
  return in_region_of(tensor, "half_function", [&](const Caster& cast, const auto& region) {
    return cast.convert(tensor, conversion_to(region.dtype, /*emulated=*/false));
  });
}

at::Tensor cast_to_fp32(const at::Tensor& tensor) {
  return in_region_of(tensor, "float_function",
                      [&](const Caster& cast, const auto&) { return cast.to_fp32(tensor); });
}

at::Tensor CastToLower::look(const at::Tensor& tensor) {
  return in_region_of(tensor, "half_function", [&](const Caster&, const auto& region) {
    has_kept_ = has_kept_ || region.policy->keeps_fp32(tensor);
    return tensor;
  });
}

at::Tensor CastToWidest::look(const at::Tensor& tensor) {
  return in_region_of(tensor, "promote_function", [&](const Caster&, const auto& region) {
    if (is_eligible(tensor, region.device)) {
      const auto dtype = tensor.scalar_type();
      widest_ = !widest_.has_value() || *widest_ == dtype ? dtype : at::kFloat;
    }
    return tensor;
  });
}

at::Tensor CastToWidest::operator()(const at::Tensor& tensor) const {
  return in_region_of(tensor, "promote_function", [&](const Caster& cast, const auto&) {
    return widest_ == at::kFloat ? cast.to_fp32(tensor) : tensor;
  });
}

std::vector<c10::DeviceType> devices_with_casts() {
  std::vector<c10::DeviceType> devices;
  const Regions* regions = Regions::current();
  if (regions == nullptr) return devices;
  for (const auto& region : regions->innermost) {
    const auto* active = regions->find_active(region.device);
    if (active != nullptr && active->policy->casts()) devices.push_back(region.device);
  }
  return devices;
}

}  // namespace detail

CustomForward::CustomForward(torch::autograd::AutogradContext* ctx,
                             std::optional<c10::ScalarType> cast_inputs) {
  if (cast_inputs.has_value()) devices_ = detail::devices_with_casts();
  if (!devices_.empty()) {
    dtype_ = *cast_inputs;
    if (is_16bit(dtype_)) {
      emulation_only_.emplace();
    } else {
      no_casts_.emplace();
    }
  }
  ctx->saved_data[kStateKey] =
      c10::IValue::make_capsule(c10::make_intrusive<StateHolder>(AutocastState::current()));
}

at::Tensor CustomForward::cast_tensor(const at::Tensor& tensor) const {
  const bool applies = tensor.defined() && std::find(devices_.begin(), devices_.end(),
                                                     tensor.device().type()) != devices_.end();
  return applies ? cast_floating(tensor, dtype_) : tensor;
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

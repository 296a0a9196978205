#include "semitone/autocast/cast_action.h"

#include "semitone/core/device.h"
#include "semitone/core/dtype.h"
#include "semitone/core/error.h"

#include <ATen/autocast_mode.h>

namespace semitone::amp {

std::string_view name_of(CastAction action) {
  switch (action) {
    case CastAction::lower:
      return "lower";
    case CastAction::fp32:
      return "fp32";
    case CastAction::promote:
      return "promote";
    case CastAction::widest:
      return "widest";
    case CastAction::leave:
      return "leave";
    case CastAction::ban:
      return "ban";
  }
  return "";
}

std::string_view name_of(Emulation emulation) {
  switch (emulation) {
    case Emulation::automatic:
      return "automatic";
    case Emulation::always:
      return "always";
    case Emulation::never:
      return "never";
  }
  return "";
}

CastTarget::CastTarget() : CastTarget(default_device()) {}
CastTarget::CastTarget(c10::DeviceType device_type)
    : CastTarget(device_type, default_16bit_dtype(device_type)) {}
CastTarget::CastTarget(c10::ScalarType lower_dtype) : CastTarget(default_device(), lower_dtype) {}
CastTarget::CastTarget(c10::DeviceType device_type, c10::ScalarType lower_dtype)
    : device(device_type), dtype(lower_dtype) {
  if (!is_16bit(dtype)) {
    throw Error("amp.cast_policy", "float16 or bfloat16 to lower to", dtype_name(dtype),
                "for fp32 omit the region, or construct it with enabled = false");
  }
  if (!at::autocast::is_autocast_available(device)) {
    throw Error("amp.cast_policy", "a device type that LibTorch has autocast for",
                c10::DeviceTypeName(device, true));
  }
}

}  // namespace semitone::amp

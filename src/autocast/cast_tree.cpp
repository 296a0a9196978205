#include "semitone/autocast/cast_tree.h"

namespace semitone::amp {

at::Tensor cast_floating(const at::Tensor& tensor, c10::ScalarType dtype, bool wide) {
  if (!tensor.defined() || !tensor.is_floating_point() || tensor.scalar_type() == dtype)
    return tensor;
  if (tensor.scalar_type() == at::kDouble && !wide) return tensor;
  return tensor.to(dtype);
}

c10::IValue cast_floating(const c10::IValue& value, c10::ScalarType dtype, bool wide) {
  return semitone::detail::map_ivalue(
      value, [&](const at::Tensor& tensor) { return cast_floating(tensor, dtype, wide); });
}

}  // namespace semitone::amp

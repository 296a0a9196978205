#include "src/weights/cast.h"

#include <ATen/ops/isfinite.h>

namespace semitone::weights {

bool overflows(const at::Tensor& value, c10::ScalarType dtype) {
  if (value.scalar_type() == dtype || !value.is_floating_point() || !c10::isFloatingType(dtype) ||
      value.numel() == 0)
    return false;
  // Operators on fp8 exist for few dtypes, those on fp32 for all.
  const at::Tensor before = value.detach().to(at::kDouble);
  const at::Tensor after = value.detach().to(dtype).to(at::kDouble);
  return at::isfinite(before).logical_and(at::isfinite(after).logical_not()).any().item<bool>();
}

}  // namespace semitone::weights

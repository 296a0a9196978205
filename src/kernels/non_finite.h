#pragma once

#include <ATen/core/Tensor.h>

namespace semitone::kernels {

// Whether an element is inf or NaN. A floating or complex tensor with strides, on any device. On the
// CPU one pass over memory without gaps; other layouts are copied. On other devices one host read.
bool has_non_finite(const at::Tensor& tensor);

namespace ref {
// The reference implementation, composed of ATen operators.
bool has_non_finite(const at::Tensor& tensor);
}  // namespace ref

}  // namespace semitone::kernels

#pragma once

#include <ATen/core/Tensor.h>

#include <limits>
#include <span>
#include <utility>

// Operations over many tensors in one pass, which a training step applies to every parameter.
namespace semitone::kernels {

// One gradient of an unscale pass.
struct Unscale {
  at::Tensor grad;    // scaled gradient: fp32, fp16, bf16 or fp64; strided
  at::Tensor out;     // receives the result: grad itself, or of the same shape in fp32 (fp64 for an
                      // fp64 grad)
  at::Tensor addend;  // undefined, or out's dtype and shape, and may be out: earlier gradients,
                      // which are not scaled any more
};

// The factor of gradients: a number or, if a step is captured in a CUDA graph, one fp32 element in
// their device's memory, which is read when the kernels run.
struct InverseScale {
  InverseScale(float number_ = 1) : number(number_) {}  // NOLINT(google-explicit-constructor)
  explicit InverseScale(at::Tensor on_device_) : on_device(std::move(on_device_)) {}
  float number = std::numeric_limits<float>::quiet_NaN();
  at::Tensor on_device;
};

// out = grad * inv_scale + addend for every item. Sets found_inf = 1 if an element of a result is
// inf or NaN, and not only because its addend is: earlier non-finite values are not attributed to
// this gradient. found_inf is never cleared here. The test is on the result. A scale of 0, whose
// inverse is inf, is therefore detected, where a test of the scaled gradient would let NaNs through
// (torch's GradScaler, at::_amp_foreach_non_finite_check_and_unscale_).
//
// found_inf: fp32, one element, on the device of the items, all of which must be on one device.
// Nothing is read back to the host.
void multi_tensor_unscale(std::span<const Unscale> items, const InverseScale& inv_scale,
                          at::Tensor& found_inf);

namespace ref {
// The reference implementation, composed of ATen operators. Any dtype, layout and device.
void multi_tensor_unscale(std::span<const Unscale> items, const InverseScale& inv_scale,
                          at::Tensor& found_inf);
}  // namespace ref

}  // namespace semitone::kernels

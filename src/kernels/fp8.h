#pragma once

#include <ATen/core/Tensor.h>

// Values as the 8-bit formats hold them.
namespace semitone::kernels {

constexpr bool is_fp8(at::ScalarType dtype) {
  return dtype == at::kFloat8_e4m3fn || dtype == at::kFloat8_e5m2;
}

struct Fp8Values {
  at::Tensor values;  // fp32, in new memory, with the tensor's strides if that has no gaps
  float amax;         // the largest finite magnitude of the tensor itself; 0 without any
};

// tensor * scale in the nearest numbers of float8_e4m3fn or float8_e5m2, ties to even: those that
// torch's casts give after a clamp to the format's range, which casts of hardware do. Infinities
// stay so in e5m2, and become NaN in e4m3fn, which has none. NaNs stay NaNs. One pass over fp32,
// fp16 and bf16 on the CPU without gaps, otherwise the reference. Not recorded by autograd.
Fp8Values to_fp8(const at::Tensor& tensor, at::ScalarType format, float scale);

// The largest finite magnitude; 0 without any. Reads from the device.
float finite_amax(const at::Tensor& tensor);

namespace ref {
Fp8Values to_fp8(const at::Tensor& tensor, at::ScalarType format, float scale);
float finite_amax(const at::Tensor& tensor);
}  // namespace ref

}  // namespace semitone::kernels

#include "src/kernels/gelu.h"

#include <ATen/OpMathType.h>
#include <torch/types.h>

#include <string_view>

namespace semitone::kernels::ref {
namespace {

std::string_view name_of(GeluForm form) {
  return form == GeluForm::erf ? "none" : "tanh";
}

at::Tensor wide_sum(const at::Tensor& input, const at::Tensor& bias) {
  const at::Tensor wide = input.to(at::toOpMathType(input.scalar_type()));
  return bias.defined() ? wide.add(bias.to(wide.scalar_type())) : wide;
}

}  // namespace

at::Tensor gelu(const at::Tensor& input, const at::Tensor& bias, GeluForm form) {
  return at::gelu(wide_sum(input, bias), name_of(form)).to(input.scalar_type());
}

GeluGradients gelu_backward(const at::Tensor& grad, const at::Tensor& input, const at::Tensor& bias,
                            GeluForm form, bool bias_wanted) {
  const at::Tensor sum = wide_sum(input, bias);
  const at::Tensor wide = at::gelu_backward(grad.to(sum.scalar_type()), sum, name_of(form));
  GeluGradients result;
  result.input = wide.to(input.scalar_type());
  if (bias_wanted) {
    result.bias = wide.reshape({bias.numel() == 0 ? 0 : wide.numel() / bias.numel(), bias.numel()})
                      .sum(0)
                      .to(bias.scalar_type());
  }
  return result;
}

}  // namespace semitone::kernels::ref

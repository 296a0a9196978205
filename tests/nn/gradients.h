#pragma once

#include "tests/support/tolerance.h"

#include <torch/torch.h>

#include <cstdint>
#include <vector>

// A function and its gradients, for comparisons.
namespace semitone::test {

struct Gradients {
  at::Tensor output;
  std::vector<at::Tensor> inputs;  // undefined where an input is
};

// The gradients of function(inputs) for the gradient `grad` of its output. Inputs are copied;
// undefined ones are passed on.
template <typename Function>
Gradients gradients_of(const Function& function, const std::vector<at::Tensor>& inputs,
                       const at::Tensor& grad) {
  std::vector<at::Tensor> leaves;
  leaves.reserve(inputs.size());
  for (const at::Tensor& input : inputs) {
    leaves.push_back(input.defined() ? input.detach().clone().requires_grad_() : input);
  }
  const at::Tensor output = function(leaves);
  output.backward(grad);
  Gradients result{output.detach(), {}};
  for (const at::Tensor& leaf : leaves)
    result.inputs.push_back(leaf.defined() ? leaf.grad() : leaf);
  return result;
}

// The tolerance of a sum that is computed in fp32 or wider and rounded to the dtype once.
inline double rounded_sum_tolerance(c10::ScalarType dtype, std::int64_t terms) {
  const auto computed = dtype == torch::kDouble ? dtype : torch::kFloat;
  return rounding_tolerance(dtype) + reduction_tolerance(computed, terms);
}

inline std::vector<at::Tensor> in_fp64(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> result;
  result.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors)
    result.push_back(tensor.defined() ? tensor.to(torch::kDouble) : tensor);
  return result;
}

}  // namespace semitone::test

#pragma once

#include "benchmarks/kernels/cases.h"
#include "benchmarks/support/check.h"

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

// Functions with a gradient, as two rows: forward with recording, and backward.
namespace semitone::bench {

using Tensors = std::vector<at::Tensor>;
using Function = std::function<at::Tensor(const Tensors&)>;

struct Differentiable {
  Tensors inputs;
  at::Tensor grad;  // of the result
  Function ours;
  Function libtorchs;
  std::vector<Moved> forward;
  std::vector<Moved> backward;
};

// Once, at full size.
struct Proof {
  Function definition;  // run in fp64
  Tolerance tolerance;
  // Whether a ReLU follows the reference. Its gradient uses the mask of the kernel's result: near
  // zero, fp64 and fp32 may have different signs.
  bool relu = false;
};

Moved moved(const std::string& name, const at::Tensor& tensor, int times = 1);

// Result and gradients of leaves that are copies of the inputs.
Tensors run(const Function& function, const Tensors& inputs, const at::Tensor& grad);

void prove(const Differentiable& of, const Proof& proof);

std::vector<Row> rows_of(const Differentiable& of);

}  // namespace semitone::bench

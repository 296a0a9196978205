#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

namespace semitone::test {

// Two 16-bit layers at O2, and a BatchNorm between them that stays in fp32.
struct SmallNetImpl : torch::nn::Module {
  SmallNetImpl() : first(9, 33), norm(33), second(33, 5) {
    register_module("first", first);
    register_module("norm", norm);
    register_module("second", second);
  }
  at::Tensor forward(const at::Tensor& x) { return second(norm(first(x)).relu()); }

  torch::nn::Linear first;
  torch::nn::BatchNorm1d norm;
  torch::nn::Linear second;
};
TORCH_MODULE(SmallNet);

}  // namespace semitone::test

#include "semitone/zoo/convnet.h"

#include <torch/nn/functional.h>
#include <torch/types.h>

namespace semitone::zoo {

ConvNetImpl::ConvNetImpl(int64_t classes) : classes_(classes) {
  reset();
}

void ConvNetImpl::reset() {
  const auto conv = [](int64_t in, int64_t out) {
    return torch::nn::Conv2d(torch::nn::Conv2dOptions(in, out, 5).stride(1).padding(2));
  };
  conv1 = register_module("conv1", conv(1, 16));
  bn1 = register_module("bn1", torch::nn::BatchNorm2d(16));
  conv2 = register_module("conv2", conv(16, 32));
  bn2 = register_module("bn2", torch::nn::BatchNorm2d(32));
  fc = register_module("fc", torch::nn::Linear(7 * 7 * 32, classes_));
}

at::Tensor ConvNetImpl::forward(const at::Tensor& images) {
  at::Tensor x = torch::max_pool2d(torch::relu(bn1(conv1(images))), 2, 2);
  x = torch::max_pool2d(torch::relu(bn2(conv2(x))), 2, 2);
  return fc(x.flatten(1));
}

}  // namespace semitone::zoo

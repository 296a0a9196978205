#pragma once

#include <torch/nn.h>
#include <torch/types.h>

#include <cstdint>

// The small models of the tests. A test takes one of these, unless it is about a layer that they
// lack.
namespace semitone::test {

struct ToyNetOptions {
  std::int64_t inputs = 6;
  std::int64_t hidden = 8;
  std::int64_t outputs = 3;
  // A BatchNorm between the layers. It has buffers, and stays in fp32 at O2.
  bool normalised = false;
  at::Tensor (*activation)(const at::Tensor&) = at::relu;
};

// Two linear layers, which are in 16 bits at O2. Images are flattened.
struct ToyNetImpl : torch::nn::Cloneable<ToyNetImpl> {
  explicit ToyNetImpl(const ToyNetOptions& given = {}) : options(given) { reset(); }
  void reset() override {
    first = register_module("first", torch::nn::Linear(options.inputs, options.hidden));
    if (options.normalised) norm = register_module("norm", torch::nn::BatchNorm1d(options.hidden));
    second = register_module("second", torch::nn::Linear(options.hidden, options.outputs));
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor hidden = first->forward(x.dim() > 2 ? x.flatten(1) : x);
    if (options.normalised) hidden = norm->forward(hidden);
    return second->forward(options.activation(hidden));
  }
  ToyNetOptions options;
  torch::nn::Linear first{nullptr}, second{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
};
TORCH_MODULE(ToyNet);

// With a BatchNorm, and with odd sizes, so that kernels have elements beyond their last whole
// vector.
inline ToyNet odd_net() {
  return ToyNet(ToyNetOptions{.inputs = 9, .hidden = 33, .outputs = 5, .normalised = true});
}

// A convolution, a BatchNorm, which has buffers and stays in fp32 at O2, and a linear layer, for
// images of two channels.
struct ToyConvNetImpl : torch::nn::Module {
  explicit ToyConvNetImpl(std::int64_t outputs = 3) : head(4, outputs) {
    register_module("conv", conv);
    register_module("norm", norm);
    register_module("head", head);
  }
  at::Tensor forward(const at::Tensor& x) { return head(torch::relu(norm(conv(x))).mean({2, 3})); }
  torch::nn::Conv2d conv{torch::nn::Conv2dOptions(2, 4, 3).padding(1)};
  torch::nn::BatchNorm2d norm{4};
  torch::nn::Linear head;
};
TORCH_MODULE(ToyConvNet);

// A fast classifier of images in MNIST's format, with everything that a resumed training must
// restore: buffers, random numbers (dropout), and layers that stay in fp32 at O2.
struct DropNetImpl : torch::nn::Cloneable<DropNetImpl> {
  explicit DropNetImpl(double dropout = 0.2) : rate(dropout) { reset(); }
  void reset() override {
    conv = register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 8, 5).stride(3)));
    norm = register_module("norm", torch::nn::BatchNorm2d(8));
    drop = register_module("drop", torch::nn::Dropout(rate));
    fc = register_module("fc", torch::nn::Linear(8 * 8 * 8, 10));
  }
  at::Tensor forward(const at::Tensor& images) {
    return fc(drop(torch::relu(norm(conv(images)))).flatten(1));
  }
  double rate;
  torch::nn::Conv2d conv{nullptr};
  torch::nn::BatchNorm2d norm{nullptr};
  torch::nn::Dropout drop{nullptr};
  torch::nn::Linear fc{nullptr};
};
TORCH_MODULE(DropNet);

}  // namespace semitone::test

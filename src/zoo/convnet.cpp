#include "semitone/zoo/convnet.h"

#include "semitone/core/error.h"

#include <torch/nn/functional.h>
#include <torch/types.h>

#include <string>

namespace semitone::zoo {

ConvNetImpl::ConvNetImpl(std::int64_t classes) : ConvNetImpl(ConvNetOptions().classes(classes)) {}

ConvNetImpl::ConvNetImpl(const ConvNetOptions& options) : options_(options) {
  const auto require = [](const char* name, std::int64_t size, std::int64_t least) {
    if (size >= least) return;
    throw Error("zoo.convnet", std::string(name) + " of at least " + std::to_string(least),
                std::to_string(size));
  };
  require("classes", options.classes(), 1);
  require("channels", options.channels(), 1);
  require("image_height", options.image_height(), 4);
  require("image_width", options.image_width(), 4);
  reset();
}

void ConvNetImpl::reset() {
  const auto conv = [](int64_t in, int64_t out) {
    return torch::nn::Conv2d(torch::nn::Conv2dOptions(in, out, 5).stride(1).padding(2));
  };
  conv1 = register_module("conv1", conv(options_.channels(), 16));
  bn1 = register_module("bn1", torch::nn::BatchNorm2d(16));
  conv2 = register_module("conv2", conv(16, 32));
  bn2 = register_module("bn2", torch::nn::BatchNorm2d(32));
  fc = register_module(
      "fc", torch::nn::Linear(32 * (options_.image_height() / 4) * (options_.image_width() / 4),
                              options_.classes()));
}

at::Tensor ConvNetImpl::forward(const at::Tensor& images) {
  at::Tensor x = torch::max_pool2d(torch::relu(bn1(conv1(images))), 2, 2);
  x = torch::max_pool2d(torch::relu(bn2(conv2(x))), 2, 2);
  return fc(x.flatten(1));
}

}  // namespace semitone::zoo

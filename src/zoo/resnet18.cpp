#include "semitone/zoo/resnet18.h"

#include "semitone/core/error.h"
#include "src/zoo/resnet_layers.h"

#include <string>

namespace semitone::zoo {

ResNet18Impl::ResNet18Impl(std::int64_t classes, double residual_gain)
    : classes_(classes), residual_gain_(residual_gain) {
  if (classes <= 0) throw Error("zoo.resnet18", "classes above 0", std::to_string(classes));
  reset();
}

void ResNet18Impl::reset() {
  const ResNetLayers layers = basic_layers({2, 2, 2, 2}, residual_gain_);
  features = register_module("features", layers.features);
  head = register_module("head", torch::nn::Linear(layers.channels, classes_));
}

at::Tensor ResNet18Impl::forward(const at::Tensor& images) {
  return head->forward(features->forward(images).mean({2, 3}));
}

}  // namespace semitone::zoo

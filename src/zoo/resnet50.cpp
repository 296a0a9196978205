#include "semitone/zoo/resnet50.h"

#include "semitone/core/error.h"
#include "src/zoo/resnet_layers.h"

#include <string>

namespace semitone::zoo {

ResNet50Impl::ResNet50Impl(std::int64_t classes, double residual_gain)
    : classes_(classes), residual_gain_(residual_gain) {
  if (classes <= 0) throw Error("zoo.resnet50", "classes above 0", std::to_string(classes));
  reset();
}

void ResNet50Impl::reset() {
  const ResNetLayers layers = bottleneck_layers({3, 4, 6, 3}, residual_gain_);
  features = register_module("features", layers.features);
  head = register_module("head", torch::nn::Linear(layers.channels, classes_));
}

at::Tensor ResNet50Impl::forward(const at::Tensor& images) {
  return head->forward(features->forward(images).mean({2, 3}));
}

}  // namespace semitone::zoo

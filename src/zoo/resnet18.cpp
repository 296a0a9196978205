#include "semitone/zoo/resnet18.h"

#include "semitone/core/error.h"
#include "src/zoo/resnet_layers.h"

#include <string>

namespace semitone::zoo {

ResNet18Impl::ResNet18Impl(const ResNetOptions& options_) : options(options_) {
  if (options.classes() <= 0)
    throw Error("zoo.resnet18", "classes above 0", std::to_string(options.classes()));
  reset();
}

void ResNet18Impl::reset() {
  const ResNetLayers layers = basic_layers({2, 2, 2, 2}, options.residual_gain());
  features = register_module("features", layers.features);
  head = register_module("head", torch::nn::Linear(layers.channels, options.classes()));
}

at::Tensor ResNet18Impl::forward(const at::Tensor& images) {
  const at::Tensor x = options.checkpoint_blocks() ? forward_checkpointed(*features, images)
                                                   : features->forward(images);
  return head->forward(x.mean({2, 3}));
}

}  // namespace semitone::zoo

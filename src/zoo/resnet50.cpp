#include "semitone/zoo/resnet50.h"

#include "semitone/core/error.h"
#include "semitone/recompute/checkpoint.h"
#include "src/zoo/resnet_layers.h"

#include <string>
#include <vector>

namespace semitone::zoo {

ResNet50Impl::ResNet50Impl(std::int64_t classes, double residual_gain, bool checkpoint_blocks)
    : classes_(classes), residual_gain_(residual_gain), checkpoint_blocks_(checkpoint_blocks) {
  if (classes <= 0) throw Error("zoo.resnet50", "classes above 0", std::to_string(classes));
  reset();
}

void ResNet50Impl::reset() {
  const ResNetLayers layers = bottleneck_layers({3, 4, 6, 3}, residual_gain_);
  features = register_module("features", layers.features);
  head = register_module("head", torch::nn::Linear(layers.channels, classes_));
}

at::Tensor ResNet50Impl::forward(const at::Tensor& images) {
  if (!checkpoint_blocks_) return head->forward(features->forward(images).mean({2, 3}));
  at::Tensor x = images;
  for (auto part = features->begin(); part != features->end();) {
    // The parts before the first block, whose results are the largest, count as one.
    const auto end = part == features->begin() ? part + kPartsBeforeBlocks : part + 1;
    semitone::nn::CheckpointOptions options;
    for (auto each = part; each != end; ++each) {
      for (const at::Tensor& buffer : each->ptr()->buffers()) options.buffers().push_back(buffer);
    }
    const auto run = [parts = std::vector(part, end)](const at::Tensor& input) mutable {
      at::Tensor y = input;
      for (torch::nn::AnyModule& each : parts) y = each.forward(y);
      return y;
    };
    x = semitone::nn::checkpoint(options, run, x);
    part = end;
  }
  return head->forward(x.mean({2, 3}));
}

}  // namespace semitone::zoo

#include "semitone/train/models.h"

#include "semitone/zoo/convnet.h"
#include "semitone/zoo/resnet50.h"
#include "src/train/choices.h"

#include <torch/types.h>

#include <array>
#include <cstdint>

namespace semitone::train {
namespace {

constexpr std::int64_t kClasses = 10;

// ResNet-50 for images of one channel and 28 x 28 pixels.
class FramedResNet50Impl : public torch::nn::Module {
 public:
  FramedResNet50Impl() : net_(register_module("net", zoo::ResNet50(kClasses, kResidualGain))) {}

  at::Tensor forward(const at::Tensor& images) {
    const at::Tensor framed = torch::constant_pad_nd(images, {2, 2, 2, 2});
    return net_->forward(framed.expand({-1, 3, -1, -1}));
  }

 private:
  static constexpr double kResidualGain = 0.2;

  zoo::ResNet50 net_;
};
TORCH_MODULE(FramedResNet50);

constexpr std::array kModels{
    ModelChoice{"convnet", []() -> Classifier { return zoo::ConvNet(kClasses); }},
    ModelChoice{"resnet50", []() -> Classifier { return FramedResNet50(); }}};

}  // namespace

std::span<const ModelChoice> models() {
  return kModels;
}

const ModelChoice& find_model(std::string_view name) {
  return find_choice(models(), name, "train.model");
}

}  // namespace semitone::train

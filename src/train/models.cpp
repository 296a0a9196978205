#include "src/train/models.h"

#include "semitone/core/error.h"
#include "semitone/zoo/convnet.h"
#include "semitone/zoo/decoder.h"
#include "semitone/zoo/encoder.h"
#include "semitone/zoo/resnet18.h"
#include "semitone/zoo/resnet50.h"
#include "semitone/zoo/vit.h"
#include "src/train/choices.h"
#include "src/train/workload.h"

#include <torch/types.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace semitone::train {
namespace {

constexpr std::int64_t kDigits = 10;
constexpr std::int64_t kDigitSize = 28;
constexpr std::int64_t kImageNetClasses = 1000;
// With a larger gain, ResNet-50's losses depend on rounding, in fp32 too: the losses of a workload
// could not be checked.
constexpr double kResidualGain = 0.2;

// The widths of a frame of zeros that brings images to a height and width: left, right, top, bottom.
std::vector<std::int64_t> frame_of(const ImageShape& shape, std::int64_t height,
                                   std::int64_t width) {
  const std::int64_t columns = width - shape.width;
  const std::int64_t rows = height - shape.height;
  return {columns / 2, columns - columns / 2, rows / 2, rows - rows / 2};
}

at::Tensor framed(const at::Tensor& images, const std::vector<std::int64_t>& frame) {
  const bool is_empty =
      std::all_of(frame.begin(), frame.end(), [](auto side) { return side == 0; });
  return is_empty ? images : torch::constant_pad_nd(images, frame);
}

// A ResNet for images of one channel or three, and of any size.
// @tparam Net  zoo::ResNet18 or zoo::ResNet50
template <typename Net>
class FramedResNetImpl : public torch::nn::Module {
 public:
  explicit FramedResNetImpl(const ImageShape& shape) {
    if (shape.channels != 1 && shape.channels != 3) {
      throw Error("train.model", "images of 1 or 3 channels for a ResNet",
                  std::to_string(shape.channels));
    }
    net_ =
        register_module("net", Net(zoo::ResNetOptions(shape.classes).residual_gain(kResidualGain)));
    frame_ = frame_of(shape, std::max(shape.height, kSmallestSide),
                      std::max(shape.width, kSmallestSide));
  }

  at::Tensor forward(const at::Tensor& images) {
    return net_->forward(framed(images, frame_).expand({-1, 3, -1, -1}));
  }

  // The last BatchNorm layers see one value for each 32 x 32 pixels of an image.
  static std::int64_t smallest_batch(const ImageShape& shape) {
    return std::max(shape.height, shape.width) > kSmallestSide ? 1 : 2;
  }

 private:
  static constexpr std::int64_t kSmallestSide = 32;

  Net net_{nullptr};
  std::vector<std::int64_t> frame_;
};

// A small ViT for images of any size.
class FramedViTImpl : public torch::nn::Module {
 public:
  explicit FramedViTImpl(const ImageShape& shape) {
    std::int64_t patch = 4;
    while (std::max(shape.height, shape.width) > kMostPatches * patch) patch *= 2;
    const auto whole = [&](std::int64_t size) { return (size + patch - 1) / patch * patch; };
    const std::int64_t height = whole(shape.height);
    const std::int64_t width = whole(shape.width);
    frame_ = frame_of(shape, height, width);
    net_ = register_module("net", zoo::ViT(zoo::ViTOptions()
                                               .image_height(height)
                                               .image_width(width)
                                               .channels(shape.channels)
                                               .patch(patch)
                                               .layers(6)
                                               .width(192)
                                               .heads(3)
                                               .ffn(768)
                                               .classes(shape.classes)));
  }

  at::Tensor forward(const at::Tensor& images) { return net_->forward(framed(images, frame_)); }

 private:
  static constexpr std::int64_t kMostPatches = 14;  // in each direction: ViT-B/16 has 14

  zoo::ViT net_{nullptr};
  std::vector<std::int64_t> frame_;
};

Classifier make_vit(const ImageShape& shape) {
  return torch::nn::ModuleHolder<FramedViTImpl>(shape);
}

template <typename Net>
Classifier make_resnet(const ImageShape& shape) {
  return {torch::nn::ModuleHolder<FramedResNetImpl<Net>>(shape),
          FramedResNetImpl<Net>::smallest_batch(shape)};
}

Classifier make_convnet(const ImageShape& shape) {
  return zoo::ConvNet(zoo::ConvNetOptions()
                          .classes(shape.classes)
                          .channels(shape.channels)
                          .image_height(shape.height)
                          .image_width(shape.width));
}

Classifier make_gpt(std::int64_t characters) {
  return zoo::Decoder(
      zoo::DecoderOptions().layers(4).width(256).heads(4).ffn(704).vocabulary(characters));
}

constexpr std::array kGptDefaults{
    FlagDefault{"--optimizer", "adamw"}, FlagDefault{"--lr", "0.001"},
    FlagDefault{"--batch-size", "8"},    FlagDefault{"--epochs", "10"},
    FlagDefault{"--max-data", "1"},      FlagDefault{"--test-share", "0.1"}};

constexpr std::array kModels{
    ModelChoice{.name = "convnet", .make_for_images = make_convnet},
    ModelChoice{.name = "resnet18", .make_for_images = make_resnet<zoo::ResNet18>},
    ModelChoice{.name = "resnet50", .make_for_images = make_resnet<zoo::ResNet50>},
    ModelChoice{.name = "vit", .make_for_images = make_vit},
    ModelChoice{.name = "gpt", .make_for_text = make_gpt, .defaults = kGptDefaults}};

// Noise with random labels.
Batch random_images(std::int64_t count, std::int64_t channels, std::int64_t size,
                    std::int64_t classes, const at::Generator& generator) {
  const at::Tensor images = torch::randn({count, channels, size, size}, generator);
  return {images, torch::randint(classes, {count}, generator, torch::kLong)};
}

// Random tokens, some of them masked, with all tokens as labels.
Batch masked_tokens(const WorkloadOptions& options, const at::Generator& generator) {
  constexpr double kMasked = 0.15;
  constexpr std::int64_t kMaskToken = 0;
  const std::vector<std::int64_t> sizes{options.batch_size(), options.length()};
  const at::Tensor tokens =
      torch::randint(options.encoder().vocabulary(), sizes, generator, torch::kLong);
  const at::Tensor masked = torch::rand(sizes, generator) < kMasked;
  return {tokens.masked_fill(masked, kMaskToken), tokens.flatten()};
}

// Random tokens, with the token after each one as its label.
Batch following_tokens(const WorkloadOptions& options, const at::Generator& generator) {
  const at::Tensor tokens =
      torch::randint(options.decoder().vocabulary(), {options.batch_size(), options.length() + 1},
                     generator, torch::kLong);
  return {tokens.narrow(1, 0, options.length()).contiguous(),
          tokens.narrow(1, 1, options.length()).flatten()};
}

constexpr std::array kWorkloads{
    WorkloadChoice{
        .name = "mnist",
        .help = "the ConvNet, 100 images of 28 x 28, SGD with momentum",
        .has_images = true,
        .batch_size = 100,
        .length = 0,
        .optimizer = "sgd",
        .weight_decay = 0,
        .lr = 0.01,
        .make_model = [](const WorkloadOptions&) -> Classifier { return zoo::ConvNet(); },
        .make_batch =
            [](const WorkloadOptions& options, const at::Generator& generator) {
              return random_images(options.batch_size(), 1, kDigitSize, kDigits, generator);
            }},
    WorkloadChoice{.name = "resnet50",
                   .help = "ResNet-50, 16 images of 224 x 224, SGD with momentum",
                   .has_images = true,
                   .batch_size = 16,
                   .length = 0,
                   .optimizer = "sgd",
                   .weight_decay = 0,
                   .lr = 0.001,
                   .make_model = [](const WorkloadOptions& options) -> Classifier {
                     return zoo::ResNet50(zoo::ResNetOptions(kImageNetClasses)
                                              .residual_gain(kResidualGain)
                                              .checkpoint_blocks(options.checkpoint_activations()));
                   },
                   .make_batch =
                       [](const WorkloadOptions& options, const at::Generator& generator) {
                         return random_images(options.batch_size(), 3, options.image_size(),
                                              kImageNetClasses, generator);
                       }},
    WorkloadChoice{.name = "encoder",
                   .help = "BERT's layers: 4 of width 1024 with 16 heads, 8 x 128 tokens, 18000 "
                           "words, AdamW, dropout 0.1",
                   .has_images = false,
                   .batch_size = 8,
                   .length = 128,
                   .optimizer = "adamw",
                   .weight_decay = 0.01,
                   .lr = 1e-4,
                   .make_model = [](const WorkloadOptions& options) -> Classifier {
                     return zoo::Encoder(zoo::EncoderOptions(options.encoder())
                                             .checkpoint_layers(options.checkpoint_activations()));
                   },
                   .make_batch = masked_tokens},
    WorkloadChoice{.name = "decoder",
                   .help = "Llama's layers: 4 of width 768 with 12 heads, 4 x 512 tokens, 18000 "
                           "words, AdamW",
                   .has_images = false,
                   .batch_size = 4,
                   .length = 512,
                   .optimizer = "adamw",
                   .weight_decay = 0.01,
                   .lr = 1e-4,
                   .make_model = [](const WorkloadOptions& options) -> Classifier {
                     return zoo::Decoder(zoo::DecoderOptions(options.decoder())
                                             .checkpoint_layers(options.checkpoint_activations()));
                   },
                   .make_batch = following_tokens}};

}  // namespace

std::span<const ModelChoice> models() {
  return kModels;
}

const ModelChoice& find_model(std::string_view name) {
  return find_choice(models(), name, "train.model");
}

std::span<const WorkloadChoice> workloads() {
  return kWorkloads;
}

const WorkloadChoice& find_workload(std::string_view name) {
  return find_choice(workloads(), name, "train.workload");
}

}  // namespace semitone::train

#pragma once

#include "src/train/classifier.h"
#include "src/train/images.h"

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <string_view>

// The models that `semitone train` and `semitone bench` offer. A new one is a row in models.cpp.
namespace semitone::train {

class WorkloadOptions;

// A default of a model that differs from that of the flag: {"--lr", "0.001"}.
struct FlagDefault {
  std::string_view flag;
  std::string_view value;
};

// A model of the zoo. It has one of the two functions, which tells from what data it learns. They
// create the model with new weights, drawn from LibTorch's default generator.
struct ModelChoice {
  std::string_view name;
  // Classifies images of a shape. Error for images that do not fit.
  Classifier (*make_for_images)(const ImageShape& shape) = nullptr;
  // Predicts the characters of a text.
  // @param characters  size of the vocabulary
  Classifier (*make_for_text)(std::int64_t characters) = nullptr;
  std::span<const FlagDefault> defaults{};

  const DataKind& kind() const { return make_for_text == nullptr ? kImages : kText; }
};

// convnet: zoo::ConvNet, for images from 4 x 4. resnet18, resnet50: zoo::ResNet18 and ResNet50 with a
// residual_gain of 0.2. They take images of 1 or 3 channels. Since the networks have three channels
// and need 32 x 32 pixels, a single channel is repeated, and smaller images are framed by zeros.
// For images up to 32 x 32, each batch of a training must have at least 2 images
// (Classifier::smallest_batch).
// vit: zoo::ViT with 6 layers and the width and heads of DeiT-Tiny (192 and 3; Touvron et al. 2021).
// The patch is the smallest power of two from 4 with at most 14 patches in each direction: 4 for
// MNIST and CIFAR, 16 for 224 x 224. Images that are not whole patches are framed by zeros.
//
// gpt: zoo::Decoder with 4 layers of width 256, 4 heads and a feed-forward width of 704 (8/3 of the
// width, rounded up to a multiple of 64), for texts: 3.2 million parameters, so that two cores train
// it on a small text in minutes.
std::span<const ModelChoice> models();

// Error for a name that no model has.
const ModelChoice& find_model(std::string_view name);

// A training on synthetic data for measuring speed and memory.
struct WorkloadChoice {
  std::string_view name;
  std::string_view help;    // for the program's help: "ResNet-50, 16 images of 224 x 224, …"
  bool has_images;          // otherwise sequences of tokens
  std::int64_t batch_size;  // default
  std::int64_t length;      // of a sequence; default. 0 for images
  // sgd, with a momentum of 0.9, or adamw: a name in optimizers() that "fused-" may precede.
  std::string_view optimizer;
  double weight_decay;
  double lr;  // at which the first steps on a batch lower its loss at every level
  Classifier (*make_model)(const WorkloadOptions& options);
  // Makes the batch on which all steps train, in fp32 on the CPU.
  Batch (*make_batch)(const WorkloadOptions& options, const at::Generator& generator);
};

// | workload | model           | a step                | optimizer                |
// |----------|-----------------|-----------------------|--------------------------|
// | mnist    | zoo::ConvNet    | 100 images of 28 x 28 | SGD, momentum 0.9        |
// | resnet50 | zoo::ResNet50   | 16 images of 224²     | SGD, momentum 0.9        |
// | encoder  | zoo::Encoder    | 8 x 128 tokens        | AdamW, weight decay 0.01 |
// | decoder  | zoo::Decoder    | 4 x 512 tokens        | AdamW, weight decay 0.01 |
//
// Images are normal noise with random labels. ResNet-50 has a residual_gain of 0.2. Tokens are
// random. 15 % of the encoder's are masked (token 0), and its loss covers all tokens. The decoder
// predicts the token that follows each token.
std::span<const WorkloadChoice> workloads();

// Error for a name that no workload has.
const WorkloadChoice& find_workload(std::string_view name);

}  // namespace semitone::train

#pragma once

#include "semitone/train/trainer.h"

#include <span>
#include <string_view>

/// The models that `semitone train --model` offers.
namespace semitone::train {

/// A model of the zoo that classifies MNIST's images, (N, 1, 28, 28), into ten classes.
struct ModelChoice {
  std::string_view name;
  /// Creates the model with new weights, drawn from LibTorch's default generator.
  Classifier (*make)();
};

/// convnet: zoo::ConvNet. resnet50: zoo::ResNet50 with a residual_gain of 0.2. It takes three
/// channels and at least 32 x 32 pixels, so each image is repeated and framed by two rows and
/// columns of zeros.
std::span<const ModelChoice> models();

/// Error for a name that no model has.
const ModelChoice& find_model(std::string_view name);

}  // namespace semitone::train

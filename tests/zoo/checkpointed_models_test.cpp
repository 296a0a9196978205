// Models that keep only the inputs of their layers, against the same models without that.

#include "semitone/zoo/decoder.h"
#include "semitone/zoo/encoder.h"
#include "semitone/zoo/resnet18.h"
#include "semitone/zoo/resnet50.h"
#include "src/core/tensor_memory.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

namespace semitone::zoo {
namespace {

// What the forward pass keeps, and everything that a step changes.
struct Step {
  std::int64_t kept_bytes;
  std::vector<at::Tensor> tensors;
};

template <typename Make>
Step step_of(const Make& make, const at::Tensor& input) {
  torch::manual_seed(5);
  auto model = make();
  Step step{};
  at::Tensor loss;
  {
    const TensorMemoryMeter meter;
    loss = model->forward(input).square().mean();
    step.kept_bytes = meter.current_bytes();
  }
  loss.backward();
  step.tensors.push_back(loss.detach());
  for (const at::Tensor& parameter : model->parameters()) step.tensors.push_back(parameter.grad());
  for (const at::Tensor& buffer : model->buffers()) step.tensors.push_back(buffer);
  return step;
}

void expect_same_with_less_memory(const Step& checkpointed, const Step& plain, double share) {
  ASSERT_EQ(checkpointed.tensors.size(), plain.tensors.size());
  for (std::size_t i = 0; i < plain.tensors.size(); ++i)
    EXPECT_TRUE(torch::equal(checkpointed.tensors[i], plain.tensors[i])) << i;
  EXPECT_LT(static_cast<double>(checkpointed.kept_bytes),
            share * static_cast<double>(plain.kept_bytes));
}

at::Tensor tokens() {
  torch::manual_seed(1);
  return torch::randint(50, {4, 16}, torch::kLong);
}

template <typename Model, typename Options>
Step transformer_step(bool checkpoint) {
  return step_of(
      [=] {
        return Model(
            Options().layers(3).width(16).heads(2).ffn(64).vocabulary(50).checkpoint_layers(
                checkpoint));
      },
      tokens());
}

TEST(CheckpointedModels, AnEncoderWithDropoutTakesTheSameStepWithLessMemory) {
  expect_same_with_less_memory(transformer_step<Encoder, EncoderOptions>(true),
                               transformer_step<Encoder, EncoderOptions>(false), 0.4);
}

TEST(CheckpointedModels, ADecoderTakesTheSameStepWithLessMemory) {
  expect_same_with_less_memory(transformer_step<Decoder, DecoderOptions>(true),
                               transformer_step<Decoder, DecoderOptions>(false), 0.4);
}

template <typename Model>
void expect_same_of_resnet() {
  torch::manual_seed(1);
  const at::Tensor images = torch::randn({2, 3, 32, 32});
  const auto step = [&](bool checkpoint) {
    return step_of(
        [=] { return Model(ResNetOptions(10).residual_gain(0.2).checkpoint_blocks(checkpoint)); },
        images);
  };
  expect_same_with_less_memory(step(true), step(false), 0.4);
}

// With their running statistics.
TEST(CheckpointedModels, ResNetsTakeTheSameStepWithLessMemory) {
  expect_same_of_resnet<ResNet18>();
  expect_same_of_resnet<ResNet50>();
}

}  // namespace
}  // namespace semitone::zoo

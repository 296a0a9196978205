#include "semitone/zoo/vit.h"

#include "src/zoo/encoder_layer.h"
#include "tests/support/errors.h"
#include "tests/support/tolerance.h"
#include "tests/zoo/training.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

namespace semitone::zoo {
namespace {

// 2 x 3 patches.
ViTOptions small_vit() {
  return ViTOptions()
      .image_height(8)
      .image_width(12)
      .patch(4)
      .channels(2)
      .layers(2)
      .width(16)
      .heads(2)
      .ffn(32)
      .classes(5);
}

int64_t parameters_of(const torch::nn::Module& model) {
  int64_t parameters = 0;
  for (const at::Tensor& parameter : model.parameters()) parameters += parameter.numel();
  return parameters;
}

TEST(ViT, HasTheSizesOfTorchvisions) {
  EXPECT_EQ(parameters_of(*ViT()), 86'567'656);                        // vit_b_16
  EXPECT_EQ(parameters_of(*ViT(ViTOptions().patch(32))), 88'224'232);  // vit_b_32
}

TEST(ViT, MapsImagesToLogits) {
  ViT model(small_vit());
  EXPECT_EQ(model->forward(torch::rand({3, 2, 8, 12})).sizes(), (std::vector<int64_t>{3, 5}));
  EXPECT_EQ(model->position_embedding.sizes(), (std::vector<int64_t>{1, 7, 16}));
}

TEST(ViT, ALayerNormalisesBeforeAttentionAndFeedForward) {
  torch::manual_seed(0);
  const auto options = EncoderOptions().width(16).heads(1).ffn(32).dropout(0);
  EncoderLayer layer(options, LayerNorms{.first = true, .eps = 1e-3});
  layer->to(torch::kDouble);
  const torch::NoGradGuard no_grad;
  for (at::Tensor& parameter : layer->parameters()) parameter.add_(torch::rand_like(parameter));
  const at::Tensor x = torch::randn({6, 16}, torch::kDouble);
  const auto norm = [](const at::Tensor& rows, const torch::nn::LayerNorm& of) {
    const at::Tensor centred = rows - rows.mean(1, true);
    const at::Tensor deviation = (centred.square().mean(1, true) + 1e-3).sqrt();
    return centred / deviation * of->weight + of->bias;
  };
  const auto qkv = layer->in_proj(norm(x, layer->norm1)).chunk(3, 1);
  const at::Tensor weights = torch::softmax(torch::matmul(qkv[0], qkv[1].t()) / 4, 1);
  const at::Tensor y = x + layer->out_proj(torch::matmul(weights, qkv[2]));
  const at::Tensor want = y + layer->linear2(torch::gelu(layer->linear1(norm(y, layer->norm2))));
  const double tolerance = test::reduction_tolerance(torch::kDouble, 32);
  EXPECT_TRUE(torch::allclose(layer->forward(x, 6), want, tolerance, tolerance));
}

TEST(ViT, ATokenIsAPatch) {
  torch::manual_seed(0);
  ViT model(small_vit());
  model->eval();
  const at::Tensor images = torch::rand({1, 2, 8, 12});
  const at::Tensor tokens = model->patches(images).flatten(2).transpose(1, 2);
  at::Tensor other = images.clone();
  other.narrow(2, 4, 4).narrow(3, 4, 4).add_(1);  // row 1, column 1 of patches
  const at::Tensor changed = model->patches(other).flatten(2).transpose(1, 2);
  for (int64_t i = 0; i < 6; ++i) EXPECT_EQ(torch::equal(tokens[0][i], changed[0][i]), i != 4) << i;
  EXPECT_FALSE(torch::allclose(model->forward(images), model->forward(other)));
}

TEST(ViT, PatchesHavePlaces) {
  torch::manual_seed(0);
  ViT model(small_vit());
  model->eval();
  const at::Tensor images = torch::rand({1, 2, 8, 12});
  const at::Tensor turned = images.roll({4}, {3});  // the same patches elsewhere
  EXPECT_FALSE(torch::allclose(model->forward(images), model->forward(turned), 1e-4, 1e-6));
  const torch::NoGradGuard no_grad;
  model->position_embedding.zero_();
  EXPECT_TRUE(torch::allclose(model->forward(images), model->forward(turned), 1e-4, 1e-5));
}

TEST(ViT, ClonesWithItsWeights) {
  torch::manual_seed(0);
  ViT model(small_vit());
  const auto copy = std::dynamic_pointer_cast<ViTImpl>(model->clone());
  const at::Tensor images = torch::rand({2, 2, 8, 12});
  EXPECT_TRUE(torch::equal(copy->forward(images), model->forward(images)));
  const torch::NoGradGuard no_grad;
  copy->class_token.add_(1);
  EXPECT_FALSE(torch::equal(copy->forward(images), model->forward(images)));
}

TEST(ViT, LearnsABatch) {
  torch::manual_seed(0);
  ViT model(small_vit().dropout(0.05));
  torch::optim::Adam optimizer(model->parameters(), torch::optim::AdamOptions(0.005));
  const at::Tensor images = torch::rand({10, 2, 8, 12});
  const at::Tensor labels = torch::arange(10) % 5;
  const auto losses = losses_of(model, optimizer, 60, [&] {
    return torch::cross_entropy_loss(model->forward(images), labels);
  });
  EXPECT_NEAR(losses.front(), std::log(5), 0.3);
  EXPECT_LT(losses.back(), 0.5 * losses.front());
}

TEST(ViT, RefusesOptionsThatMakeNoSense) {
  const auto refuses = [](const ViTOptions& options, const char* message) {
    test::expect_error([&] { ViT model(options); }, {"[zoo.vit] expected ", message});
  };
  refuses(small_vit().layers(0), "layers of at least 1, got 0");
  refuses(small_vit().heads(3), "a width that is a multiple of heads, got 16 and 3");
  refuses(small_vit().patch(0), "patch of at least 1");
  refuses(small_vit().channels(0), "channels of at least 1");
  refuses(small_vit().classes(0), "classes of at least 1");
  refuses(small_vit().image_height(0), "image_height of at least 1");
  refuses(small_vit().image_width(10), "image_width that is a multiple of patch, got 10 and 4");
  refuses(small_vit().dropout(1), "dropout from 0 to below 1");
}

TEST(ViT, RefusesImagesOfAnotherSize) {
  ViT model(small_vit());
  test::expect_error([&] { model->forward(torch::zeros({1, 2, 12, 8})); },
                     {"images of sizes (N, 2, 8, 12), got [1, 2, 12, 8]"});
  test::expect_error([&] { model->forward(torch::zeros({2, 8, 12})); }, {"got [2, 8, 12]"});
}

}  // namespace
}  // namespace semitone::zoo

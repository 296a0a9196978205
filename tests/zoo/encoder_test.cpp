#include "semitone/zoo/encoder.h"

#include "src/zoo/encoder_layer.h"
#include "tests/support/errors.h"
#include "tests/support/tolerance.h"
#include "tests/zoo/training.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace semitone::zoo {
namespace {

EncoderOptions small() {
  return EncoderOptions().layers(2).width(16).heads(4).ffn(32).vocabulary(50).max_positions(12);
}

at::Tensor tokens(int64_t sequences, int64_t length) {
  return torch::randint(50, {sequences, length}, torch::kLong);
}

int64_t size_of(const torch::nn::Module& model) {
  int64_t parameters = 0;
  for (const at::Tensor& parameter : model.parameters()) parameters += parameter.numel();
  return parameters;
}

TEST(Encoder, HasTheSizeThatItsShapeGives) {
  const int64_t layer = (16 * 48 + 48) + (16 * 16 + 16) + (16 * 32 + 32) + (32 * 16 + 16) + 4 * 16;
  const int64_t embeddings = (50 + 12) * 16 + 2 * 16;
  EXPECT_EQ(size_of(*Encoder(small())), embeddings + 2 * layer + 16 * 50 + 50);
  EXPECT_EQ(size_of(*Encoder(small().tied_head(true))), embeddings + 2 * layer + 50);
}

TEST(Encoder, HasFourOfBertLargesLayersByDefault) {
  EXPECT_EQ(size_of(*EncoderLayer()), 12'596'224);
  EXPECT_EQ(size_of(*Encoder()), 87'793'232);
}

TEST(Encoder, MapsEveryTokenToLogits) {
  Encoder model(small());
  EXPECT_EQ(model->forward(tokens(3, 7)).sizes(), (std::vector<int64_t>{21, 50}));
  EXPECT_EQ(model->forward(tokens(1, 12)).sizes(), (std::vector<int64_t>{12, 50}));
  EXPECT_EQ(model->forward(tokens(2, 1)).sizes(), (std::vector<int64_t>{2, 50}));
}

TEST(Encoder, SequencesDoNotSeeEachOther) {
  torch::manual_seed(0);
  Encoder model(small());
  model->eval();
  const at::Tensor batch = tokens(3, 5);
  const at::Tensor together = model->forward(batch);
  const at::Tensor alone = model->forward(batch.slice(0, 1, 2));
  const double tolerance = test::reduction_tolerance(torch::kFloat, 16);
  EXPECT_TRUE(torch::allclose(together.slice(0, 5, 10), alone, tolerance, tolerance));
}

TEST(Encoder, TokensSeeEachOtherAndTheirPlaces) {
  torch::manual_seed(0);
  Encoder model(small());
  model->eval();
  const at::Tensor batch = torch::tensor({{1, 2, 3, 2}});
  const at::Tensor logits = model->forward(batch);
  EXPECT_FALSE(torch::allclose(logits[1], logits[3], 1e-4, 1e-4)) << "the same token elsewhere";
  const at::Tensor other = model->forward(torch::tensor({{1, 2, 3, 4}}));
  EXPECT_FALSE(torch::allclose(logits[0], other[0], 1e-5, 1e-6)) << "another token beside it";
}

// The formulas, written out.
at::Tensor expected_layer(EncoderLayerImpl& layer, const at::Tensor& x, int64_t heads) {
  const int64_t length = x.size(0);
  const int64_t width = x.size(1);
  const int64_t part = width / heads;
  const at::Tensor qkv = torch::matmul(x, layer.in_proj->weight.t()) + layer.in_proj->bias;
  std::vector<at::Tensor> outputs;
  for (int64_t head = 0; head < heads; ++head) {
    const auto of = [&](int64_t which) { return qkv.narrow(1, which * width + head * part, part); };
    const double scale = 1 / std::sqrt(static_cast<double>(part));
    const at::Tensor weights = torch::softmax(torch::matmul(of(0), of(1).t()) * scale, 1);
    EXPECT_EQ(weights.size(0), length);
    outputs.push_back(torch::matmul(weights, of(2)));
  }
  const at::Tensor y = layer.norm1(x + layer.out_proj(torch::cat(outputs, 1)));
  return layer.norm2(y + layer.linear2(torch::gelu(layer.linear1(y))));
}

TEST(Encoder, ALayerIsAttentionAndFeedForwardWithTheirNormsAfterThem) {
  torch::manual_seed(0);
  EncoderLayer layer(small());
  layer->to(torch::kDouble);
  layer->eval();
  const torch::NoGradGuard no_grad;
  for (at::Tensor& parameter : layer->parameters()) parameter.add_(torch::rand_like(parameter));
  const at::Tensor x = torch::randn({6, 16}, torch::kDouble);
  const double tolerance = test::reduction_tolerance(torch::kDouble, 32);
  EXPECT_TRUE(
      torch::allclose(layer(x, 6), expected_layer(*layer, x, 4), 100 * tolerance, tolerance));
}

TEST(Encoder, StartsAsBertDoes) {
  torch::manual_seed(0);
  const Encoder model(small().width(64).heads(1).vocabulary(1000));
  for (const auto& item : model->named_parameters()) {
    const at::Tensor& value = item.value();
    SCOPED_TRACE(item.key());
    if (value.dim() == 2) {
      EXPECT_NEAR(value.std().item<double>(), 0.02, 0.002);
    } else {
      const bool is_scale = item.key().find("norm") != std::string::npos &&
                            item.key().find("weight") != std::string::npos;
      EXPECT_TRUE(torch::equal(value, torch::full_like(value, is_scale ? 1 : 0)));
    }
  }
}

TEST(Encoder, ATiedHeadSharesTheEmbeddings) {
  torch::manual_seed(0);
  Encoder model(small().tied_head(true));
  EXPECT_TRUE(model->head.is_empty());
  model->eval();
  // A token that is not in the batch: only the head can change its value.
  const at::Tensor batch = tokens(2, 4).clamp_max(48);
  const at::Tensor before = model->forward(batch);
  {
    const torch::NoGradGuard no_grad;
    model->token_embedding->weight[49].add_(torch::randn({16}));
  }
  const at::Tensor after = model->forward(batch);
  EXPECT_FALSE(torch::allclose(after.select(1, 49), before.select(1, 49)));
  EXPECT_TRUE(torch::equal(after.slice(1, 0, 49), before.slice(1, 0, 49)));
  // Gradients of both uses meet in the one weight: every row has one, used as input or not.
  torch::cross_entropy_loss(after, torch::zeros({8}, torch::kLong)).backward();
  const at::Tensor rows = model->token_embedding->weight.grad().abs().sum(1);
  EXPECT_GT(rows.min().item<double>(), 0);
}

TEST(Encoder, DropsInTrainingOnly) {
  torch::manual_seed(0);
  Encoder model(small().dropout(0.5));
  const at::Tensor batch = tokens(2, 4);
  EXPECT_FALSE(torch::equal(model->forward(batch), model->forward(batch)));
  model->eval();
  EXPECT_TRUE(torch::equal(model->forward(batch), model->forward(batch)));
  Encoder without(small().dropout(0));
  EXPECT_TRUE(torch::equal(without->forward(batch), without->forward(batch)));
}

TEST(Encoder, ClonesWithItsWeights) {
  torch::manual_seed(0);
  for (const bool tied : {false, true}) {
    Encoder model(small().tied_head(tied));
    const auto copy = std::dynamic_pointer_cast<EncoderImpl>(model->clone());
    model->eval();
    copy->eval();
    const at::Tensor batch = tokens(2, 4);
    EXPECT_TRUE(torch::equal(copy->forward(batch), model->forward(batch)));
    const torch::NoGradGuard no_grad;
    for (at::Tensor& parameter : copy->parameters()) parameter.add_(0.1);
    EXPECT_FALSE(torch::equal(copy->forward(batch), model->forward(batch)));
  }
}

TEST(Encoder, LearnsABatch) {
  for (const bool tied : {false, true}) {
    torch::manual_seed(0);
    Encoder model(small().tied_head(tied));
    torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-2));
    const at::Tensor batch = tokens(4, 8);
    const auto losses = losses_of(model, optimizer, 10, [&] {
      return torch::cross_entropy_loss(model->forward(batch), batch.flatten());
    });
    // A tied head knows the tokens from the start.
    if (!tied) {
      EXPECT_NEAR(losses.front(), std::log(50), 0.2);
    }
    EXPECT_LT(losses.back(), 0.8 * losses.front());
  }
}

TEST(Encoder, RefusesOptionsThatMakeNoSense) {
  const auto refuses = [](const EncoderOptions& options, const char* message) {
    test::expect_error([&] { Encoder model(options); }, {"[zoo.encoder] expected ", message});
    test::expect_error([&] { EncoderLayer layer(options); }, {"[zoo.encoder] expected ", message});
  };
  refuses(small().layers(0), "layers of at least 1, got 0");
  refuses(small().width(-16), "width of at least 1, got -16");
  refuses(small().heads(0), "heads of at least 1, got 0");
  refuses(small().heads(3), "a width that is a multiple of heads, got 16 and 3");
  refuses(small().ffn(0), "ffn of at least 1");
  refuses(small().vocabulary(0), "vocabulary of at least 1");
  refuses(small().max_positions(0), "max_positions of at least 1");
  refuses(small().dropout(1), "dropout from 0 to below 1, got 1.0");
  refuses(small().dropout(-0.1), "dropout from 0 to below 1");
  refuses(small().dropout(std::numeric_limits<double>::quiet_NaN()), "dropout from 0 to below 1");
}

TEST(Encoder, RefusesTokensThatMakeNoSense) {
  Encoder model(small());
  test::expect_error([&] { model->forward(torch::zeros({4}, torch::kLong)); },
                     {"int64 tokens (N, length), got int64 of sizes [4]"});
  test::expect_error([&] { model->forward(torch::zeros({2, 4})); },
                     {"got float32 of sizes [2, 4]"});
  test::expect_error([&] { model->forward(tokens(1, 13)); },
                     {"sequences of 1 to 12 tokens, got 13", "max_positions"});
  test::expect_error([&] { model->forward(tokens(1, 0)); }, {"got 0"});
  EXPECT_THROW(model->forward(torch::full({1, 2}, 50, torch::kLong)), c10::Error);
}

}  // namespace
}  // namespace semitone::zoo

#include "semitone/zoo/decoder.h"

#include "src/zoo/decoder_layer.h"
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

DecoderOptions small_decoder() {
  return DecoderOptions().layers(2).width(16).heads(4).ffn(24).vocabulary(50);
}

at::Tensor some_tokens(int64_t sequences, int64_t length) {
  return torch::randint(50, {sequences, length}, torch::kLong);
}

int64_t weights_of(const torch::nn::Module& model) {
  int64_t parameters = 0;
  for (const at::Tensor& parameter : model.parameters()) parameters += parameter.numel();
  return parameters;
}

// In fp64, with weights so large that every part has an effect, and norms that are not 1.
Decoder exact_decoder(const DecoderOptions& options) {
  Decoder model(options);
  model->to(torch::kDouble);
  const torch::NoGradGuard no_grad;
  for (at::Tensor& parameter : model->parameters())
    parameter.add_(torch::randn_like(parameter), 0.2);
  return model;
}

// Sums have at most 50 terms.
double tolerance() {
  return test::reduction_tolerance(torch::kDouble, 50);
}

bool near(const at::Tensor& got, const at::Tensor& want) {
  return torch::allclose(got, want, 100 * tolerance(), tolerance());
}

TEST(Decoder, HasTheSizeThatItsShapeGives) {
  const int64_t layer = 4 * 16 * 16 + 3 * 16 * 24 + 2 * 16;
  EXPECT_EQ(weights_of(*Decoder(small_decoder())), 50 * 16 + 2 * layer + 16);
  EXPECT_EQ(weights_of(*Decoder(small_decoder().tied_head(false))), 2 * 50 * 16 + 2 * layer + 16);
  // A quarter of the keys and values.
  EXPECT_EQ(weights_of(*Decoder(small_decoder().kv_heads(1))),
            50 * 16 + 2 * (layer - 2 * 16 * 12) + 16);
}

TEST(Decoder, HasFortyTwoMillionWeightsByDefault) {
  EXPECT_EQ(weights_of(*Decoder()), 42'142'464);
}

TEST(Decoder, MapsEveryTokenToLogits) {
  Decoder model(small_decoder());
  EXPECT_EQ(model->forward(some_tokens(3, 7)).sizes(), (std::vector<int64_t>{21, 50}));
  EXPECT_EQ(model->forward(some_tokens(2, 1)).sizes(), (std::vector<int64_t>{2, 50}));
  EXPECT_EQ(model->forward(some_tokens(1, 600)).sizes(), (std::vector<int64_t>{600, 50}));
}

TEST(Decoder, LaterTokensDoNotChangeEarlierLogits) {
  torch::manual_seed(0);
  Decoder model = exact_decoder(small_decoder());
  const at::Tensor batch = some_tokens(1, 9);
  const at::Tensor logits = model->forward(batch);
  for (int64_t place = 0; place < 9; ++place) {
    at::Tensor other = batch.clone();
    other[0][place] = (batch[0][place] + 1) % 50;
    const at::Tensor changed = model->forward(other);
    EXPECT_TRUE(near(changed.slice(0, 0, place), logits.slice(0, 0, place))) << place;
    for (int64_t later = place; later < 9; ++later)
      EXPECT_FALSE(torch::allclose(changed[later], logits[later], 1e-6, 1e-6)) << place << later;
  }
  EXPECT_TRUE(near(model->forward(batch.slice(1, 0, 4)), logits.slice(0, 0, 4)));
}

TEST(Decoder, SequencesDoNotSeeEachOther) {
  torch::manual_seed(0);
  Decoder model = exact_decoder(small_decoder());
  const at::Tensor batch = some_tokens(3, 5);
  EXPECT_TRUE(near(model->forward(batch).slice(0, 5, 10), model->forward(batch.slice(0, 1, 2))));
}

TEST(Decoder, RotatesEachPairByItsPosition) {
  torch::manual_seed(0);
  const int64_t size = 8;
  const at::Tensor heads = torch::randn({2, 3, 5, size}, torch::kDouble);
  const at::Tensor got = rotate(heads, rotary_positions(5, size, 1000, heads));
  for (int64_t position = 0; position < 5; ++position) {
    for (int64_t i = 0; i < size / 2; ++i) {
      const double angle =
          static_cast<double>(position) * std::pow(1000.0, -2.0 * static_cast<double>(i) / size);
      const at::Tensor x = heads.select(2, position).select(2, i);
      const at::Tensor y = heads.select(2, position).select(2, i + size / 2);
      EXPECT_TRUE(
          near(got.select(2, position).select(2, i), x * std::cos(angle) - y * std::sin(angle)));
      EXPECT_TRUE(near(got.select(2, position).select(2, i + size / 2),
                       x * std::sin(angle) + y * std::cos(angle)));
    }
  }
}

TEST(Decoder, AttentionScoresDependOnDistancesOnly) {
  torch::manual_seed(0);
  const at::Tensor queries = torch::randn({1, 2, 6, 8}, torch::kDouble);
  const at::Tensor keys = torch::randn({1, 2, 6, 8}, torch::kDouble);
  const RotaryPositions all = rotary_positions(40, 8, 10000, queries);
  const auto scores_from = [&](int64_t first) {
    const RotaryPositions positions{all.cos.narrow(0, first, 6), all.sin.narrow(0, first, 6)};
    return torch::matmul(rotate(queries, positions), rotate(keys, positions).transpose(2, 3));
  };
  const at::Tensor scores = scores_from(0);
  for (const int64_t first : {1, 7, 34}) EXPECT_TRUE(near(scores_from(first), scores)) << first;
  const at::Tensor unrotated = torch::matmul(queries, keys.transpose(2, 3));
  EXPECT_FALSE(torch::allclose(scores, unrotated, 1e-3, 1e-3));
  // A token beside itself has its own score.
  EXPECT_TRUE(near(scores.diagonal(0, 2, 3), unrotated.diagonal(0, 2, 3)));
}

TEST(Decoder, PositionsAreExactInFp32ForTensorsOf16Bits) {
  const at::Tensor heads = torch::zeros({1}, torch::kBFloat16);
  const RotaryPositions positions = rotary_positions(600, 8, 10000, heads);
  EXPECT_EQ(positions.cos.scalar_type(), torch::kFloat);
  const RotaryPositions exact = rotary_positions(600, 8, 10000, heads.to(torch::kDouble));
  // Half a unit in the last place of a position below 1024, and two of its frequency.
  const double allowed = 600 * 3 * test::rounding_tolerance(torch::kFloat);
  EXPECT_TRUE(torch::allclose(positions.cos.to(torch::kDouble), exact.cos, 0, allowed));
  EXPECT_TRUE(torch::allclose(positions.sin.to(torch::kDouble), exact.sin, 0, allowed));
  EXPECT_EQ(rotate(torch::zeros({600, 8}, torch::kBFloat16), positions).scalar_type(),
            torch::kBFloat16);
}

TEST(Decoder, TheFeedForwardPartIsSwiGlu) {
  torch::manual_seed(0);
  DecoderLayer layer(small_decoder());
  layer->to(torch::kDouble);
  const torch::NoGradGuard no_grad;
  for (at::Tensor& parameter : layer->parameters()) parameter.normal_();
  const at::Tensor rows = torch::randn({3, 16}, torch::kDouble);
  const at::Tensor got = layer->feed_forward(rows);
  const auto x = rows.accessor<double, 2>();
  const auto gate = layer->gate_proj->weight.accessor<double, 2>();
  const auto up = layer->up_proj->weight.accessor<double, 2>();
  const auto down = layer->down_proj->weight.accessor<double, 2>();
  for (int64_t row = 0; row < 3; ++row) {
    std::vector<double> hidden(24);
    for (int64_t i = 0; i < 24; ++i) {
      double gated = 0;
      double raised = 0;
      for (int64_t j = 0; j < 16; ++j) {
        gated += gate[i][j] * x[row][j];
        raised += up[i][j] * x[row][j];
      }
      hidden[static_cast<std::size_t>(i)] = gated / (1 + std::exp(-gated)) * raised;
    }
    for (int64_t i = 0; i < 16; ++i) {
      double sum = 0;
      double size = 0;
      for (int64_t j = 0; j < 24; ++j) {
        const double term = down[i][j] * hidden[static_cast<std::size_t>(j)];
        sum += term;
        size += std::abs(term);
      }
      EXPECT_NEAR(got[row][i].item<double>(), sum, tolerance() * size) << row << ' ' << i;
    }
  }
}

// The formulas, written out head by head. Grouped queries share the keys and values of a group.
at::Tensor expected_layer(DecoderLayerImpl& layer, const at::Tensor& x, int64_t heads,
                          int64_t kv_heads) {
  const int64_t length = x.size(0);
  const int64_t part = x.size(1) / heads;
  const auto norm = [](const at::Tensor& rows, const at::Tensor& weight) {
    return rows / (rows.square().mean(1, true) + 1e-5).sqrt() * weight;
  };
  const RotaryPositions positions = rotary_positions(length, part, 10000, x);
  const at::Tensor rows = norm(x, layer.norm1);
  const at::Tensor later = torch::ones({length, length}, torch::kBool).triu(1);
  std::vector<at::Tensor> outputs;
  for (int64_t head = 0; head < heads; ++head) {
    const int64_t of_group = head / (heads / kv_heads);
    const at::Tensor query = rotate(layer.q_proj(rows).narrow(1, head * part, part), positions);
    const at::Tensor key = rotate(layer.k_proj(rows).narrow(1, of_group * part, part), positions);
    const at::Tensor value = layer.v_proj(rows).narrow(1, of_group * part, part);
    const at::Tensor scores = torch::matmul(query, key.t()) / std::sqrt(static_cast<double>(part));
    const at::Tensor weights =
        torch::softmax(scores.masked_fill(later, -std::numeric_limits<double>::infinity()), 1);
    outputs.push_back(torch::matmul(weights, value));
  }
  const at::Tensor y = x + layer.o_proj(torch::cat(outputs, 1));
  return y + layer.feed_forward(norm(y, layer.norm2));
}

TEST(Decoder, ALayerIsCausalAttentionAndFeedForwardWithTheirNormsBeforeThem) {
  for (const int64_t kv_heads : {1, 2, 4}) {
    torch::manual_seed(0);
    DecoderLayer layer(small_decoder().kv_heads(kv_heads));
    layer->to(torch::kDouble);
    const torch::NoGradGuard no_grad;
    for (at::Tensor& parameter : layer->parameters()) parameter.add_(torch::rand_like(parameter));
    const at::Tensor x = torch::randn({6, 16}, torch::kDouble);
    const at::Tensor got = layer->forward(x, rotary_positions(6, 4, 10000, x));
    EXPECT_TRUE(near(got, expected_layer(*layer, x, 4, kv_heads))) << kv_heads;
  }
}

TEST(Decoder, GroupedQueriesEqualRepeatedHeads) {
  torch::manual_seed(0);
  Decoder grouped = exact_decoder(small_decoder().kv_heads(2));
  Decoder repeated = exact_decoder(small_decoder());
  const torch::NoGradGuard no_grad;
  auto targets = repeated->named_parameters();
  for (const auto& item : grouped->named_parameters()) {
    const bool is_shared = item.key().find("k_proj") != std::string::npos ||
                           item.key().find("v_proj") != std::string::npos;
    const at::Tensor value =
        is_shared ? item.value().view({2, 4, 16}).repeat_interleave(2, 0).flatten(0, 1)
                  : item.value();
    targets[item.key()].copy_(value);
  }
  const at::Tensor batch = some_tokens(3, 7);
  EXPECT_TRUE(near(grouped->forward(batch), repeated->forward(batch)));
}

TEST(Decoder, StartsAsGpt2DoesButForBiases) {
  torch::manual_seed(0);
  const Decoder model(small_decoder().width(64).heads(1).ffn(64).vocabulary(500).tied_head(false));
  for (const auto& item : model->named_parameters()) {
    SCOPED_TRACE(item.key());
    EXPECT_EQ(item.key().find("bias"), std::string::npos);
    if (item.value().dim() == 2) {
      EXPECT_NEAR(item.value().std().item<double>(), 0.02, 0.002);
    } else {
      EXPECT_TRUE(torch::equal(item.value(), torch::ones({64})));
    }
  }
}

TEST(Decoder, ATiedHeadSharesTheEmbeddings) {
  torch::manual_seed(0);
  Decoder model(small_decoder());
  EXPECT_TRUE(model->head.is_empty());
  // A token that is not in the batch: only the head can change its value.
  const at::Tensor batch = some_tokens(2, 4).clamp_max(48);
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
  EXPECT_GT(model->token_embedding->weight.grad().abs().sum(1).min().item<double>(), 0);
}

TEST(Decoder, ClonesWithItsWeights) {
  torch::manual_seed(0);
  for (const bool tied : {false, true}) {
    Decoder model(small_decoder().tied_head(tied).kv_heads(2));
    const auto copy = std::dynamic_pointer_cast<DecoderImpl>(model->clone());
    const at::Tensor batch = some_tokens(2, 4);
    const torch::NoGradGuard no_grad;
    const at::Tensor expected = model->forward(batch);
    EXPECT_TRUE(torch::equal(copy->forward(batch), expected));
    // The weights that are tensors, not modules: the copy has its own.
    for (const char* const name : {"norm", "layers.0.norm1", "layers.1.norm2"}) {
      const at::Tensor before = copy->forward(batch);
      copy->named_parameters()[name].add_(torch::randn({16}));
      EXPECT_FALSE(torch::equal(copy->forward(batch), before)) << name;
      EXPECT_TRUE(torch::equal(model->forward(batch), expected)) << name;
    }
  }
}

TEST(Decoder, LearnsABatch) {
  for (const bool tied : {false, true}) {
    torch::manual_seed(0);
    Decoder model(small_decoder().tied_head(tied).kv_heads(2));
    torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-2));
    const at::Tensor batch = some_tokens(4, 9);
    const auto losses = losses_of(model, optimizer, 20, [&] {
      return torch::cross_entropy_loss(model->forward(batch.narrow(1, 0, 8)),
                                       batch.narrow(1, 1, 8).flatten());
    });
    EXPECT_NEAR(losses.front(), std::log(50), 0.2);
    EXPECT_LT(losses.back(), 0.7 * losses.front());
  }
}

TEST(Decoder, RefusesOptionsThatMakeNoSense) {
  const auto refuses = [](const DecoderOptions& options, const char* message) {
    test::expect_error([&] { Decoder model(options); }, {"[zoo.decoder] expected ", message});
    test::expect_error([&] { DecoderLayer layer(options); }, {"[zoo.decoder] expected ", message});
  };
  refuses(small_decoder().layers(0), "layers of at least 1, got 0");
  refuses(small_decoder().width(-16), "width of at least 1, got -16");
  refuses(small_decoder().heads(0), "heads of at least 1, got 0");
  refuses(small_decoder().kv_heads(0), "kv_heads of at least 1, got 0");
  refuses(small_decoder().ffn(0), "ffn of at least 1");
  refuses(small_decoder().vocabulary(0), "vocabulary of at least 1");
  refuses(small_decoder().heads(3), "a width that is a multiple of heads, got 16 and 3");
  refuses(small_decoder().width(12), "an even width / heads, for rotary positions, got 3");
  refuses(small_decoder().kv_heads(3), "heads that are a multiple of kv_heads, got 4 and 3");
  refuses(small_decoder().kv_heads(8), "heads that are a multiple of kv_heads, got 4 and 8");
  refuses(small_decoder().rope_theta(0), "a finite rope_theta above 0, got 0");
  refuses(small_decoder().rope_theta(std::numeric_limits<double>::quiet_NaN()),
          "a finite rope_theta above 0");
  refuses(small_decoder().rope_theta(std::numeric_limits<double>::infinity()),
          "a finite rope_theta above 0");
}

TEST(Decoder, RefusesTokensThatMakeNoSense) {
  Decoder model(small_decoder());
  test::expect_error([&] { model->forward(torch::zeros({4}, torch::kLong)); },
                     {"[zoo.decoder] expected int64 tokens (N, length), got int64 of sizes [4]"});
  test::expect_error([&] { model->forward(torch::zeros({2, 4})); },
                     {"got float32 of sizes [2, 4]"});
  test::expect_error([&] { model->forward(some_tokens(1, 0)); },
                     {"sequences of at least 1 token, got 0"});
  EXPECT_THROW(model->forward(torch::full({1, 2}, 50, torch::kLong)), c10::Error);
}

}  // namespace
}  // namespace semitone::zoo

// torch::nn::MultiheadAttention and layers that contain it, with padded keys.

#include "semitone/amp/initialize.h"
#include "semitone/autocast/autocast.h"
#include "semitone/core/dtype.h"
#include "tests/support/tensors.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace semitone::amp::attention_test {
namespace {

constexpr std::int64_t kLength = 9;
constexpr std::int64_t kBatch = 3;
constexpr std::int64_t kWidth = 16;
constexpr c10::ScalarType kDtypes[] = {torch::kBFloat16, torch::kHalf};

at::Tensor sequence() {
  torch::manual_seed(3);
  return torch::randn({kLength, kBatch, kWidth});
}

// The last keys of each sequence are padding: 1, 2, 3 of them.
at::Tensor padding() {
  const auto places = torch::arange(kLength).unsqueeze(0);
  return places >= kLength - 1 - torch::arange(kBatch).unsqueeze(1);
}

// |got - want| / |want|, over all elements. A zero or missing gradient has an error of 1.
double error_of(const at::Tensor& got, const at::Tensor& want) {
  EXPECT_TRUE(got.defined());
  if (!got.defined()) return 1;
  return ((got.to(torch::kDouble) - want.to(torch::kDouble)).norm() / want.norm()).item<double>();
}

// About ten roundings in a row.
double tolerance(c10::ScalarType dtype) {
  return dtype == torch::kHalf ? 4e-3 : 3e-2;
}

torch::nn::MultiheadAttention make_attention() {
  torch::manual_seed(4);
  return torch::nn::MultiheadAttention(torch::nn::MultiheadAttentionOptions(kWidth, 4));
}

// The results of a run to compare: outputs, and the gradients of weights.
struct Outcome {
  std::vector<at::Tensor> results;
  std::vector<at::Tensor> gradients;
};

void expect_near(const Outcome& got, const Outcome& want, c10::ScalarType dtype) {
  ASSERT_EQ(got.results.size(), want.results.size());
  for (std::size_t i = 0; i < want.results.size(); ++i)
    EXPECT_LT(error_of(got.results[i], want.results[i]), tolerance(dtype)) << "result " << i;
  ASSERT_EQ(got.gradients.size(), want.gradients.size());
  for (std::size_t i = 0; i < want.gradients.size(); ++i) {
    if (want.gradients[i].norm().item<double>() < 1e-6) continue;  // a bias that softmax cancels
    EXPECT_LT(error_of(got.gradients[i], want.gradients[i]), tolerance(dtype)) << "gradient " << i;
  }
}

Outcome gradients_of(const torch::nn::Module& module, std::vector<at::Tensor> results) {
  at::Tensor loss;
  for (const at::Tensor& result : results) {
    const auto term = result.to(torch::kFloat).pow(2).mean();
    loss = loss.defined() ? loss + term : term;
  }
  loss.backward();
  Outcome outcome;
  for (const at::Tensor& result : results) outcome.results.push_back(result.detach());
  for (const at::Tensor& parameter : module.parameters())
    outcome.gradients.push_back(parameter.grad());
  return outcome;
}

Outcome attend(const std::optional<CastPolicy>& policy, bool float_mask) {
  auto attention = make_attention();
  const auto x = sequence();
  const auto later = torch::full({kLength, kLength}, -1e4).triu(1);
  std::vector<at::Tensor> results;
  {
    std::optional<Autocast> region;
    if (policy.has_value()) region.emplace(*policy);
    const auto [output, weights] = attention->forward(x, x, x, padding(), /*need_weights=*/true,
                                                      float_mask ? later : at::Tensor());
    EXPECT_EQ(
        weights.masked_select(padding().unsqueeze(1).expand_as(weights)).abs().max().item<double>(),
        0)
        << "padded keys have no weight";
    results = {output, weights};
  }
  return gradients_of(*attention, results);
}

TEST(PaddedAttention, WorksInARegionOfEveryPreset) {
  for (const bool float_mask : {false, true}) {
    const Outcome want = attend(std::nullopt, float_mask);
    for (const auto dtype : kDtypes) {
      for (const char* preset : {"semitone", "torch", "apex", "paddle", "paddle-o2"}) {
        SCOPED_TRACE(preset + (" " + dtype_name(dtype)) + (float_mask ? ", two masks" : ""));
        expect_near(attend(CastPolicy::by_name(preset, {torch::kCPU, dtype}), float_mask), want,
                    dtype);
      }
    }
  }
}

TEST(PaddedAttention, WorksWhereProductsAreEmulated) {
  const Outcome want = attend(std::nullopt, false);
  for (const auto dtype : kDtypes) {
    for (const auto emulation : {Emulation::always, Emulation::never}) {
      const auto policy = CastPolicy::semitone({torch::kCPU, dtype}).emulation(emulation);
      expect_near(attend(policy, false), want, dtype);
    }
  }
}

TEST(PaddedAttention, WorksAtEveryLevel) {
  const auto run = [](const std::string& level, c10::ScalarType dtype) {
    torch::manual_seed(5);
    auto layer = torch::nn::TransformerEncoderLayer(
        torch::nn::TransformerEncoderLayerOptions(kWidth, 4).dim_feedforward(32).dropout(0));
    torch::nn::TransformerEncoder encoder(torch::nn::TransformerEncoderOptions(layer, 2));
    torch::optim::SGD optimizer(encoder->parameters(), 0.5);
    auto mixed =
        initialize(encoder, optimizer, Options(level).dtype(dtype).loss_scale(1.0).verbosity(0));
    Outcome outcome;
    const auto output = mixed.forward(encoder, sequence(), torch::Tensor(), padding());
    outcome.results = {output.detach()};
    const std::vector<at::Tensor> before = test::copies(mixed.master_params(optimizer));
    // Each element differs, so that layer norms do not cancel the gradient.
    const auto target = torch::linspace(-1, 1, output.numel()).view(output.sizes());
    mixed.scale_loss((output * target).sum(), optimizer).backward();
    mixed.step(optimizer);
    const auto after = mixed.master_params(optimizer);
    for (std::size_t i = 0; i < before.size(); ++i)
      outcome.gradients.push_back((after[i].detach() - before[i]).to(torch::kFloat));
    return outcome;
  };
  const Outcome want = run("O0", torch::kBFloat16);
  for (const auto dtype : kDtypes) {
    for (const char* level : {"O1", "O2"}) {
      SCOPED_TRACE(level + (" " + dtype_name(dtype)));
      const Outcome got = run(level, dtype);
      EXPECT_LT(error_of(got.results[0], want.results[0]), tolerance(dtype));
      for (std::size_t i = 0; i < want.gradients.size(); ++i) {
        if (want.gradients[i].norm().item<double>() < 1e-3) continue;  // the bias of keys
        // Through two layers.
        EXPECT_LT(error_of(got.gradients[i], want.gradients[i]), 3 * tolerance(dtype)) << i;
      }
    }
    const Outcome o3 = run("O3", dtype);
    EXPECT_LT(error_of(o3.results[0], want.results[0]), 2 * tolerance(dtype));
  }
}

TEST(PaddedAttention, WithKeysOfTheirOwnAndWithZeroAttention) {
  const auto run = [](std::optional<c10::ScalarType> dtype) {
    torch::manual_seed(6);
    torch::nn::MultiheadAttention attention(torch::nn::MultiheadAttentionOptions(kWidth, 4)
                                                .kdim(6)
                                                .vdim(6)
                                                .add_zero_attn(true)
                                                .add_bias_kv(true));
    const auto keys = torch::randn({kLength, kBatch, 6});
    const auto values = torch::randn({kLength, kBatch, 6});
    std::vector<at::Tensor> results;
    {
      std::optional<Autocast> region;
      if (dtype.has_value()) region.emplace(torch::kCPU, *dtype);
      results = {std::get<0>(attention->forward(sequence(), keys, values, padding()))};
    }
    return gradients_of(*attention, results);
  };
  const Outcome want = run(std::nullopt);
  for (const auto dtype : kDtypes) expect_near(run(dtype), want, dtype);
}

// One query, one head, a batch of one: sizes of 1 have any strides.
TEST(PaddedAttention, WithSizesOfOne) {
  for (const auto dtype : kDtypes) {
    for (const std::int64_t heads : {1, 4}) {
      for (const std::int64_t batch : {1, 2}) {
        for (const std::int64_t queries : {1, 3}) {
          torch::manual_seed(7);
          torch::nn::MultiheadAttention attention(
              torch::nn::MultiheadAttentionOptions(kWidth, heads));
          const auto x = torch::randn({queries, batch, kWidth});
          const auto mask = torch::zeros({batch, queries}, torch::kBool);
          const auto want = std::get<0>(attention->forward(x, x, x, mask));
          const Autocast region(torch::kCPU, dtype);
          const auto got = std::get<0>(attention->forward(x, x, x, mask));
          EXPECT_LT(error_of(got, want), tolerance(dtype));
        }
      }
    }
  }
}

TEST(PaddedAttention, LeavesOtherProductsAndViewsAlone) {
  const Autocast region(torch::kCPU, torch::kBFloat16);
  const auto q = torch::randn({6, 4, 5});
  const auto k = torch::randn({6, 5, 7});
  EXPECT_EQ(at::bmm(q, k).view({2, 3, 4, 7}).scalar_type(), torch::kBFloat16)
      << "queries that lie otherwise";
  const auto transposed = torch::randn({4, 6, 5}).transpose(0, 1);
  EXPECT_EQ(at::bmm(transposed, k).view({24, 7}).scalar_type(), torch::kBFloat16) << "other sizes";
  const auto product = at::bmm(transposed, k);
  EXPECT_EQ((product * 2).view({2, 3, 4, 7}).scalar_type(), torch::kBFloat16) << "another tensor";
  // Without padding, softmax is next.
  EXPECT_EQ(product.scalar_type(), torch::kBFloat16);
  auto alias = product.view({24, 7});
  alias.zero_();
  EXPECT_EQ(product.abs().max().item<double>(), 0) << "still a view";
}

// A program's own attention that masks its scores in place, through the view.
TEST(PaddedAttention, KeepsAMaskOfAProgramsOwn) {
  const auto q = torch::randn({4, 6, 5}, torch::kBFloat16).transpose(0, 1);
  const auto k = torch::randn({6, 5, 7}, torch::kBFloat16);
  auto mask = torch::zeros({1, 1, 1, 7}, torch::kBool);
  mask.narrow(3, 0, 4).fill_(true);
  const auto masked = [&] {
    auto product = at::bmm(q, k);
    product.view({2, 3, 4, 7}).masked_fill_(mask, -1e9);
    return product;
  };
  const auto check = [&] {
    const auto scores = at::bmm(q, k).to(torch::kFloat).div(2).masked_fill(mask[0], -1e9);
    const auto exact = torch::softmax(scores, -1);
    test::expect_bitwise_equal(torch::softmax(masked() / 2, -1), exact);
    test::expect_bitwise_equal(torch::softmax(masked().div_(2).view({2, 3, 4, 7}), -1),
                               exact.view({2, 3, 4, 7}));
    const auto product = at::bmm(q, k);
    const auto view = product.view({2, 3, 4, 7});
    product.div_(2);
    test::expect_bitwise_equal(torch::softmax(view.masked_fill(mask, -1e9), -1),
                               exact.view({2, 3, 4, 7}));
  };
  for (const char* preset : {"semitone", "none"}) {
    SCOPED_TRACE(preset);
    const Autocast region(CastPolicy::by_name(preset, {torch::kCPU, torch::kBFloat16}));
    check();
    {
      const torch::NoGradGuard no_grad;
      check();
    }
    const c10::InferenceMode inference;
    check();
  }
}

// The view then stays in the product's memory.
TEST(PaddedAttention, MasksWhatAnotherViewOfTheProductSees) {
  const auto q = torch::randn({4, 6, 5}, torch::kBFloat16).transpose(0, 1);
  const auto k = torch::randn({6, 5, 7}, torch::kBFloat16);
  const Autocast region(torch::kCPU, torch::kBFloat16);
  const auto product = at::bmm(q, k);
  const auto rows = product.flatten(0, 1);
  product.view({2, 3, 4, 7}).fill_(-2);
  EXPECT_TRUE(torch::equal(rows, torch::full({24, 7}, -2, torch::kBFloat16)));
}

// Attention without softmax, whose scores the program looks at: the second product has saved them.
TEST(PaddedAttention, LeavesAProductThatTheGraphHasSaved) {
  torch::manual_seed(5);
  const auto q = torch::randn({4, 6, 5}).requires_grad_();
  const auto k = torch::randn({6, 5, 7}).requires_grad_();
  const auto v = torch::randn({6, 7, 5}).requires_grad_();
  const auto gradients = [&](bool looks) {
    at::Tensor out;
    {
      const Autocast region(torch::kCPU, torch::kBFloat16);
      const at::Tensor scores = torch::bmm(q.transpose(0, 1), k);
      out = torch::bmm(scores, v);
      if (looks) {
        EXPECT_EQ(scores.view({2, 3, 4, 7}).numel(), scores.numel());
      }
    }
    return torch::autograd::grad({out.sum()}, {q, k, v});
  };
  test::expect_bitwise_equal(gradients(true), gradients(false));
}

TEST(PaddedAttention, GivesAMaskedProductItsGradient) {
  const auto gradients = [](bool in_place) {
    torch::manual_seed(5);
    const Autocast region(CastPolicy::semitone({torch::kCPU, torch::kBFloat16}));
    const auto q = torch::randn({4, 6, 5}, torch::kBFloat16).requires_grad_();
    const auto k = torch::randn({6, 5, 7}, torch::kBFloat16).requires_grad_();
    auto mask = torch::zeros({1, 1, 1, 7}, torch::kBool);
    mask.narrow(3, 0, 4).fill_(true);
    at::Tensor product = at::bmm(q.transpose(0, 1), k);
    if (in_place) {
      product.view({2, 3, 4, 7}).masked_fill_(mask, -1e9);
    } else {
      product = product.to(torch::kFloat).masked_fill(mask[0], -1e9);
    }
    torch::softmax(product, -1).square().sum().backward();
    return std::vector<at::Tensor>{q.grad(), k.grad()};
  };
  const auto got = gradients(true);
  test::expect_bitwise_equal(got, gradients(false));
  EXPECT_GT(got[0].abs().max().item<double>(), 0);
}

}  // namespace
}  // namespace semitone::amp::attention_test

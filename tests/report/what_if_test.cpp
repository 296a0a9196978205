#include "semitone/report/what_if.h"

#include "src/report/rounded_values.h"
#include "tests/support/errors.h"
#include "tests/support/toy_nets.h"

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <limits>
#include <string>
#include <vector>

namespace semitone::report::what_if_test {
namespace {

using semitone::test::expect_error;

// The first row of an operator in a layer.
const WhatIfRow* find(const std::vector<WhatIfRow>& rows, const std::string& op,
                      const std::string& layer, bool backward = false) {
  for (const WhatIfRow& row : rows)
    if (row.op == op && row.layer == layer && row.backward == backward) return &row;
  return nullptr;
}

const FormatEffect& effect_of(const WhatIfRow* row, c10::ScalarType format) {
  static const FormatEffect none;
  if (row == nullptr) {
    ADD_FAILURE() << "there is no such row";
    return none;
  }
  for (const FormatEffect& effect : row->effects)
    if (effect.format == format) return effect;
  ADD_FAILURE() << "there is no such format";
  return none;
}

at::Tensor rounded(const at::Tensor& values, c10::ScalarType format) {
  return values.to(format).to(torch::kFloat);
}

double relative(const at::Tensor& is, const at::Tensor& was) {
  return ((is - was).to(torch::kDouble).norm() / was.to(torch::kDouble).norm()).item<double>();
}

TEST(WhatIf, TheErrorOfAProductIsThatOfRoundedArguments) {
  torch::manual_seed(1);
  const semitone::test::ToyNet net;
  const at::Tensor x = torch::randn({5, 6});
  WhatIf what_if(*net);
  torch::nn::Linear(net->first)(x);
  const auto rows = what_if.rows();
  ASSERT_EQ(rows.size(), 1U);
  EXPECT_EQ(rows[0].op, "addmm");
  EXPECT_EQ(rows[0].layer, "first");
  EXPECT_EQ(rows[0].calls, 1);
  const at::Tensor exact = torch::addmm(net->first->bias, x, net->first->weight.t()).detach();
  for (const auto format : {torch::kHalf, torch::kBFloat16}) {
    const at::Tensor again =
        rounded(torch::addmm(rounded(net->first->bias, format), rounded(x, format),
                             rounded(net->first->weight, format).t()),
                format);
    EXPECT_NEAR(effect_of(&rows[0], format).error, relative(again.detach(), exact), 1e-7);
    EXPECT_EQ(effect_of(&rows[0], format).non_finite, 0);
  }
  // The bias is not rounded to fp8.
  const double x_scale = 448 / x.abs().max().item<double>();
  const double w_scale = 448 / net->first->weight.abs().max().item<double>();
  const at::Tensor again =
      torch::addmm(net->first->bias, rounded(x * x_scale, torch::kFloat8_e4m3fn) / x_scale,
                   (rounded(net->first->weight * w_scale, torch::kFloat8_e4m3fn) / w_scale).t());
  EXPECT_NEAR(effect_of(&rows[0], torch::kFloat8_e4m3fn).error, relative(again.detach(), exact),
              1e-6);
}

TEST(WhatIf, NamesTheLayersOfBothPasses) {
  torch::manual_seed(2);
  semitone::test::ToyConvNet net;
  WhatIf what_if(*net);
  net->forward(torch::randn({2, 2, 6, 6})).sum().backward();
  const auto rows = what_if.rows();
  EXPECT_NE(find(rows, "conv2d", "conv"), nullptr) << what_if.to_string();
  EXPECT_NE(find(rows, "addmm", "head"), nullptr) << what_if.to_string();
  EXPECT_NE(find(rows, "convolution_backward", "conv", true), nullptr) << what_if.to_string();
  const WhatIfRow* const products = find(rows, "mm", "head", true);
  ASSERT_NE(products, nullptr) << what_if.to_string();
  EXPECT_EQ(products->calls, 2);  // the gradients of the input and of the weight
  EXPECT_EQ(rows.size(), 4U) << what_if.to_string();
}

TEST(WhatIf, CountsWhatAFormatCannotHold) {
  const semitone::test::ToyNet net;
  const torch::NoGradGuard no_grad;
  net->first->weight.fill_(1e-9);
  net->first->bias.zero_();
  net->second->weight.fill_(1);
  WhatIf what_if(*net);
  torch::nn::Linear(net->first)(torch::ones({2, 6}));
  // Three of eight columns exceed 65504.
  at::Tensor large = torch::ones({2, 8});
  large.narrow(1, 0, 3).fill_(1e6);
  torch::nn::Linear(net->second)(large);
  const auto rows = what_if.rows();
  const auto small = effect_of(find(rows, "addmm", "first"), torch::kHalf);
  EXPECT_DOUBLE_EQ(small.underflow, 48.0 / (48 + 12));  // the weight, of weight and input
  EXPECT_EQ(small.error, 1);
  EXPECT_EQ(effect_of(find(rows, "addmm", "first"), torch::kBFloat16).underflow, 0);
  EXPECT_EQ(effect_of(find(rows, "addmm", "first"), torch::kFloat8_e4m3fn).underflow, 0);
  const auto overflow = effect_of(find(rows, "addmm", "second"), torch::kHalf);
  EXPECT_DOUBLE_EQ(overflow.overflow, 6.0 / (16 + 24 + 3));
  EXPECT_EQ(overflow.non_finite, 6);  // every element of the result
  EXPECT_EQ(effect_of(find(rows, "addmm", "second"), torch::kBFloat16).overflow, 0);
}

TEST(WhatIf, ScalesOfFp8AreThoseOfTheStepsBefore) {
  torch::manual_seed(5);
  const semitone::test::ToyNet net;
  const torch::NoGradGuard no_grad;
  WhatIf what_if(*net, WhatIfOptions().formats({torch::kFloat8_e4m3fn}).amax_history(2));
  const auto step = [&](double value) {
    torch::nn::Linear(net->first)(torch::full({1, 6}, value));
    what_if.next_step();
    return what_if.rows().at(0).effects.at(0).overflow;
  };
  const double elements = 6 + 48;  // of input and weight
  EXPECT_EQ(step(1), 0);
  EXPECT_DOUBLE_EQ(step(4), 6 / (2 * elements));  // the scale is that of 1
  EXPECT_DOUBLE_EQ(step(4), 6 / (3 * elements));  // no more
  EXPECT_DOUBLE_EQ(step(1), 6 / (4 * elements));
  EXPECT_DOUBLE_EQ(step(1), 6 / (5 * elements));
  EXPECT_DOUBLE_EQ(step(4), 12 / (6 * elements));  // the steps with 4 are forgotten
}

std::vector<at::Tensor> trained(bool is_watched) {
  torch::manual_seed(3);
  semitone::test::ToyConvNet net;
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  std::unique_ptr<WhatIf> what_if;
  if (is_watched) what_if = std::make_unique<WhatIf>(*net);
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    torch::dropout(net->forward(torch::randn({2, 2, 6, 6})), 0.5, true).square().sum().backward();
    optimizer.step();
    if (what_if) what_if->next_step();
  }
  if (is_watched) {
    EXPECT_EQ(what_if->rows().size(), 4U);
  }
  return net->parameters();
}

TEST(WhatIf, EachArgumentHasAScaleOfItsOwn) {
  torch::manual_seed(6);
  const semitone::test::ToyNet net;
  WhatIf what_if(*net, WhatIfOptions().formats({torch::kFloat8_e4m3fn}));
  for (int step = 0; step < 2; ++step) {
    // The weight's gradient is mm(gradient, x), that of the input is mm(gradient, weight).
    torch::nn::Linear(net->first)(1e6 * torch::rand({2, 6}).add(0.5).requires_grad_())
        .sum()
        .backward();
    what_if.next_step();
  }
  const auto rows = what_if.rows();
  const auto* const products = find(rows, "mm", "first", true);
  ASSERT_NE(products, nullptr);
  EXPECT_EQ(products->calls, 4);
  EXPECT_LT(products->effects[0].underflow, 0.01);
}

TEST(WhatIf, InfinitiesAndPausesLeaveTheScale) {
  torch::manual_seed(7);
  const semitone::test::ToyNet net;
  const torch::NoGradGuard no_grad;
  WhatIf what_if(*net, WhatIfOptions().formats({torch::kFloat8_e4m3fn}).amax_history(1));
  const at::Tensor x = torch::rand({2, 6}) * 1e-6;
  at::Tensor infinite = x.clone();
  infinite[0][0] = std::numeric_limits<float>::infinity();
  for (const at::Tensor& input : {infinite, x}) {
    torch::nn::Linear(net->first)(input);
    what_if.next_step();
    what_if.next_step();  // a step without a call
  }
  const auto effect = what_if.rows().at(0).effects.at(0);
  EXPECT_EQ(effect.underflow, 0);
  EXPECT_LT(effect.error, 0.2);
}

// As with a mask of scores whose other values are not 0: a hidden key stays hidden.
TEST(WhatIf, AnInfStaysOneInFp8) {
  const auto inf = std::numeric_limits<float>::infinity();
  const at::Tensor mask = torch::tensor({-inf, -8.0F, inf, 0.5F, 4.0F});
  for (const auto format : {torch::kFloat8_e4m3fn, torch::kFloat8_e5m2})
    EXPECT_TRUE(torch::equal(semitone::report::rounded(mask, format, 8).values, mask)) << format;
}

TEST(WhatIf, LooksOnlyAtMemoryThatThereIs) {
  const semitone::test::ToyNet net;
  WhatIf what_if(*net);
  at::mm(torch::empty({2, 2}, torch::kMeta), torch::empty({2, 2}, torch::kMeta));
  torch::nn::Linear(net->first)(torch::ones({2, 6}));
  EXPECT_EQ(what_if.rows().size(), 2U);
}

TEST(WhatIf, ChangesNoResult) {
  const auto plain = trained(false);
  const auto watched = trained(true);
  for (std::size_t i = 0; i < plain.size(); ++i)
    EXPECT_TRUE(torch::equal(plain[i], watched[i])) << i;
}

TEST(WhatIf, RandomNumbersAreThoseOfTheTraining) {
  const semitone::test::ToyNet net;
  const auto attend = [] {
    torch::manual_seed(4);
    const at::Tensor x = torch::randn({1, 2, 8, 4});
    const at::Tensor result = at::scaled_dot_product_attention(x, x, x, {}, /*dropout_p=*/0.5);
    return at::cat({result.flatten(), torch::rand({3})});
  };
  const at::Tensor plain = attend();
  WhatIf what_if(*net);
  EXPECT_TRUE(torch::equal(attend(), plain));
  const auto rows = what_if.rows();
  // The same elements are dropped, so only rounding remains.
  EXPECT_LT(effect_of(find(rows, "scaled_dot_product_attention", ""), torch::kHalf).error, 0.01);
}

TEST(WhatIf, RandomNumbersOfAnyChosenOperatorAreThoseOfTheTraining) {
  const semitone::test::ToyNet net;
  torch::nn::LSTM lstm(torch::nn::LSTMOptions(4, 4).num_layers(2).dropout(0.5));
  auto own = at::globalContext().defaultGenerator(torch::kCPU).clone();
  const auto draw = [&] {
    torch::manual_seed(4);
    own.set_current_seed(5);
    const at::Tensor x = torch::randn({3, 2, 4});
    const at::Tensor dropped = torch::dropout(x, 0.5, true);
    const at::Tensor recurrent = std::get<0>(lstm(x));
    const at::Tensor chosen = at::bernoulli(x.sigmoid(), own);
    return at::cat({dropped.flatten(), recurrent.flatten(), chosen.flatten(), torch::rand({3}),
                    torch::rand({3}, own)});
  };
  const at::Tensor plain = draw();
  WhatIf what_if(*net, WhatIfOptions().operators({"dropout", "lstm", "bernoulli"}));
  EXPECT_TRUE(torch::equal(draw(), plain));
  const auto rows = what_if.rows();
  for (const char* const op : {"dropout", "lstm", "bernoulli"})
    EXPECT_LT(effect_of(find(rows, op, ""), torch::kHalf).error, 0.01) << op;
}

TEST(WhatIf, LeavesRunningStatisticsAlone) {
  const semitone::test::ToyNet net;
  const at::Tensor x = torch::randn({4, 3, 5});
  const auto mean_after = [&x] {
    torch::nn::InstanceNorm1d norm(torch::nn::InstanceNorm1dOptions(3).track_running_stats(true));
    norm(x);
    return norm->running_mean;
  };
  const at::Tensor plain = mean_after();
  const WhatIf what_if(*net, WhatIfOptions().operators({"instance_norm"}));
  EXPECT_TRUE(torch::equal(mean_after(), plain));
}

TEST(WhatIf, NamesThatAreNotUtf8AreReplacedInJson) {
  torch::nn::Module model;
  const auto layer = model.register_module("layer\xff", torch::nn::Linear(2, 2).ptr());
  const WhatIf what_if(model);
  layer->forward(torch::ones({1, 2}));
  EXPECT_THAT(what_if.to_json(), testing::HasSubstr("layer\xEF\xBF\xBD"));
}

TEST(WhatIf, AnExceptionOfAnOperatorPassesThrough) {
  const semitone::test::ToyNet net;
  WhatIf what_if(*net);
  EXPECT_THROW(torch::nn::Linear(net->first)(torch::ones({2, 7})), c10::Error);
  torch::nn::Linear(net->first)(torch::ones({2, 6}));
  EXPECT_EQ(what_if.rows().size(), 1U);
}

TEST(WhatIf, ExaminesTheChosenOperators) {
  semitone::test::ToyNet net;
  WhatIf what_if(*net, WhatIfOptions().operators({"aten::exp", "relu"}));
  net->forward(torch::randn({2, 6})).exp();
  const auto rows = what_if.rows();
  ASSERT_EQ(rows.size(), 2U);
  EXPECT_EQ(rows[0].op, "relu");
  EXPECT_EQ(rows[1].op, "exp");
}

TEST(WhatIf, SaysItAsTextAndAsJson) {
  const semitone::test::ToyNet net;
  WhatIf what_if(*net);
  torch::nn::Linear(net->first)(torch::ones({2, 6}));
  EXPECT_NE(what_if.to_string().find("forward addmm in first"), std::string::npos);
  const auto json = nlohmann::json::parse(what_if.to_json());
  EXPECT_EQ(json.at("rows").at(0).at("layer"), "first");
  EXPECT_EQ(json.at("rows").at(0).at("effects").at(3).at("format"), "float8_e5m2");
}

TEST(WhatIf, RefusesOptionsOutOfRange) {
  const semitone::test::ToyNet net;
  expect_error([&] { WhatIf(*net, WhatIfOptions().formats({torch::kFloat})); },
               {"report.what_if", "float16", "float32"});
  expect_error([&] { WhatIf(*net, WhatIfOptions().formats({})); }, {"at least one format"});
  expect_error([&] { WhatIf(*net, WhatIfOptions().operators({"conv9d"})); }, {"'conv9d'"});
  expect_error([&] { WhatIf(*net, WhatIfOptions().amax_history(0)); }, {"at least 1 step"});
}

}  // namespace
}  // namespace semitone::report::what_if_test

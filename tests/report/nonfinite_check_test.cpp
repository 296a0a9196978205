#include "semitone/report/nonfinite_check.h"

#include "tests/support/errors.h"
#include "tests/support/tensors.h"
#include "tests/support/toy_nets.h"

#include <ATen/ThreadLocalState.h>
#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace semitone::nonfinite_check_test {
namespace {

using report::NonFiniteCheck;
using report::NonFiniteCheckOptions;
using report::NonFiniteError;
using report::NonFiniteFinding;
using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;
using Origin = NonFiniteFinding::Origin;

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

at::Tensor batch() {
  return torch::linspace(-1, 1, 24).view({4, 6});
}

// The finding of a check, which must have one.
NonFiniteFinding found_by(const NonFiniteCheck& check) {
  auto finding = check.finding();
  EXPECT_TRUE(finding.has_value()) << "no finding";
  return finding.value_or(NonFiniteFinding{});
}

void expect_none(const NonFiniteCheck& check) {
  const auto finding = check.finding();
  EXPECT_FALSE(finding.has_value()) << finding->to_string();
  EXPECT_NO_THROW(check.throw_if_found());
}

// A net whose activation is the fault.
test::ToyNet net_with(at::Tensor (*activation)(const at::Tensor&)) {
  torch::manual_seed(1);
  return test::ToyNet(test::ToyNetOptions{.activation = activation});
}

at::Tensor log_of_zeros(const at::Tensor& x) {
  return torch::log(torch::zeros_like(x));
}

TEST(NonFiniteCheck, TheOperatorOfTheForwardPassIsNamedWithItsLayer) {
  auto net = net_with(log_of_zeros);
  NonFiniteCheck check(*net, NonFiniteCheckOptions().rank(3));
  net(batch());
  const NonFiniteFinding finding = found_by(check);
  EXPECT_EQ(finding.origin, Origin::op);
  EXPECT_EQ(finding.op, "log");
  EXPECT_FALSE(finding.backward);
  EXPECT_EQ(finding.layer, "first");
  EXPECT_TRUE(finding.is_after_layer);
  EXPECT_EQ(finding.values.name, "result");
  EXPECT_EQ(finding.values.dtype, torch::kFloat);
  EXPECT_THAT(finding.values.sizes, ElementsAre(4, 8));
  EXPECT_EQ(finding.values.negative_infs, 32);
  EXPECT_EQ(finding.values.positive_infs + finding.values.nans, 0);
  EXPECT_THAT(finding.values.first, ElementsAre(0, 0));
  EXPECT_EQ(finding.step, 1);
  EXPECT_EQ(finding.rank, 3);
  ASSERT_EQ(finding.arguments.size(), 1U);
  EXPECT_EQ(finding.arguments[0].name, "self");
  EXPECT_EQ(finding.arguments[0].max, 0);
}

TEST(NonFiniteCheck, ALayerThatOverflowsIsNamedWithItsParameters) {
  auto net = net_with(at::relu);
  {
    const torch::NoGradGuard no_grad;
    net->second->weight[1][2] = 3e38;
    net->first->bias.fill_(100);
  }
  NonFiniteCheck check(*net);
  net(batch());
  const NonFiniteFinding finding = found_by(check);
  EXPECT_EQ(finding.op, "addmm");
  EXPECT_EQ(finding.layer, "second");
  EXPECT_FALSE(finding.is_after_layer);
  EXPECT_EQ(finding.values.positive_infs, 4);
  EXPECT_THAT(finding.values.first, ElementsAre(0, 1));
  ASSERT_EQ(finding.arguments.size(), 3U);
  EXPECT_EQ(finding.arguments[0].parameter, "second.bias");
  EXPECT_EQ(finding.arguments[2].parameter, "second.weight");
  EXPECT_FLOAT_EQ(static_cast<float>(finding.arguments[2].max), 3e38F);
}

TEST(NonFiniteCheck, TheOperatorOfTheBackwardPassIsNamedWithThatOfTheForwardPass) {
  auto net = net_with([](const at::Tensor& x) { return torch::sqrt(torch::relu(x - 100)); });
  NonFiniteCheck check(*net);
  const at::Tensor loss = net(batch()).sum();
  expect_none(check);
  loss.backward();
  const NonFiniteFinding finding = found_by(check);
  EXPECT_EQ(finding.origin, Origin::op);
  EXPECT_EQ(finding.op, "div.Tensor");
  EXPECT_TRUE(finding.backward);
  EXPECT_EQ(finding.node, "SqrtBackward0");
  EXPECT_EQ(finding.forward_op, "sqrt");
  EXPECT_EQ(finding.layer, "first");
  EXPECT_TRUE(finding.is_after_layer);
  EXPECT_GT(finding.values.positive_infs + finding.values.negative_infs, 0);
}

struct LogGradient : torch::autograd::Function<LogGradient> {
  static at::Tensor forward(torch::autograd::AutogradContext* /*context*/, const at::Tensor& x) {
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* /*context*/,
                                                 const torch::autograd::variable_list& gradients) {
    return {torch::log(gradients[0] * 0 - 1)};
  }
};

TEST(NonFiniteCheck, TheBackwardFunctionThatCallsTheOperatorIsNamed) {
  auto net = net_with([](const at::Tensor& x) { return LogGradient::apply(x); });
  NonFiniteCheck check(*net);
  net(batch()).sum().backward();
  const NonFiniteFinding finding = found_by(check);
  EXPECT_EQ(finding.op, "log");
  EXPECT_TRUE(finding.backward);
  EXPECT_EQ(finding.forward_op, "LogGradient");
  EXPECT_EQ(finding.values.nans, 32);
}

// Without operators: what kernels on raw memory do.
at::Tensor with_raw_nan(const at::Tensor& x) {
  at::Tensor result = torch::empty_like(x);
  auto* const data = result.mutable_data_ptr<float>();
  for (std::int64_t i = 0; i < result.numel(); ++i) data[i] = i == 5 ? std::nanf("") : 1;
  return result;
}

struct RawGradient : torch::autograd::Function<RawGradient> {
  static at::Tensor forward(torch::autograd::AutogradContext* /*context*/, const at::Tensor& x) {
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* /*context*/,
                                                 const torch::autograd::variable_list& gradients) {
    return {with_raw_nan(gradients[0])};
  }
};

struct RawForward : torch::autograd::Function<RawForward> {
  static at::Tensor forward(torch::autograd::AutogradContext* /*context*/, const at::Tensor& x) {
    return with_raw_nan(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* /*context*/,
                                                 torch::autograd::variable_list gradients) {
    return gradients;
  }
};

TEST(NonFiniteCheck, BackwardCodeWithoutOperatorsIsFoundByItsGradient) {
  auto net = net_with([](const at::Tensor& x) { return RawGradient::apply(x); });
  NonFiniteCheck check(*net);
  net(batch()).sum().backward();
  const NonFiniteFinding finding = found_by(check);
  EXPECT_EQ(finding.origin, Origin::function);
  EXPECT_EQ(finding.op, "RawGradient");
  EXPECT_TRUE(finding.backward);
  EXPECT_EQ(finding.values.nans, 1);
  EXPECT_THAT(finding.values.first, ElementsAre(0, 5));
  EXPECT_THAT(finding.to_string(),
              HasSubstr("the backward function of 'RawGradient' returned 1 nan"));
}

TEST(NonFiniteCheck, AGradientOfCodeWithoutOperatorsMayBeAddedToAnother) {
  const at::Tensor x = torch::ones({8}, torch::requires_grad());
  const at::Tensor y = x * 2;
  const NonFiniteCheck check;
  (RawGradient::apply(y) + y.pow(2)).sum().backward();
  const NonFiniteFinding finding = found_by(check);
  EXPECT_EQ(finding.origin, Origin::function) << finding.to_string();
  EXPECT_EQ(finding.op, "RawGradient");
}

TEST(NonFiniteCheck, AGradientOfCodeWithoutOperatorsIsNamedByItsParameter) {
  const at::Tensor weight = torch::ones({8}, torch::requires_grad());
  auto net = torch::nn::Module("net");
  net.register_parameter("weight", weight);
  NonFiniteCheck check(net);
  RawGradient::apply(weight).sum().backward();
  const NonFiniteFinding finding = found_by(check);
  EXPECT_EQ(finding.op, "RawGradient");
  EXPECT_EQ(finding.values.parameter, "weight");
}

TEST(NonFiniteCheck, ForwardCodeWithoutOperatorsIsFoundByTheNextOperator) {
  auto net = net_with([](const at::Tensor& x) { return RawForward::apply(x); });
  NonFiniteCheck check(*net);
  net(batch());
  const NonFiniteFinding finding = found_by(check);
  EXPECT_EQ(finding.origin, Origin::function);
  EXPECT_EQ(finding.op, "RawForward");
  EXPECT_FALSE(finding.backward);
  EXPECT_EQ(finding.values.nans, 1);
}

TEST(NonFiniteCheck, ValuesOfABatchComeFromOutside) {
  auto net = net_with(at::relu);
  const at::Tensor x = batch();
  x[2][3] = kNan;
  const NonFiniteCheck check(*net);
  net(x);
  const NonFiniteFinding finding = found_by(check);
  EXPECT_EQ(finding.origin, Origin::outside);
  EXPECT_EQ(finding.layer, "first");
  EXPECT_EQ(finding.values.parameter, "");
  EXPECT_EQ(finding.values.nans, 1);
  EXPECT_THAT(finding.values.first, ElementsAre(2, 3));
  EXPECT_THAT(test::message_of<NonFiniteError>([&] { check.throw_if_found(); }),
              HasSubstr("check the batch"));
}

TEST(NonFiniteCheck, InfiniteParametersAreNamed) {
  auto net = net_with(at::relu);
  {
    const torch::NoGradGuard no_grad;
    net->second->bias[1] = kInf;
  }
  NonFiniteCheck check;
  check.add_model(*net, "generator");
  net(batch());
  const NonFiniteFinding finding = found_by(check);
  EXPECT_EQ(finding.origin, Origin::outside);
  EXPECT_EQ(finding.values.parameter, "generator.second.bias");
  EXPECT_EQ(finding.values.positive_infs, 1);
}

TEST(NonFiniteCheck, MasksAreIntended) {
  const at::Tensor made_before = torch::full({4, 4}, -kInf).triu(1);
  const at::Tensor scores = torch::randn({4, 4}, torch::requires_grad());
  const NonFiniteCheck check;
  const at::Tensor made_here = torch::full({4, 4}, -kInf).triu(1);
  const at::Tensor masked = scores.masked_fill(torch::ones({4, 4}, torch::kBool).triu(1), -kInf);
  for (const at::Tensor& x : {scores + made_before, scores + made_here, masked})
    torch::softmax(x, 1).pow(2).sum().backward();
  expect_none(check);
}

TEST(NonFiniteCheck, WhatIsMadeOfAMaskIsFound) {
  const NonFiniteCheck check;
  const at::Tensor mask = torch::full({2, 3}, -kInf);
  torch::softmax(torch::randn({2, 3}) + mask, 1);  // a row without any score
  const NonFiniteFinding finding = found_by(check);
  EXPECT_EQ(finding.op, "_softmax");
  EXPECT_THAT(finding.called_by, ElementsAre("softmax.int"));
  EXPECT_EQ(finding.values.nans, 6);
  ASSERT_EQ(finding.arguments.size(), 1U);
  EXPECT_EQ(finding.arguments[0].negative_infs, 6);
}

TEST(NonFiniteCheck, OperatorsInPlaceAreFoundByWhatWasThereBefore) {
  NonFiniteCheck check;
  at::Tensor x = torch::zeros({3});
  x.log_();
  const NonFiniteFinding finding = found_by(check);
  EXPECT_EQ(finding.op, "log_");
  EXPECT_EQ(finding.values.name, "self");
  ASSERT_EQ(finding.arguments.size(), 1U);
  EXPECT_TRUE(finding.arguments[0].overwritten);
  check.next_step();
  x.mul_(2);  // -inf, of the same kind
  expect_none(check);
  x.mul_(0);
  EXPECT_EQ(found_by(check).op, "mul.out");
  EXPECT_THAT(found_by(check).called_by, Contains("mul_.Scalar"));
}

TEST(NonFiniteCheck, ValuesThatWereThereBeforeAnOperatorInPlaceComeFromOutside) {
  at::Tensor x = torch::full({3}, kNan);
  const NonFiniteCheck check;
  x.detach_();  // as zero_grad() does with the last step's gradients
  x.t_();
  expect_none(check);
  x.add_(1);
  const NonFiniteFinding finding = found_by(check);
  EXPECT_EQ(finding.origin, Origin::outside);
  EXPECT_EQ(finding.op, "add_.Scalar");
  EXPECT_EQ(finding.values.nans, 3);
  EXPECT_THAT(finding.to_string(), HasSubstr("operator 'add_.Scalar' got 3 nan in self"));
}

TEST(NonFiniteCheck, OutAndListArgumentsAreResults) {
  NonFiniteCheck check;
  at::Tensor out = torch::full({2}, kNan);
  at::log_out(out, torch::zeros({2}));
  EXPECT_EQ(found_by(check).op, "log.out");
  check.next_step();
  at::mul_out(out, out, torch::zeros({2}));  // an argument and the result
  EXPECT_EQ(found_by(check).op, "mul.out");
  EXPECT_EQ(found_by(check).values.nans, 2);
  check.next_step();
  std::vector<at::Tensor> list{torch::ones({2}), torch::zeros({2})};
  at::_foreach_log_(list);
  const NonFiniteFinding finding = found_by(check);
  EXPECT_EQ(finding.op, "log_");
  EXPECT_THAT(finding.called_by, ElementsAre("_foreach_log_"));
}

TEST(NonFiniteCheck, MemoryThatIsNotInitialisedIsNotLookedAt) {
  const NonFiniteCheck check;
  at::Tensor x = torch::empty({64});
  // What such memory may hold, written by no operator.
  std::fill_n(x.mutable_data_ptr<float>(), x.numel(), std::nanf(""));
  x.copy_(torch::ones({64}));
  at::Tensor y = torch::empty_like(x);
  std::fill_n(y.mutable_data_ptr<float>(), y.numel(), std::nanf(""));
  y.uniform_();
  torch::add_out(y, x, x);
  expect_none(check);
}

TEST(NonFiniteCheck, IgnoredOperatorsAndWhatTheyCallAreIntended) {
  const NonFiniteCheck check(
      NonFiniteCheckOptions().ignore({"aten::log", "softmax.int", "reciprocal"}));
  const at::Tensor log = torch::log(torch::zeros({3}));
  const at::Tensor nan = torch::softmax(log, 0);
  EXPECT_TRUE(torch::isnan(nan + 1).all().item<bool>());
  expect_none(check);
}

TEST(NonFiniteCheck, OptionsOutOfRangeAreErrors) {
  test::expect_error([] { NonFiniteCheck check(NonFiniteCheckOptions().every(0)); },
                     {"at least 1 step", "got 0"});
  test::expect_error([] { NonFiniteCheck check(NonFiniteCheckOptions().ignore({"lgo"})); },
                     {"'lgo'"});
}

TEST(NonFiniteCheck, OtherTensorsAreLeftAlone) {
  const NonFiniteCheck check;
  torch::zeros({0}).log();
  (torch::ones({3}, torch::kInt) + 1).sum();
  const at::Tensor sparse = torch::eye(3).to_sparse();
  (sparse + sparse).coalesce();
  torch::quantize_per_tensor(torch::ones({3}), 0.1, 0, torch::kQInt8).dequantize();
  torch::zeros({3}, torch::kMeta).log();
  expect_none(check);
}

TEST(NonFiniteCheck, AllFormatsAreLookedAt) {
  for (const auto dtype : {torch::kHalf, torch::kBFloat16, torch::kDouble, torch::kComplexFloat}) {
    const NonFiniteCheck check;
    torch::ones({3}).to(dtype).div(torch::zeros({3}).to(dtype));
    const NonFiniteFinding finding = found_by(check);
    EXPECT_EQ(finding.op, "div.Tensor");
    EXPECT_EQ(finding.values.dtype, dtype);
    EXPECT_EQ(finding.arguments.size(), 2U);
  }
  const NonFiniteCheck check;
  torch::full({3}, 1e6).to(torch::kFloat8_e5m2);
  EXPECT_THAT(found_by(check).called_by, ElementsAre("_to_copy", "to.dtype"));
}

TEST(NonFiniteCheck, ACastThatOverflowsSaysWhatItGot) {
  const NonFiniteCheck check;
  torch::tensor({1.0F, 70000.0F}).to(torch::kHalf);
  EXPECT_EQ(found_by(check).to_string(),
            "operator 'copy_' made 1 inf in self (float16 [2], first at [1], otherwise from 1 to "
            "1), in the forward pass, called by '_to_copy' by 'to.dtype', at step 1; its "
            "arguments: src float32 [2] from 1 to 70000");
}

TEST(NonFiniteCheck, TheFirstFindingStaysUntilTheNextStep) {
  NonFiniteCheck check(NonFiniteCheckOptions().first_step(7));
  torch::log(torch::zeros({3}));
  torch::sqrt(-torch::ones({3}));
  EXPECT_EQ(found_by(check).op, "log");
  const std::string message = test::message_of<NonFiniteError>([&] { check.throw_if_found(); });
  EXPECT_THAT(message, HasSubstr("operator 'log' made 3 -inf"));
  EXPECT_THAT(message, HasSubstr("at step 7"));
  check.next_step();
  EXPECT_EQ(check.step(), 8);
  expect_none(check);
  torch::sqrt(-torch::ones({3}));
  EXPECT_EQ(found_by(check).op, "sqrt");
  EXPECT_EQ(found_by(check).step, 8);
  EXPECT_THROW(check.throw_if_found(), DivergedError);
}

TEST(NonFiniteCheck, StepsBetweenAreNotLookedAt) {
  NonFiniteCheck check(NonFiniteCheckOptions().every(3));
  std::vector<bool> found;
  for (int step = 0; step < 7; ++step, check.next_step()) {
    torch::log(torch::zeros({3}));
    found.push_back(check.finding().has_value());
  }
  EXPECT_THAT(found, ElementsAre(true, false, false, true, false, false, true));
}

TEST(NonFiniteCheck, RegionsNestAndTheInnermostLooks) {
  const NonFiniteCheck outer;
  {
    const NonFiniteCheck inner;
    torch::log(torch::zeros({3}));
    EXPECT_EQ(found_by(inner).op, "log");
    expect_none(outer);
  }
  torch::sqrt(-torch::ones({3}));
  EXPECT_EQ(found_by(outer).op, "sqrt");
}

TEST(NonFiniteCheck, RegionsMayEndInAnyOrderAndLeaveNothingBehind) {
  auto outer = std::make_unique<NonFiniteCheck>();
  auto inner = std::make_unique<NonFiniteCheck>();
  outer.reset();
  torch::log(torch::zeros({3}));
  EXPECT_EQ(found_by(*inner).op, "log");
  EXPECT_TRUE(at::hasThreadLocalCallbacks());
  inner.reset();
  EXPECT_FALSE(at::hasThreadLocalCallbacks());
}

TEST(NonFiniteCheck, ThreadsThatWorkForThisOneAreWatchedAndOthersAreNot) {
  const NonFiniteCheck check;
  std::thread([] { torch::log(torch::zeros({3})); }).join();
  expect_none(check);
  const at::ThreadLocalState state;
  std::thread([&] {
    const at::ThreadLocalStateGuard guard(state);
    torch::log(torch::zeros({3}));
  }).join();
  EXPECT_EQ(found_by(check).op, "log");
}

TEST(NonFiniteCheck, OperatorsWithoutGradientsAreWatched) {
  for (const bool inference : {false, true}) {
    const c10::InferenceMode mode(inference);
    const torch::NoGradGuard no_grad;
    auto net = net_with(log_of_zeros);
    const NonFiniteCheck check(*net);
    net(batch());
    EXPECT_EQ(found_by(check).op, "log");
    EXPECT_EQ(found_by(check).layer, "first");
  }
}

TEST(NonFiniteCheck, OperatorsThatThrowAreNotReported) {
  const NonFiniteCheck check;
  EXPECT_ANY_THROW(torch::zeros({3}).log().add(torch::ones({2})));
  EXPECT_EQ(found_by(check).op, "log");
  const NonFiniteCheck other;
  EXPECT_ANY_THROW(torch::zeros({3}).add(torch::ones({2})));
  expect_none(other);
}

// The parameters after some steps.
std::vector<at::Tensor> trained(bool checked) {
  torch::manual_seed(3);
  test::ToyConvNet net;
  torch::optim::Adam optimizer(net->parameters(), 0.01);
  std::optional<NonFiniteCheck> check;
  if (checked) check.emplace(*net);
  for (int step = 0; step < 5; ++step) {
    optimizer.zero_grad();
    const at::Tensor x = torch::dropout(torch::randn({4, 2, 6, 6}), 0.2, true);
    torch::cross_entropy_loss(net(x), torch::randint(3, {4})).backward();
    if (checked) expect_none(*check);
    optimizer.step();
    if (checked) check->next_step();
  }
  std::vector<at::Tensor> tensors = test::copies(net->parameters());
  for (const at::Tensor& buffer : net->buffers()) tensors.push_back(buffer);
  for (const at::Tensor& gradient : test::gradients_of(net->parameters()))
    tensors.push_back(gradient);
  return tensors;
}

TEST(NonFiniteCheck, ResultsAreBitForBitTheSame) {
  test::expect_bitwise_equal(trained(true), trained(false));
}

}  // namespace
}  // namespace semitone::nonfinite_check_test

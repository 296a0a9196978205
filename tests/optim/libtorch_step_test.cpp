// LibTorch's optimizers in one pass against their own steps.

#include "src/optim/libtorch_step.h"

#include "tests/support/tensors.h"
#include "tests/support/tolerance.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

namespace semitone::optim::libtorch_step_test {
namespace {

using test::expect_bitwise_equal;
using test::expect_close;
using Optimizer = std::unique_ptr<torch::optim::Optimizer>;
using Parameters = std::vector<at::Tensor>;
using Make = std::function<Optimizer(const Parameters&)>;

struct Case {
  std::string name;
  Make make;
};

template <typename Optim, typename Options>
Case case_of(const std::string& name, const Options& options) {
  return {name, [options](const Parameters& parameters) -> Optimizer {
            return std::make_unique<Optim>(parameters, options);
          }};
}

std::vector<Case> cases() {
  using namespace torch::optim;  // NOLINT(google-build-using-namespace)
  return {
      case_of<SGD>("Sgd", SGDOptions(0.1)),
      case_of<SGD>("SgdDecay", SGDOptions(0.1).weight_decay(0.1)),
      case_of<SGD>("SgdMomentum", SGDOptions(0.1).momentum(0.9).dampening(0.3).weight_decay(0.1)),
      case_of<SGD>("SgdNesterov", SGDOptions(0.1).momentum(0.9).nesterov(true)),
      case_of<Adam>("Adam", AdamOptions(0.01)),
      case_of<Adam>("AdamAll",
                    AdamOptions(0.01).betas({0.8, 0.9}).eps(1e-3).weight_decay(0.1).amsgrad(true)),
      case_of<AdamW>("AdamW", AdamWOptions(0.01)),
      case_of<AdamW>("AdamWAll",
                     AdamWOptions(0.01).betas({0.8, 0.9}).weight_decay(0.2).amsgrad(true))};
}

// One with other strides, and one that never has a gradient.
Parameters make_parameters() {
  torch::manual_seed(1);
  Parameters parameters{torch::randn({33, 17}),
                        torch::randn({4, 3, 5, 5}).contiguous(at::MemoryFormat::ChannelsLast),
                        torch::randn({7}), torch::randn({3})};
  for (at::Tensor& parameter : parameters) parameter.requires_grad_();
  return parameters;
}

void set_gradients(const Parameters& parameters, std::uint64_t seed) {
  torch::manual_seed(seed);
  for (std::size_t i = 0; i + 1 < parameters.size(); ++i)
    parameters[i].mutable_grad() = torch::randn_like(parameters[i]);
}

std::string saved(const torch::optim::Optimizer& optimizer) {
  std::ostringstream stream;
  torch::serialize::OutputArchive archive;
  optimizer.save(archive);
  archive.save_to(stream);
  return stream.str();
}

void restore(torch::optim::Optimizer& optimizer, const std::string& file) {
  std::istringstream stream(file);
  torch::serialize::InputArchive archive;
  archive.load_from(stream);
  optimizer.load(archive);
}

class LibTorchStepOf : public testing::TestWithParam<Case> {};

TEST_P(LibTorchStepOf, IsTheOptimizersOwnButForRounding) {
  const Parameters got = make_parameters();
  const Parameters want = make_parameters();
  const Optimizer fused = GetParam().make(got);
  const Optimizer stock = GetParam().make(want);
  constexpr int kSteps = 6;
  for (int step = 0; step < kSteps; ++step) {
    set_gradients(got, 10 + static_cast<std::uint64_t>(step));
    set_gradients(want, 10 + static_cast<std::uint64_t>(step));
    // Rates may change between steps.
    for (const auto& optimizer : {fused.get(), stock.get()})
      optimizer->param_groups()[0].options().set_lr(0.1 / (1 + step));
    ASSERT_TRUE(step_in_one_pass(*fused));
    stock->step();
  }
  EXPECT_EQ(fused->state().size(), stock->state().size());
  for (std::size_t i = 0; i < want.size(); ++i) {
    SCOPED_TRACE(i);
    expect_close(got[i].detach(), want[i].detach(),
                 test::reduction_tolerance(want[i].scalar_type(), kSteps * kSteps));
    EXPECT_EQ(got[i].strides(), want[i].strides());
  }
  // Each goes on with the state of the other.
  const std::string file = saved(*fused);
  restore(*fused, saved(*stock));
  restore(*stock, file);
  set_gradients(got, 20);
  set_gradients(want, 20);
  ASSERT_TRUE(step_in_one_pass(*fused));
  stock->step();
  for (std::size_t i = 0; i < want.size(); ++i) {
    expect_close(got[i].detach(), want[i].detach(),
                 test::reduction_tolerance(want[i].scalar_type(), 2 * kSteps * kSteps));
  }
}

INSTANTIATE_TEST_SUITE_P(Optimizers, LibTorchStepOf, testing::ValuesIn(cases()),
                         [](const auto& one) { return one.param.name; });

class OwnAdam : public torch::optim::Adam {
  using Adam::Adam;
};

TEST(LibTorchStep, OthersAreLeftAsTheyAre) {
  const auto expect_refused = [](const Make& make, const Parameters& parameters) {
    const auto before = test::copies(parameters);
    const Optimizer optimizer = make(parameters);
    EXPECT_FALSE(step_in_one_pass(*optimizer));
    expect_bitwise_equal(parameters, before);
    EXPECT_TRUE(optimizer->state().empty());
  };
  const auto adam = [](const Parameters& parameters) -> Optimizer {
    return std::make_unique<torch::optim::Adam>(parameters, 0.1);
  };
  const auto parameters_of = [](const at::Tensor& first) {
    Parameters parameters{torch::ones({3}).requires_grad_(), first};
    for (at::Tensor& parameter : parameters) parameter.mutable_grad() = torch::ones_like(parameter);
    return parameters;
  };
  const auto plain = [] { return torch::ones({4}).requires_grad_(); };
  expect_refused(
      [](const Parameters& parameters) -> Optimizer {
        return std::make_unique<OwnAdam>(parameters, 0.1);
      },
      parameters_of(plain()));
  expect_refused(
      [](const Parameters& parameters) -> Optimizer {
        return std::make_unique<torch::optim::Adagrad>(parameters, 0.1);
      },
      {});
  expect_refused(adam, parameters_of(torch::ones({4}, torch::kBFloat16).requires_grad_()));
  Parameters sparse = parameters_of(torch::ones({4, 2}).requires_grad_());
  sparse[1].mutable_grad() = torch::ones({4, 2}).to_sparse();
  expect_refused(adam, sparse);
  expect_refused(adam, parameters_of(torch::ones({4}, torch::kDouble).requires_grad_()));
  const at::Tensor weight = plain();
  weight.mutable_grad() = torch::ones({4});
  expect_refused(adam, {weight, weight});
  const at::Tensor memory = torch::ones({8});
  Parameters shared{memory.slice(0, 0, 4).detach().requires_grad_(),
                    memory.slice(0, 3, 7).detach().requires_grad_()};
  for (at::Tensor& parameter : shared) parameter.mutable_grad() = torch::ones_like(parameter);
  expect_refused(adam, shared);
  // Kernels would divide by a second moment of 0, where LibTorch's is subnormal.
  expect_refused(
      [](const Parameters& parameters) -> Optimizer {
        return std::make_unique<torch::optim::Adam>(parameters,
                                                    torch::optim::AdamOptions(0.1).eps(0));
      },
      parameters_of(plain()));
  expect_refused(
      [](const Parameters& parameters) -> Optimizer {
        return std::make_unique<torch::optim::AdamW>(parameters,
                                                     torch::optim::AdamWOptions(0.1).eps(0));
      },
      parameters_of(plain()));
}

// As flattened weights are.
TEST(LibTorchStep, PartsOfOneMemoryAreParameters) {
  const at::Tensor memory = torch::ones({8});
  Parameters parts{memory.slice(0, 0, 4).detach().requires_grad_(),
                   memory.slice(0, 4, 8).detach().requires_grad_()};
  for (at::Tensor& part : parts) part.mutable_grad() = torch::ones_like(part);
  torch::optim::SGD optimizer(parts, 0.5);
  EXPECT_TRUE(step_in_one_pass(optimizer));
  expect_bitwise_equal(memory, torch::full({8}, 0.5));
}

TEST(LibTorchStep, StateOfAnotherDtypeIsLeftToLibTorch) {
  torch::nn::Linear net(3, 2);
  net->to(torch::kDouble);
  torch::optim::AdamW optimizer(net->parameters(), 0.1);
  net->forward(torch::ones({1, 3}, torch::kDouble)).sum().backward();
  optimizer.step();
  net->zero_grad();
  net->to(torch::kFloat);
  net->forward(torch::ones({1, 3})).sum().backward();
  const auto before = test::copies(net->parameters());
  EXPECT_FALSE(step_in_one_pass(optimizer));
  expect_bitwise_equal(test::copies(net->parameters()), before);
  const auto& state = *optimizer.state().at(net->weight.unsafeGetTensorImpl());
  EXPECT_EQ(dynamic_cast<const torch::optim::AdamWParamState&>(state).step(), 1);
}

TEST(LibTorchStep, WithoutGradientsNothingChanges) {
  const Parameters parameters = make_parameters();
  const auto before = test::copies(parameters);
  torch::optim::AdamW optimizer(parameters, 0.1);
  EXPECT_TRUE(step_in_one_pass(optimizer));
  expect_bitwise_equal(parameters, before);
  EXPECT_TRUE(optimizer.state().empty());
}

}  // namespace
}  // namespace semitone::optim::libtorch_step_test

#include "semitone/amp/tune.h"

#include "semitone/amp/initialize.h"
#include "tests/support/errors.h"
#include "tests/support/toy_nets.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

namespace semitone::amp {
namespace {

using Names = std::vector<std::string>;

const CastTarget kTarget{torch::kCPU, torch::kHalf};

// Two layers, and between them products of numbers around 1e-4, which fp16 rounds to 0.
struct Sensitive : torch::nn::Module {
  Sensitive() : first(8, 16), second(16, 4) {
    register_module("first", first);
    register_module("second", second);
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor hidden = torch::tanh(first(x)) * 1e-4;
    const at::Tensor squares = hidden * hidden;
    return second(torch::gelu(squares * 1e4 * 1e4));
  }
  torch::nn::Linear first, second;
};

// Trains a model from new weights for a few steps, each time the same. Returns the mean loss of the last ones.
template <typename Net>
double train(const std::shared_ptr<Net>& net, const std::optional<CastPolicy>& policy,
             std::int64_t steps = 12) {
  torch::manual_seed(1);
  for (const auto& module : net->modules()) {
    if (auto* const linear = module->template as<torch::nn::LinearImpl>())
      linear->reset_parameters();
  }
  torch::optim::SGD optimizer(net->parameters(), 1.0);
  Options options(policy.has_value() ? OptLevel::O1 : OptLevel::O0);
  options.dtype(torch::kHalf).loss_scale(1.0).verbosity(0);
  if (policy.has_value()) options.policy(*policy);
  auto mixed = initialize(Model(net), optimizer, options);
  const at::Tensor x = torch::randn({32, 8});
  const at::Tensor target = torch::randint(4, {32}, torch::kLong);
  double sum = 0;
  for (std::int64_t step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    const at::Tensor loss = torch::cross_entropy_loss(mixed.forward(net, x), target);
    mixed.scale_loss(loss, optimizer).backward();
    mixed.step(optimizer);
    sum += loss.item<double>();
  }
  return sum / static_cast<double>(steps);
}

TEST(Tune, FindsTheOneOperatorThatIsSensitive) {
  const auto net = std::make_shared<Sensitive>();
  // Every operator with 16-bit arguments computes in 16 bits.
  const auto given = CastPolicy::semitone(kTarget).fast_kernels(false);
  const TuneResult result =
      tune(net, given, [&](const auto& policy) { return train(net, policy); });
  EXPECT_EQ(result.operators, Names({"mul.Tensor"})) << result.to_string();
  EXPECT_EQ(result.parameters, Names());
  // NaN, for example.
  EXPECT_FALSE(std::abs(result.given_loss - result.fp32_loss) <= 0.01 * result.fp32_loss);
  EXPECT_LE(std::abs(result.loss - result.fp32_loss), 0.01 * result.fp32_loss);
  // The policy of the result does what the result says.
  EXPECT_EQ(train(net, result.policy), result.loss);
  EXPECT_EQ(train(net, std::nullopt), result.fp32_loss);
  EXPECT_EQ(result.policy.find("mul.Tensor")->action, CastAction::fp32);
  EXPECT_NE(result.to_string().find(".keep_fp32(\"mul.Tensor\""), std::string::npos);
}

TEST(Tune, ChangesNothingIfTheLossIsInTheBand) {
  const auto net = std::make_shared<Sensitive>();
  const auto given = CastPolicy::semitone(kTarget).keep_fp32("mul");
  const TuneResult result =
      tune(net, given, [&](const auto& policy) { return train(net, policy); });
  EXPECT_TRUE(result.is_unchanged()) << result.to_string();
  EXPECT_EQ(result.trials.size(), 3U);
  EXPECT_EQ(result.loss, result.given_loss);
}

// A training whose loss is what a function of the policy says.
class Pretended {
 public:
  TuneResult tune(const std::function<bool(const CastPolicy&)>& is_good,
                  const TuneOptions& options = {}) {
    return amp::tune(
        net_, CastPolicy::semitone(kTarget),
        [&](const std::optional<CastPolicy>& policy) {
          if (!policy.has_value()) return 1.0;
          const Autocast region(policy->bind(net_));
          const at::Tensor x = torch::ones({2, 6});
          // addmm twice, relu, mul, sigmoid, bmm
          const at::Tensor y = torch::sigmoid(net_->forward(x) * 2.0);
          torch::bmm(y.unsqueeze(0), y.t().unsqueeze(0));
          return is_good(*policy) ? 1.0 : 2.0;
        },
        options);
  }

 private:
  test::ToyNet net_;
};

bool is_fp32(const CastPolicy& policy, const std::string& op) {
  const auto row = policy.find(op);
  return row.has_value() && row->action == CastAction::fp32;
}

bool has_glob(const CastPolicy& policy, const std::string& glob) {
  const auto& globs = policy.fp32_param_globs();
  return std::find(globs.begin(), globs.end(), glob) != globs.end();
}

TEST(Tune, FindsOperatorsThatAreNeededTogether) {
  const TuneResult result = Pretended().tune(
      [](const CastPolicy& policy) { return is_fp32(policy, "bmm") && is_fp32(policy, "relu"); });
  EXPECT_EQ(std::set<std::string>(result.operators.begin(), result.operators.end()),
            std::set<std::string>({"bmm", "relu"}))
      << result.to_string();
  EXPECT_TRUE(result.parameters.empty());
}

TEST(Tune, FindsTheLayerOfAnOperator) {
  const TuneResult result = Pretended().tune([](const CastPolicy& policy) {
    return is_fp32(policy, "addmm") || has_glob(policy, "second.weight");
  });
  EXPECT_EQ(result.operators, Names()) << result.to_string();
  EXPECT_EQ(result.parameters, Names({"second.bias", "second.weight"}));
  EXPECT_EQ(result.policy.fp32_param_globs(), Names({"second.bias", "second.weight"}));

  const TuneResult whole = Pretended().tune(
      [](const CastPolicy& policy) {
        return is_fp32(policy, "addmm") || has_glob(policy, "second.weight");
      },
      TuneOptions().layers(false));
  EXPECT_EQ(whole.operators, Names({"addmm"}));
}

TEST(Tune, KeepsTheOperatorIfEveryLayerNeedsIt) {
  const TuneResult result = Pretended().tune([](const CastPolicy& policy) {
    return is_fp32(policy, "addmm") ||
           (has_glob(policy, "first.weight") && has_glob(policy, "second.weight"));
  });
  EXPECT_EQ(result.operators, Names({"addmm"}));
  EXPECT_TRUE(result.parameters.empty());
}

TEST(Tune, ReportsEachTraining) {
  std::vector<TuneTrial> seen;
  const TuneResult result = Pretended().tune(
      [](const CastPolicy& policy) { return is_fp32(policy, "bmm"); },
      TuneOptions().on_trial([&](const TuneTrial& trial) { seen.push_back(trial); }));
  ASSERT_EQ(seen.size(), result.trials.size());
  EXPECT_TRUE(seen[0].is_fp32 && seen[1].is_fp32);
  EXPECT_FALSE(seen[2].is_fp32);
  EXPECT_FALSE(seen[2].in_band);
  EXPECT_EQ(seen.back().in_band, seen.back().loss == 1.0);
  EXPECT_EQ(result.operators, Names({"bmm"}));
}

TEST(Tune, RefusesWhatItCannotFind) {
  Pretended pretended;
  const auto never = [](const CastPolicy&) { return false; };
  test::expect_error([&] { pretended.tune(never); }, {"amp.tune", "within 1 % of 1 with all",
                                                      "operators in fp32", "widen the band"});
  test::expect_error([&] { pretended.tune(never, TuneOptions().max_trainings(3)); },
                     {"a result after 3 trainings"});
  test::expect_error([&] { pretended.tune(never, TuneOptions().band(0)); }, {"a band above 0"});
  test::expect_error(
      [&] { pretended.tune(never, TuneOptions().band(std::numeric_limits<double>::quiet_NaN())); },
      {"a band above 0"});
  double loss = 1;
  const test::ToyNet net;
  test::expect_error(
      [&] { tune(net, CastPolicy::semitone(kTarget).bind(net), [&](const auto&) { return 1.0; }); },
      {"not bound to a model"});
  test::expect_error(
      [&] { tune(net, CastPolicy::semitone(kTarget), [&](const auto&) { return 0.0; }); },
      {"other than 0"});
  test::expect_error(
      [&] { tune(net, CastPolicy::semitone(kTarget), [&](const auto&) { return loss *= 1.1; }); },
      {"two trainings in fp32", "1.1", "1.21"});
  test::expect_error(
      [&] { tune(net, CastPolicy::semitone(kTarget), [&](const auto&) { return std::nan(""); }); },
      {"a finite loss of the training in fp32"});
}

TEST(Tune, TakesAnExceptionAsOutside) {
  const TuneResult result = Pretended().tune([](const CastPolicy& policy) {
    if (is_fp32(policy, "sigmoid") && !is_fp32(policy, "bmm"))
      throw std::runtime_error("several dtypes");
    return is_fp32(policy, "bmm");
  });
  EXPECT_EQ(result.operators, Names({"bmm"}));
  EXPECT_THROW(Pretended().tune([](const CastPolicy&) -> bool { throw std::runtime_error("no"); }),
               std::runtime_error);
}

// Linear multiplies a sequence by a view of its weight.
TEST(Tune, FindsTheLayerOfAViewOfItsWeight) {
  const test::ToyNet net;
  const TuneResult result =
      tune(net, CastPolicy::semitone(kTarget), [&](const std::optional<CastPolicy>& policy) {
        if (!policy.has_value()) return 1.0;
        const Autocast region(policy->bind(net));
        torch::nn::Linear(net->second)(torch::nn::Linear(net->first)(torch::ones({2, 5, 6})));
        const bool is_good = is_fp32(*policy, "matmul") || has_glob(*policy, "first.weight");
        return is_good ? 1.0 : 2.0;
      });
  EXPECT_EQ(result.parameters, Names({"first.weight"})) << result.to_string();
}

// Its own name is a pattern that matches another one.
struct OddNames : torch::nn::Module {
  OddNames() : inner(4, 4) {
    weight = register_parameter("a[1]", torch::ones({4, 4}));
    register_module("a", inner);
  }
  torch::nn::Linear inner;
  at::Tensor weight;
};

TEST(Tune, NamesExactlyTheParametersOfALayer) {
  const auto net = std::make_shared<OddNames>();
  const TuneResult result =
      tune(net, CastPolicy::semitone(kTarget), [&](const std::optional<CastPolicy>& policy) {
        if (!policy.has_value()) return 1.0;
        const CastPolicy bound = policy->bind(net);
        const Autocast region(bound);
        torch::mm(torch::mm(torch::ones({2, 4}), net->weight), net->inner->weight);
        const bool is_good = is_fp32(*policy, "mm") || bound.keeps_fp32(net->weight);
        return is_good ? 1.0 : 2.0;
      });
  EXPECT_EQ(result.parameters, Names({"a\\[1]"})) << result.to_string();
}

TEST(Tune, TakesALossThatIsNotFiniteAsOutside) {
  const test::ToyNet net;
  test::expect_error(
      [&] {
        tune(net, CastPolicy::semitone(kTarget), [&](const std::optional<CastPolicy>& policy) {
          if (!policy.has_value()) return 1.0;
          const Autocast region(policy->bind(net));
          torch::nn::Linear(net->first)(torch::ones({2, 6}));
          return std::nan("");
        });
      },
      {"operators in fp32"});
}

}  // namespace
}  // namespace semitone::amp

// lr_schedulers.json: the learning rates of torch.optim.lr_scheduler before each step, for two
// groups. Written by lr_schedulers.py.

#include "semitone/optim/lr_scheduler.h"
#include "tests/support/conformance.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

namespace semitone::optim {
namespace {

using nlohmann::json;

LRSchedule schedule_of(const std::string& name, const json& options) {
  const auto steps = [&](const char* key) { return options.at(key).get<std::int64_t>(); };
  const auto real = [&](const char* key) { return options.at(key).get<double>(); };
  if (name == "LinearLR") {
    return LinearLR(steps("total_iters"))
        .start_factor(real("start_factor"))
        .end_factor(real("end_factor"));
  }
  if (name == "CosineAnnealingLR")
    return CosineAnnealingLR(steps("T_max")).eta_min(real("eta_min"));
  if (name == "PolynomialLR") return PolynomialLR(steps("total_iters")).power(real("power"));
  if (name == "StepLR") return StepLR(steps("step_size")).gamma(real("gamma"));
  if (name == "MultiStepLR") {
    return MultiStepLR(options.at("milestones").get<std::vector<std::int64_t>>())
        .gamma(real("gamma"));
  }
  if (name == "OneCycleLR") {
    return OneCycleLR(steps("total_steps"))
        .pct_start(real("pct_start"))
        .anneal_strategy(options.at("anneal_strategy") == "cos" ? AnnealStrategy::cos
                                                                : AnnealStrategy::linear)
        .div_factor(real("div_factor"))
        .final_div_factor(real("final_div_factor"))
        .three_phase(options.at("three_phase").get<bool>());
  }
  if (name != "SequentialLR") throw std::runtime_error("no schedule " + name);
  std::vector<LRSchedule> parts;
  for (const json& part : options.at("schedules"))
    parts.push_back(schedule_of(part.at(0).get<std::string>(), part.at(1)));
  return SequentialLR(parts, options.at("milestones").get<std::vector<std::int64_t>>());
}

// Python multiplies the rate of the previous step: each step rounds a few times more. Relative to
// the base rate, since the cosine's differences cancel near 0.
constexpr double kTolerance = 1e-13;

TEST(LRSchedulers, GiveTheRatesOfPyTorch) {
  const json data = test::conformance("lr_schedulers.json");
  const auto base_lrs = data.at("base_lrs").get<std::vector<double>>();
  std::set<std::string> seen;
  for (const json& one : data.at("cases")) {
    SCOPED_TRACE(one.at("schedule").dump() + " " + one.at("options").dump());
    std::vector<torch::optim::OptimizerParamGroup> groups;
    for (const double lr : base_lrs)
      groups.emplace_back(std::vector<at::Tensor>{torch::zeros({1})},
                          std::make_unique<torch::optim::SGDOptions>(lr));
    torch::optim::SGD optimizer(groups, torch::optim::SGDOptions(1));
    const auto name = one.at("schedule").get<std::string>();
    seen.insert(name);
    LRScheduler scheduler(optimizer, schedule_of(name, one.at("options")));
    const json& lrs = one.at("lrs");
    for (std::size_t step = 0; step < lrs.size(); ++step) {
      for (std::size_t group = 0; group < base_lrs.size(); ++group) {
        const double got = optimizer.param_groups()[group].options().get_lr();
        const double want = lrs.at(step).at(group).get<double>();
        EXPECT_TRUE(std::abs(got - want) <= kTolerance * base_lrs[group])
            << "step " << step << ", group " << group << ": " << got << " instead of " << want;
      }
      if (step + 1 < lrs.size()) scheduler.step();
    }
  }
  EXPECT_EQ(seen.size(), 7U);
}

}  // namespace
}  // namespace semitone::optim

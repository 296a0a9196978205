#include "semitone/optim/fused_adam.h"

#include "src/optim/options.h"
#include "src/optim/rules.h"
#include "src/optim/work.h"

#include <cmath>

namespace semitone::optim {
namespace {

constexpr auto kFusedAdam = "optim.fused_adam";

// Calls visit(name, value) for every option.
template <typename Options, typename Visit>
void for_each_adam_option(Options& options, Visit&& visit) {
  visit("lr", options.lr())("betas", options.betas())("eps", options.eps())(
      "weight_decay", options.weight_decay())("adam_w_mode", options.adam_w_mode())(
      "bias_correction", options.bias_correction())("amsgrad", options.amsgrad())(
      "maximize", options.maximize())("split_master", options.split_master())("bf16_state",
                                                                              options.bf16_state());
}

}  // namespace

kernels::AdamRule adam_rule(const FusedAdamOptions& options, std::int64_t step, double grad_scale) {
  const auto [beta1, beta2] = options.betas();
  const auto t = static_cast<double>(step);
  const double correction1 = options.bias_correction() ? 1 - std::pow(beta1, t) : 1;
  const double correction2 = options.bias_correction() ? 1 - std::pow(beta2, t) : 1;
  kernels::AdamRule rule;
  rule.grad_scale = options.maximize() ? -grad_scale : grad_scale;
  if (options.adam_w_mode()) {
    rule.decay_factor = 1 - options.lr() * options.weight_decay();
  } else {
    rule.weight_decay = options.weight_decay();
  }
  rule.beta1 = beta1;
  rule.one_minus_beta1 = 1 - beta1;
  rule.beta2 = beta2;
  rule.one_minus_beta2 = 1 - beta2;
  rule.eps = options.eps();
  rule.step_size = options.lr() / correction1;
  rule.bias_correction2_sqrt = std::sqrt(correction2);
  return rule;
}

FusedAdamOptions::FusedAdamOptions(double lr) : lr_(lr) {}

void FusedAdamOptions::serialize(torch::serialize::InputArchive& archive) {
  for_each_adam_option(*this, OptionsReader(archive, {"betas", "eps", "amsgrad"}));
}

void FusedAdamOptions::serialize(torch::serialize::OutputArchive& archive) const {
  for_each_adam_option(*this, OptionsWriter(archive));
}

FusedAdam::FusedAdam(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                     const FusedAdamOptions& defaults)
    : FusedOptimizer(groups, std::make_unique<FusedAdamOptions>(defaults)) {
  check_options();
}

std::string_view FusedAdam::component() const {
  return kFusedAdam;
}

void FusedAdam::check(const torch::optim::OptimizerOptions& options) const {
  const auto& own = options_as<FusedAdamOptions>(options, kFusedAdam);
  require_range(kFusedAdam, "lr", own.lr(), 0);
  require_range(kFusedAdam, "eps", own.eps(), 0);
  require_range(kFusedAdam, "weight_decay", own.weight_decay(), 0);
  require_betas(kFusedAdam, own.betas());
}

std::vector<FusedOptimizer::Slot> FusedAdam::slots(
    const torch::optim::OptimizerOptions& options) const {
  const auto& own = static_cast<const FusedAdamOptions&>(options);
  return {{.name = "exp_avg"},
          {.name = "exp_avg_sq"},
          {.name = "max_exp_avg_sq", .wanted = own.amsgrad()}};
}

bool FusedAdam::splits_masters(const torch::optim::OptimizerOptions& options) const {
  return static_cast<const FusedAdamOptions&>(options).split_master();
}

bool FusedAdam::keeps_bf16_state(const torch::optim::OptimizerOptions& options) const {
  return static_cast<const FusedAdamOptions&>(options).bf16_state();
}

void FusedAdam::keep_storage(torch::optim::OptimizerOptions& loaded,
                             const torch::optim::OptimizerOptions& current) const {
  keep_storage_of<FusedAdamOptions>(current, loaded);
}

FusedOptimizer::Rules FusedAdam::rules_of(std::span<const Work> work) const {
  return Rules{rules_for(work, [](const Work& one) {
    return adam_rule(one.options_as<FusedAdamOptions>(), one.step, one.grad_scale);
  })};
}

}  // namespace semitone::optim

#include "semitone/optim/fused_adagrad.h"

#include "src/optim/options.h"
#include "src/optim/work.h"

namespace semitone::optim {
namespace {

constexpr auto kFusedAdagrad = "optim.fused_adagrad";

// Calls visit(name, value) for every option.
template <typename Options, typename Visit>
void for_each_adagrad_option(Options& options, Visit&& visit) {
  visit("lr", options.lr())("lr_decay", options.lr_decay())("weight_decay", options.weight_decay())(
      "initial_accumulator_value", options.initial_accumulator_value())("eps", options.eps())(
      "adagrad_w_mode", options.adagrad_w_mode());
}

kernels::AdagradRule rule_of(const FusedAdagradOptions& options, std::int64_t step,
                             double grad_scale) {
  kernels::AdagradRule rule;
  rule.grad_scale = grad_scale;
  (options.adagrad_w_mode() ? rule.decoupled_weight_decay : rule.weight_decay) =
      options.weight_decay();
  rule.eps = options.eps();
  rule.lr = options.lr() / (1 + static_cast<double>(step - 1) * options.lr_decay());
  return rule;
}

}  // namespace

FusedAdagradOptions::FusedAdagradOptions(double lr) : lr_(lr) {}

void FusedAdagradOptions::serialize(torch::serialize::InputArchive& archive) {
  for_each_adagrad_option(*this, OptionsReader(archive, {"lr_decay", "initial_accumulator_value"}));
}

void FusedAdagradOptions::serialize(torch::serialize::OutputArchive& archive) const {
  for_each_adagrad_option(*this, OptionsWriter(archive));
}

FusedAdagrad::FusedAdagrad(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                           const FusedAdagradOptions& defaults)
    : FusedOptimizer(groups, std::make_unique<FusedAdagradOptions>(defaults)) {
  check_options();
}

std::string_view FusedAdagrad::component() const {
  return kFusedAdagrad;
}

void FusedAdagrad::check(const torch::optim::OptimizerOptions& options) const {
  const auto& own = options_as<FusedAdagradOptions>(options, kFusedAdagrad);
  require_range(kFusedAdagrad, "lr", own.lr(), 0);
  require_range(kFusedAdagrad, "lr_decay", own.lr_decay(), 0);
  require_range(kFusedAdagrad, "weight_decay", own.weight_decay(), 0);
  require_range(kFusedAdagrad, "initial_accumulator_value", own.initial_accumulator_value(), 0);
  require_range(kFusedAdagrad, "eps", own.eps(), 0);
}

std::vector<FusedOptimizer::Slot> FusedAdagrad::slots(
    const torch::optim::OptimizerOptions& options) const {
  const auto& own = static_cast<const FusedAdagradOptions&>(options);
  return {{.name = "sum", .initial = own.initial_accumulator_value()}};
}

FusedOptimizer::Rules FusedAdagrad::rules_of(std::span<const Work> work) const {
  return Rules{rules_for(work, [](const Work& one) {
    return rule_of(one.options_as<FusedAdagradOptions>(), one.step, one.grad_scale);
  })};
}

}  // namespace semitone::optim

#include "semitone/optim/fused_sgd.h"

#include "src/optim/options.h"
#include "src/optim/rules.h"
#include "src/optim/work.h"

namespace semitone::optim {
namespace {

constexpr auto kFusedSgd = "optim.fused_sgd";

// Calls visit(name, value) for every option.
template <typename Options, typename Visit>
void for_each_sgd_option(Options& options, Visit&& visit) {
  visit("lr", options.lr())("momentum", options.momentum())("dampening", options.dampening())(
      "weight_decay", options.weight_decay())("nesterov", options.nesterov())(
      "wd_after_momentum", options.wd_after_momentum())("maximize", options.maximize())(
      "split_master", options.split_master())("bf16_state", options.bf16_state());
}

}  // namespace

kernels::SgdRule sgd_rule(const FusedSGDOptions& options, bool first, double grad_scale) {
  kernels::SgdRule rule;
  rule.grad_scale = options.maximize() ? -grad_scale : grad_scale;
  (options.wd_after_momentum() ? rule.decoupled_weight_decay : rule.weight_decay) =
      options.weight_decay();
  rule.momentum = options.momentum();
  rule.one_minus_dampening = 1 - options.dampening();
  rule.nesterov = options.nesterov();
  rule.lr = options.lr();
  rule.first = first;
  return rule;
}

FusedSGDOptions::FusedSGDOptions(double lr) : lr_(lr) {}

void FusedSGDOptions::serialize(torch::serialize::InputArchive& archive) {
  for_each_sgd_option(*this, OptionsReader(archive, {"momentum", "dampening", "nesterov"}));
}

void FusedSGDOptions::serialize(torch::serialize::OutputArchive& archive) const {
  for_each_sgd_option(*this, OptionsWriter(archive));
}

FusedSGD::FusedSGD(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                   const FusedSGDOptions& defaults)
    : FusedOptimizer(groups, std::make_unique<FusedSGDOptions>(defaults)) {
  check_options();
}

std::string_view FusedSGD::component() const {
  return kFusedSgd;
}

void FusedSGD::check(const torch::optim::OptimizerOptions& options) const {
  const auto& own = options_as<FusedSGDOptions>(options, kFusedSgd);
  require_range(kFusedSgd, "lr", own.lr(), 0);
  require_range(kFusedSgd, "momentum", own.momentum(), 0);
  require_range(kFusedSgd, "weight_decay", own.weight_decay(), 0);
  require_nesterov(kFusedSgd, own.nesterov(), own.momentum(), own.dampening());
}

std::vector<FusedOptimizer::Slot> FusedSGD::slots(
    const torch::optim::OptimizerOptions& options) const {
  const auto& own = static_cast<const FusedSGDOptions&>(options);
  return {{.name = "momentum_buffer", .wanted = own.momentum() != 0}};
}

bool FusedSGD::splits_masters(const torch::optim::OptimizerOptions& options) const {
  return static_cast<const FusedSGDOptions&>(options).split_master();
}

bool FusedSGD::keeps_bf16_state(const torch::optim::OptimizerOptions& options) const {
  return static_cast<const FusedSGDOptions&>(options).bf16_state();
}

void FusedSGD::keep_storage(torch::optim::OptimizerOptions& loaded,
                            const torch::optim::OptimizerOptions& current) const {
  keep_storage_of<FusedSGDOptions>(current, loaded);
}

FusedOptimizer::Rules FusedSGD::rules_of(std::span<const Work> work) const {
  return Rules{rules_for(work, [](const Work& one) {
    return sgd_rule(one.options_as<FusedSGDOptions>(), one.fresh[0], one.grad_scale);
  })};
}

}  // namespace semitone::optim

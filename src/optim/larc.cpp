#include "semitone/optim/larc.h"

#include "src/kernels/multi_tensor_norm.h"
#include "src/optim/options.h"
#include "src/optim/work.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

namespace semitone::optim {
namespace {

constexpr auto kLarc = "optim.larc";

// Calls visit(name, value) for every option.
template <typename Options, typename Visit>
void for_each_larc_option(Options& options, Visit&& visit) {
  visit("lr", options.lr())("momentum", options.momentum())("dampening", options.dampening())(
      "weight_decay", options.weight_decay())("nesterov", options.nesterov())(
      "trust_coefficient", options.trust_coefficient())("clip", options.clip())("eps",
                                                                                options.eps());
}

// For |p| = 0 or |g| = 0.
kernels::SgdRule rule_of(const LARCOptions& options, bool first, double grad_scale) {
  kernels::SgdRule rule;
  rule.grad_scale = grad_scale;
  rule.momentum = options.momentum();
  rule.one_minus_dampening = 1 - options.dampening();
  rule.nesterov = options.nesterov();
  rule.lr = options.lr();
  rule.first = first;
  return rule;
}

kernels::SgdRule rule_of(const LARCOptions& options, bool first, double grad_scale,
                         double param_norm, double grad_norm) {
  kernels::SgdRule rule = rule_of(options, first, grad_scale);
  if (param_norm != 0 && grad_norm != 0) {
    const double trust_ratio = options.trust_coefficient() * param_norm /
                               (grad_norm + options.weight_decay() * param_norm + options.eps());
    rule.weight_decay = options.weight_decay();
    rule.trust_ratio = options.clip() ? std::min(trust_ratio / options.lr(), 1.0) : trust_ratio;
  }
  return rule;
}

// The inputs of measure().
struct LarcInput {
  enum : std::int64_t { kGradScale, kCoefficient, kWeightDecay, kEps, kLr, kClip };
};

}  // namespace

LARCOptions::LARCOptions(double lr) : lr_(lr) {}

void LARCOptions::serialize(torch::serialize::InputArchive& archive) {
  for_each_larc_option(*this, OptionsReader(archive, {"momentum", "dampening", "nesterov"}));
}

void LARCOptions::serialize(torch::serialize::OutputArchive& archive) const {
  for_each_larc_option(*this, OptionsWriter(archive));
}

LARC::LARC(const std::vector<torch::optim::OptimizerParamGroup>& groups,
           const LARCOptions& defaults)
    : FusedOptimizer(groups, std::make_unique<LARCOptions>(defaults)) {
  check_options();
}

std::string_view LARC::component() const {
  return kLarc;
}

void LARC::check(const torch::optim::OptimizerOptions& options) const {
  const auto& own = options_as<LARCOptions>(options, kLarc);
  require_range(kLarc, "lr", own.lr(), 0);
  require_range(kLarc, "momentum", own.momentum(), 0);
  require_range(kLarc, "weight_decay", own.weight_decay(), 0);
  require_range(kLarc, "eps", own.eps(), 0);
  if (!(own.trust_coefficient() > 0 && std::isfinite(own.trust_coefficient()))) {
    throw Error(kLarc, "trust_coefficient above 0 and finite",
                std::to_string(own.trust_coefficient()));
  }
  require_nesterov(kLarc, own.nesterov(), own.momentum(), own.dampening());
}

std::vector<FusedOptimizer::Slot> LARC::slots(const torch::optim::OptimizerOptions& options) const {
  const auto& own = static_cast<const LARCOptions&>(options);
  return {{.name = "momentum_buffer", .wanted = own.momentum() != 0}};
}

FusedOptimizer::Rules LARC::rules_of(std::span<const Work> work) const {
  Rules rules{rules_for(work, [](const Work& one) {
    return rule_of(one.options_as<LARCOptions>(), one.fresh[0], one.grad_scale);
  })};
  for (const Work& one : work) {
    const auto& options = one.options_as<LARCOptions>();
    rules.inputs.insert(rules.inputs.end(),
                        {one.grad_scale, options.trust_coefficient(), options.weight_decay(),
                         options.eps(), options.lr(), options.clip() ? 1.0 : 0.0});
  }
  return rules;
}

// The formulas of rule_of(), on the device.
void LARC::measure(std::span<const Work> work, StepOnDevice& step) const {
  std::vector<at::Tensor> tensors = grads_of(work);
  for (const Work& one : work) tensors.push_back(one.update.param);
  const auto norms = kernels::multi_tensor_norms_on_device(tensors, 2).chunk(2);
  const at::Tensor grad_norm = step.input(LarcInput::kGradScale).abs() * norms[0];
  const at::Tensor& param_norm = norms[1];
  const at::Tensor weight_decay = step.input(LarcInput::kWeightDecay);
  at::Tensor ratio = step.input(LarcInput::kCoefficient) * param_norm /
                     (grad_norm + weight_decay * param_norm + step.input(LarcInput::kEps));
  const at::Tensor clipped = (ratio / step.input(LarcInput::kLr)).clamp_max(1);
  ratio = at::where(step.input(LarcInput::kClip).ne(0), clipped, ratio);
  const at::Tensor none = param_norm.eq(0).logical_or(grad_norm.eq(0));
  step.update.set({.weight_decay = weight_decay.masked_fill(none, 0),
                   .trust_ratio = ratio.masked_fill(none, 1)});
}

void LARC::update(std::span<Work> all) {
  std::vector<Work> rest = update_on_devices(all);
  const std::span<Work> work(rest);
  std::vector<at::Tensor> tensors;
  for (const Work& one : work) tensors.insert(tensors.end(), {one.update.param, one.update.grad});
  const auto norms = kernels::multi_tensor_norms(tensors, 2);
  std::size_t i = 0;
  auto rules = rules_for(work, [&](const Work& one) {
    const double param_norm = norms[i++];
    const double grad_norm = std::abs(one.grad_scale) * norms[i++];
    return rule_of(one.options_as<LARCOptions>(), one.fresh[0], one.grad_scale, param_norm,
                   grad_norm);
  });
  kernels::multi_tensor_update(items_of(work), std::move(rules));
}

}  // namespace semitone::optim

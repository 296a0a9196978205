#include "semitone/optim/fused_novograd.h"

#include "src/kernels/multi_tensor_norm.h"
#include "src/optim/options.h"
#include "src/optim/work.h"

#include <cmath>
#include <limits>
#include <string>
#include <utility>

namespace semitone::optim {
namespace {

constexpr auto kFusedNovograd = "optim.fused_novograd";

// Calls visit(name, value) for every option.
template <typename Options, typename Visit>
void for_each_novograd_option(Options& options, Visit&& visit) {
  visit("lr", options.lr())("betas", options.betas())("eps", options.eps())(
      "weight_decay", options.weight_decay())("bias_correction", options.bias_correction())(
      "grad_averaging", options.grad_averaging())("reg_inside_moment", options.reg_inside_moment())(
      "norm_type", options.norm_type())("init_zero", options.init_zero());
}

constexpr std::size_t kNorm = 1;  // of the slots

double order_of(const FusedNovoGradOptions& options) {
  return options.norm_type() == 0 ? std::numeric_limits<double>::infinity() : 2;
}

// The running norm after a step, from the norm of its gradient.
double moved_norm(const FusedNovoGradOptions& options, double before, double norm) {
  const double beta2 = std::get<1>(options.betas());
  return options.norm_type() == 0 ? beta2 * before + (1 - beta2) * norm
                                  : std::sqrt(beta2 * before * before + (1 - beta2) * norm * norm);
}

kernels::NovoGradRule rule_of(const FusedNovoGradOptions& options, std::int64_t step,
                              double grad_scale, double running_norm) {
  const auto [beta1, beta2] = options.betas();
  const auto t = static_cast<double>(step);
  const bool corrected = options.bias_correction();
  const double correction1 = corrected ? 1 - std::pow(beta1, t) : 1;
  const double correction2 = corrected ? std::sqrt(1 - std::pow(beta2, t)) : 1;
  const double denominator = running_norm / correction2 + options.eps();
  kernels::NovoGradRule rule;
  rule.beta1 = beta1;
  rule.beta3 = options.grad_averaging() ? 1 - beta1 : 1;
  rule.lr = options.lr();
  if (options.reg_inside_moment()) {
    rule.grad_scale = grad_scale / denominator;
    rule.weight_decay = options.weight_decay();
    rule.correction = 1 / correction1;
  } else {
    rule.grad_scale = grad_scale;
    rule.correction = 1 / (correction1 * denominator);
    rule.decoupled_weight_decay = options.weight_decay();
  }
  return rule;
}

}  // namespace

FusedNovoGradOptions::FusedNovoGradOptions(double lr) : lr_(lr) {}

void FusedNovoGradOptions::serialize(torch::serialize::InputArchive& archive) {
  for_each_novograd_option(*this, OptionsReader(archive));
}

void FusedNovoGradOptions::serialize(torch::serialize::OutputArchive& archive) const {
  for_each_novograd_option(*this, OptionsWriter(archive));
}

FusedNovoGrad::FusedNovoGrad(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                             const FusedNovoGradOptions& defaults)
    : FusedOptimizer(groups, std::make_unique<FusedNovoGradOptions>(defaults)) {
  check_options();
}

std::string_view FusedNovoGrad::component() const {
  return kFusedNovograd;
}

void FusedNovoGrad::check(const torch::optim::OptimizerOptions& options) const {
  const auto& own = options_as<FusedNovoGradOptions>(options, kFusedNovograd);
  require_range(kFusedNovograd, "lr", own.lr(), 0);
  require_range(kFusedNovograd, "eps", own.eps(), 0);
  require_range(kFusedNovograd, "weight_decay", own.weight_decay(), 0);
  require_betas(kFusedNovograd, own.betas());
  if (own.norm_type() != 0 && own.norm_type() != 2)
    throw Error(kFusedNovograd, "norm_type 2 or 0", std::to_string(own.norm_type()));
}

std::vector<FusedOptimizer::Slot> FusedNovoGrad::slots(
    const torch::optim::OptimizerOptions& /*options*/) const {
  return {{.name = "exp_avg"}, {.name = "grad_norm", .number = true}};
}

void FusedNovoGrad::update(std::span<Work> work) {
  // One pass for each norm_type in use.
  std::vector<double> norms(work.size());
  for (const double order : {2.0, std::numeric_limits<double>::infinity()}) {
    std::vector<at::Tensor> grads;
    std::vector<std::size_t> places;
    for (std::size_t i = 0; i < work.size(); ++i) {
      if (order_of(work[i].options_as<FusedNovoGradOptions>()) != order) continue;
      grads.push_back(work[i].update.grad);
      places.push_back(i);
    }
    const auto of_order = kernels::multi_tensor_norms(grads, order);
    for (std::size_t k = 0; k < places.size(); ++k)
      norms[places[k]] = std::abs(work[places[k]].grad_scale) * of_order[k];
  }
  std::size_t i = 0;
  auto rules = rules_for(work, [&](const Work& one) {
    const auto& options = one.options_as<FusedNovoGradOptions>();
    const double norm = norms[i++];
    auto* running = one.state->tensors[kNorm].mutable_data_ptr<double>();
    const double before = one.fresh[kNorm] && !options.init_zero() ? norm : *running;
    *running = moved_norm(options, before, norm);
    return rule_of(options, one.step, one.grad_scale, *running);
  });
  kernels::multi_tensor_update(items_of(work), std::move(rules));
}

}  // namespace semitone::optim

#include "semitone/optim/fused_novograd.h"

#include "src/kernels/multi_tensor_norm.h"
#include "src/optim/options.h"
#include "src/optim/work.h"

#include <algorithm>
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

struct Corrections {
  double of_moment = 1;
  double of_norm = 1;
};

Corrections corrections_of(const FusedNovoGradOptions& options, std::int64_t step) {
  if (!options.bias_correction()) return {};
  const auto [beta1, beta2] = options.betas();
  const auto t = static_cast<double>(step);
  return {1 - std::pow(beta1, t), std::sqrt(1 - std::pow(beta2, t))};
}

// Without the running norm.
kernels::NovoGradRule rule_of(const FusedNovoGradOptions& options, std::int64_t step,
                              double grad_scale) {
  const double beta1 = std::get<0>(options.betas());
  kernels::NovoGradRule rule;
  rule.grad_scale = grad_scale;
  rule.beta1 = beta1;
  rule.beta3 = options.grad_averaging() ? 1 - beta1 : 1;
  rule.lr = options.lr();
  rule.correction = 1 / corrections_of(options, step).of_moment;
  (options.reg_inside_moment() ? rule.weight_decay : rule.decoupled_weight_decay) =
      options.weight_decay();
  return rule;
}

kernels::NovoGradRule rule_of(const FusedNovoGradOptions& options, std::int64_t step,
                              double grad_scale, double running_norm) {
  const Corrections corrections = corrections_of(options, step);
  const double denominator = running_norm / corrections.of_norm + options.eps();
  kernels::NovoGradRule rule = rule_of(options, step, grad_scale);
  if (options.reg_inside_moment()) {
    rule.grad_scale = grad_scale / denominator;
  } else {
    rule.correction = 1 / (corrections.of_moment * denominator);
  }
  return rule;
}

// The inputs of measure().
struct NovoGradInput {
  enum : std::int64_t {
    kGradScale,
    kBeta2,
    kOneMinusBeta2,
    kEps,
    kOfMoment,
    kOfNorm,
    kIsMaximum,  // norm_type 0
    kStarts,     // with the first norm
    kInside,     // reg_inside_moment
  };
};

// Calls visit(order, gradients, their places) for each norm_type in use.
template <typename Work, typename Visit>
void for_each_order(std::span<Work> work, const Visit& visit) {
  for (const double order : {2.0, std::numeric_limits<double>::infinity()}) {
    std::vector<at::Tensor> grads;
    std::vector<std::size_t> places;
    for (std::size_t i = 0; i < work.size(); ++i) {
      if (order_of(work[i].template options_as<FusedNovoGradOptions>()) != order) continue;
      grads.push_back(work[i].update.grad);
      places.push_back(i);
    }
    if (!places.empty()) visit(order, grads, places);
  }
}

// Correctly rounded. On the CPU, LibTorch's own (MKL's) is not, and captured steps would differ from
// the others.
at::Tensor root_of(const at::Tensor& numbers) {
  if (!numbers.is_cpu()) return numbers.sqrt();
  at::Tensor roots = numbers.clone();
  auto* const first = roots.mutable_data_ptr<double>();
  std::transform(first, first + roots.numel(), first,
                 [](double value) { return std::sqrt(value); });
  return roots;
}

// A list of numbers on the device, of which places says where they belong.
void spread(std::vector<at::Tensor>& to, const at::Tensor& list,
            const std::vector<std::size_t>& places) {
  const auto numbers = list.unbind();
  for (std::size_t k = 0; k < places.size(); ++k) to[places[k]] = numbers[k];
}

}  // namespace

FusedNovoGradOptions::FusedNovoGradOptions(double lr) : lr_(lr) {}

void FusedNovoGradOptions::serialize(torch::serialize::InputArchive& archive) {
  for_each_novograd_option(*this, OptionsReader(archive, {"betas", "norm_type"}));
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

FusedOptimizer::Rules FusedNovoGrad::rules_of(std::span<const Work> work) const {
  Rules rules{rules_for(work, [](const Work& one) {
    return rule_of(one.options_as<FusedNovoGradOptions>(), one.step, one.grad_scale);
  })};
  for (const Work& one : work) {
    const auto& options = one.options_as<FusedNovoGradOptions>();
    const double beta2 = std::get<1>(options.betas());
    const Corrections corrections = corrections_of(options, one.step);
    const bool starts = one.fresh[kNorm] && !options.init_zero();
    rules.inputs.insert(rules.inputs.end(),
                        {one.grad_scale, beta2, 1 - beta2, options.eps(), corrections.of_moment,
                         corrections.of_norm, options.norm_type() == 0 ? 1.0 : 0.0,
                         starts ? 1.0 : 0.0, options.reg_inside_moment() ? 1.0 : 0.0});
  }
  return rules;
}

// The formulas of moved_norm() and rule_of(), on the device.
void FusedNovoGrad::measure(std::span<const Work> work, StepOnDevice& step) const {
  std::vector<at::Tensor> of_grads(work.size());
  for_each_order(work, [&](double order, const auto& grads, const auto& places) {
    spread(of_grads, kernels::multi_tensor_norms_on_device(grads, order), places);
  });
  std::vector<at::Tensor> running;
  for (const Work& one : work) running.push_back(one.number);
  const at::Tensor grad_scale = step.input(NovoGradInput::kGradScale);
  const at::Tensor norm = grad_scale.abs() * at::stack(of_grads);
  const at::Tensor stored = at::stack(running);
  const at::Tensor before = at::where(step.input(NovoGradInput::kStarts).ne(0), norm, stored);
  const at::Tensor beta2 = step.input(NovoGradInput::kBeta2);
  const at::Tensor rest = step.input(NovoGradInput::kOneMinusBeta2);
  const at::Tensor moved =
      at::where(step.input(NovoGradInput::kIsMaximum).ne(0), beta2 * before + rest * norm,
                root_of(beta2 * before * before + rest * norm * norm));
  const at::Tensor kept =
      step.found_inf.defined() ? at::where(step.found_inf.reshape({}).ne(0), stored, moved) : moved;
  at::_foreach_copy_(running, kept.unbind());
  const at::Tensor denominator =
      moved / step.input(NovoGradInput::kOfNorm) + step.input(NovoGradInput::kEps);
  const at::Tensor inside = step.input(NovoGradInput::kInside).ne(0);
  const at::Tensor of_moment = step.input(NovoGradInput::kOfMoment);
  step.update.set(
      {.grad_scale = at::where(inside, grad_scale / denominator, grad_scale),
       .correction =
           (of_moment * at::where(inside, at::ones_like(denominator), denominator)).reciprocal()});
}

void FusedNovoGrad::update(std::span<Work> all) {
  std::vector<Work> rest = update_on_devices(all);
  const std::span<Work> work(rest);
  std::vector<double> norms(work.size());
  for_each_order(work, [&](double order, const auto& grads, const auto& places) {
    const auto of_order = kernels::multi_tensor_norms(grads, order);
    for (std::size_t k = 0; k < places.size(); ++k)
      norms[places[k]] = std::abs(work[places[k]].grad_scale) * of_order[k];
  });
  std::size_t i = 0;
  auto rules = rules_for(work, [&](const Work& one) {
    const auto& options = one.options_as<FusedNovoGradOptions>();
    const double norm = norms[i++];
    auto* running = one.number.mutable_data_ptr<double>();
    const double before = one.fresh[kNorm] && !options.init_zero() ? norm : *running;
    *running = moved_norm(options, before, norm);
    return rule_of(options, one.step, one.grad_scale, *running);
  });
  kernels::multi_tensor_update(items_of(work), std::move(rules));
}

}  // namespace semitone::optim

#include "semitone/optim/fused_lamb.h"

#include "src/kernels/multi_tensor_lamb.h"
#include "src/kernels/multi_tensor_norm.h"
#include "src/optim/options.h"
#include "src/optim/work.h"

#include <torch/types.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace semitone::optim {
namespace {

constexpr auto kFusedLamb = "optim.fused_lamb";

// Calls visit(name, value) for every option.
template <typename Options, typename Visit>
void for_each_lamb_option(Options& options, Visit&& visit) {
  visit("lr", options.lr())("betas", options.betas())("eps", options.eps())(
      "weight_decay", options.weight_decay())("adam_w_mode", options.adam_w_mode())(
      "bias_correction", options.bias_correction())("grad_averaging", options.grad_averaging())(
      "max_grad_norm", options.max_grad_norm())("use_nvlamb", options.use_nvlamb());
}

// Without clipping and trust ratio.
kernels::LambRule rule_of(const FusedLAMBOptions& options, std::int64_t step, double grad_scale) {
  const auto [beta1, beta2] = options.betas();
  const auto t = static_cast<double>(step);
  kernels::LambRule rule;
  rule.grad_scale = grad_scale;
  rule.step_size = options.lr();
  (options.adam_w_mode() ? rule.decoupled_weight_decay : rule.weight_decay) =
      options.weight_decay();
  rule.beta1 = beta1;
  rule.beta3 = options.grad_averaging() ? 1 - beta1 : 1;
  rule.beta2 = beta2;
  rule.one_minus_beta2 = 1 - beta2;
  rule.eps = options.eps();
  if (options.bias_correction()) {
    rule.inv_bias_correction1 = 1 / (1 - std::pow(beta1, t));
    rule.inv_bias_correction2 = 1 / (1 - std::pow(beta2, t));
  }
  return rule;
}

// @param grad_norm  of the unscaled gradients of all groups
double clipped(const FusedLAMBOptions& options, double grad_scale, double grad_norm) {
  const double max = options.max_grad_norm();
  return max > 0 && grad_norm > max ? grad_scale * (max / grad_norm) : grad_scale;
}

bool has_trust_ratio(const FusedLAMBOptions& options) {
  return options.weight_decay() != 0 || options.use_nvlamb();
}

double trust_ratio(const FusedLAMBOptions& options, const kernels::LambNorms& norms) {
  return has_trust_ratio(options) && norms.param != 0 && norms.update != 0
             ? norms.param / norms.update
             : 1;
}

// The inputs of measure().
struct LambInput {
  enum : std::int64_t { kGradScale, kMaxGradNorm, kLr, kHasTrustRatio };
};

// Whether the host has no part in the step: it updates the parameters on the CPU itself, and then
// has to know the norm of all gradients.
bool are_on_devices(const auto& work) {
  return std::none_of(work.begin(), work.end(),
                      [](const auto& one) { return one.update.param.is_cpu(); });
}

bool clips_any(const auto& work) {
  return std::any_of(work.begin(), work.end(), [](const auto& one) {
    return one.template options_as<FusedLAMBOptions>().max_grad_norm() > 0;
  });
}

// The norm of the unscaled gradients.
double total_norm_of(const auto& work) {
  std::vector<double> norms = kernels::multi_tensor_norms(grads_of(work), 2);
  for (std::size_t i = 0; i < norms.size(); ++i) norms[i] *= std::abs(work[i].grad_scale);
  return kernels::total_norm(norms, 2);
}

}  // namespace

FusedLAMBOptions::FusedLAMBOptions(double lr) : lr_(lr) {}

void FusedLAMBOptions::serialize(torch::serialize::InputArchive& archive) {
  for_each_lamb_option(*this, OptionsReader(archive, {"betas", "max_grad_norm"}));
}

void FusedLAMBOptions::serialize(torch::serialize::OutputArchive& archive) const {
  for_each_lamb_option(*this, OptionsWriter(archive));
}

FusedLAMB::FusedLAMB(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                     const FusedLAMBOptions& defaults)
    : FusedOptimizer(groups, std::make_unique<FusedLAMBOptions>(defaults)) {
  check_options();
}

bool FusedLAMB::combines_gradients() const {
  return std::any_of(param_groups_.begin(), param_groups_.end(), [](const auto& group) {
    return dynamic_cast<const FusedLAMBOptions&>(group.options()).max_grad_norm() > 0;
  });
}

std::string_view FusedLAMB::component() const {
  return kFusedLamb;
}

void FusedLAMB::check(const torch::optim::OptimizerOptions& options) const {
  const auto& own = options_as<FusedLAMBOptions>(options, kFusedLamb);
  require_range(kFusedLamb, "lr", own.lr(), 0);
  require_range(kFusedLamb, "eps", own.eps(), 0);
  require_range(kFusedLamb, "weight_decay", own.weight_decay(), 0);
  require_range(kFusedLamb, "max_grad_norm", own.max_grad_norm(), 0);
  require_betas(kFusedLamb, own.betas());
}

std::vector<FusedOptimizer::Slot> FusedLAMB::slots(
    const torch::optim::OptimizerOptions& /*options*/) const {
  return {{.name = "exp_avg"}, {.name = "exp_avg_sq"}};
}

FusedOptimizer::Rules FusedLAMB::rules_of(std::span<const Work> work) const {
  Rules rules{rules_for(work, [](const Work& one) {
    return rule_of(one.options_as<FusedLAMBOptions>(), one.step, one.grad_scale);
  })};
  for (const Work& one : work) {
    const auto& options = one.options_as<FusedLAMBOptions>();
    rules.inputs.insert(rules.inputs.end(), {one.grad_scale, options.max_grad_norm(), options.lr(),
                                             has_trust_ratio(options) ? 1.0 : 0.0});
  }
  return rules;
}

at::Tensor FusedLAMB::grad_norm(std::span<const Work> work, const StepOnDevice& step) {
  return kernels::total_norm_on_device(kernels::multi_tensor_norms_on_device(grads_of(work), 2)
                                           .mul(step.input(LambInput::kGradScale).abs()),
                                       2);
}

void FusedLAMB::measure(std::span<const Work> work, StepOnDevice& step) const {
  measure(step, grad_norm(work, step));
}

// The formulas of update(), on the device.
void FusedLAMB::measure(StepOnDevice& step, const at::Tensor& norm) {
  const at::Tensor grad_scale = step.input(LambInput::kGradScale);
  const at::Tensor max = step.input(LambInput::kMaxGradNorm);
  const at::Tensor clips = max.gt(0).logical_and(norm.gt(max));
  step.update.set({.grad_scale = at::where(clips, grad_scale * (max / norm), grad_scale)});
  const auto norms = step.update.lamb_moments(step.items, step.found_inf).unbind(1);
  const at::Tensor scaled = step.input(LambInput::kHasTrustRatio)
                                .ne(0)
                                .logical_and(norms[0].ne(0))
                                .logical_and(norms[1].ne(0));
  const at::Tensor ratio = at::where(scaled, norms[0] / norms[1], at::ones_like(norms[0]));
  step.update.set({.step_size = step.input(LambInput::kLr) * ratio});
}

// Each device computes the norm of its own gradients. All devices get all of these norms.
void FusedLAMB::update_on_several(std::span<Work> all) const {
  struct There {
    std::vector<Work> work;
    std::vector<kernels::Update> items;
    kernels::UpdateOnDevice update;
    at::Tensor norm;
  };
  std::map<std::string, std::vector<Work>> by_device;
  for (Work& one : all) by_device[one.update.param.device().str()].push_back(std::move(one));
  const at::Tensor taken;  // no found_inf
  std::vector<There> places;
  for (auto& [name, work] : by_device) {
    const c10::Device device = work.front().update.param.device();
    There& there =
        places.emplace_back(There{std::move(work), {}, kernels::UpdateOnDevice(device), {}});
    there.items = items_of(std::span<const Work>(there.work));
    const Rules rules = rules_of(there.work);
    there.update.send(rules.rules, rules.inputs);
    there.norm = grad_norm(there.work, StepOnDevice{there.update, there.items, taken});
  }
  for (There& there : places) {
    std::vector<at::Tensor> norms;
    norms.reserve(places.size());
    for (const There& other : places)
      norms.push_back(other.norm.to(there.norm.device(), /*non_blocking=*/true));
    StepOnDevice step{there.update, there.items, taken};
    measure(step,
            norms.size() == 1 ? norms.front() : kernels::total_norm_on_device(at::stack(norms), 2));
    there.update.run(there.items, taken);
  }
}

void FusedLAMB::update(std::span<Work> work) {
  if (are_on_devices(work)) {
    update_on_several(work);
    return;
  }
  const double norm = clips_any(work) ? total_norm_of(work) : 0;
  const auto items = items_of(work);
  auto rules = rules_for(work, [&](const Work& one) {
    const auto& options = one.options_as<FusedLAMBOptions>();
    return rule_of(options, one.step, clipped(options, one.grad_scale, norm));
  });
  const auto moments = kernels::multi_tensor_lamb_moments(items, rules);
  for (std::size_t i = 0; i < rules.size(); ++i) {
    const auto& options = work[i].options_as<FusedLAMBOptions>();
    rules[i].step_size = options.lr() * trust_ratio(options, moments[i]);
  }
  kernels::multi_tensor_update(items, std::move(rules));
}

}  // namespace semitone::optim

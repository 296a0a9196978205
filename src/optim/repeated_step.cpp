#include "src/optim/repeated_step.h"

#include "semitone/core/error.h"

#include <torch/types.h>

#include <algorithm>
#include <unordered_set>
#include <utility>

namespace semitone::optim {
namespace {

constexpr auto kRepeatedStep = "optim.repeated_step";

std::vector<std::size_t> group_sizes(const std::vector<torch::optim::OptimizerParamGroup>& groups) {
  std::vector<std::size_t> sizes;
  sizes.reserve(groups.size());
  for (const auto& group : groups) sizes.push_back(group.params().size());
  return sizes;
}

c10::Device common_device(std::span<const at::Tensor> parameters) {
  return parameters.empty() ? c10::Device(c10::kCPU) : parameters.front().device();
}

}  // namespace

RepeatedStep::RepeatedStep(FusedOptimizer& optimizer, std::span<const at::Tensor> parameters)
    : optimizer_(&optimizer),
      group_sizes_(group_sizes(optimizer.param_groups())),
      update_(common_device(parameters)) {
  const at::NoGradGuard no_grad;
  if (!optimizer.rules_of({}).has_value()) {
    throw Error(kRepeatedStep,
                "an optimizer that updates each parameter by itself: Adam, SGD or Adagrad",
                std::string(optimizer.where()) + ", which looks at norms first");
  }
  std::unordered_set<const c10::TensorImpl*> wanted;
  for (const at::Tensor& parameter : parameters) wanted.insert(parameter.unsafeGetTensorImpl());
  const auto& groups = optimizer.param_groups();
  for (std::size_t g = 0; g < groups.size(); ++g) {
    optimizer.check(groups[g].options());
    if (optimizer.keeps_bf16_state(groups[g].options())) {
      throw Error(kRepeatedStep, "state in float32", "bf16_state in group " + std::to_string(g),
                  "its rounding takes other random bits in each step: take fp32 state");
    }
    for (const at::Tensor& parameter : groups[g].params()) {
      if (parameter.defined() && wanted.erase(parameter.unsafeGetTensorImpl()) > 0)
        add(parameter, g);
    }
  }
}

void RepeatedStep::add(const at::Tensor& parameter, std::size_t group) {
  const auto& options = optimizer_->param_groups()[group].options();
  const bool had_state = optimizer_->find(parameter) != nullptr;
  FusedOptimizer::Work work{&options, nullptr, {parameter, {}, {}, {}, {}}, 1, group, {}};
  optimizer_->prepare(work);
  known_.push_back({parameter.const_data_ptr(), had_state});
  work_.push_back(std::move(work));
}

RepeatedStep::~RepeatedStep() {
  if (counted_) return;
  for (std::size_t i = 0; i < work_.size(); ++i) {
    const FusedOptimizer::Work& one = work_[i];
    if (optimizer_->find(one.update.param) != one.state) continue;  // replaced since
    if (!known_[i].had_state) {
      optimizer_->state_.erase(one.update.param.unsafeGetTensorImpl());
      continue;
    }
    for (std::size_t k = 0; k < one.fresh.size(); ++k) {
      if (one.fresh[k]) one.state->tensors[k].reset();
    }
  }
}

void RepeatedStep::send_rules() {
  for (FusedOptimizer::Work& one : work_) {
    one.options = &optimizer_->param_groups()[one.group].options();
    optimizer_->check(*one.options);
  }
  // Rules are those of the step that is to come.
  for (const FusedOptimizer::Work& one : work_) ++one.state->step;
  const auto rules = optimizer_->rules_of(work_);
  for (const FusedOptimizer::Work& one : work_) --one.state->step;
  update_.send(rules.value().rules);
}

void RepeatedStep::run(const ModelCopies* copies, const at::Tensor& found_inf) {
  const at::NoGradGuard no_grad;
  std::vector<FusedOptimizer::Work> now = optimizer_->gather(FusedStep().copies(copies));
  const bool same = std::equal(now.begin(), now.end(), work_.begin(), work_.end(),
                               [](const FusedOptimizer::Work& a, const FusedOptimizer::Work& b) {
                                 return a.update.param.is_same(b.update.param);
                               });
  if (!same) {
    throw Error(kRepeatedStep, "gradients of the same parameters in each step",
                "some of " + std::to_string(now.size()) + " parameters instead of " +
                    std::to_string(work_.size()),
                "a step that is repeated cannot leave layers out by turns");
  }
  for (std::size_t i = 0; i < now.size(); ++i) {
    now[i].update.state = work_[i].update.state;
    now[i].update.low = work_[i].update.low;
  }
  update_.run(items_of(std::span<FusedOptimizer::Work>(now)), found_inf);
}

void RepeatedStep::count() {
  for (FusedOptimizer::Work& one : work_) {
    ++one.state->step;
    one.fresh = {};
  }
  counted_ = true;
}

bool RepeatedStep::is_current() const {
  if (group_sizes(optimizer_->param_groups()) != group_sizes_) return false;
  for (std::size_t i = 0; i < work_.size(); ++i) {
    const FusedOptimizer::Work& one = work_[i];
    if (optimizer_->find(one.update.param) != one.state ||
        one.update.param.const_data_ptr() != known_[i].data)
      return false;
    for (std::size_t k = 0; k < one.update.state.size(); ++k) {
      if (one.update.state[k].defined() && !one.update.state[k].is_same(one.state->tensors[k]))
        return false;
    }
    if (one.update.low.defined() && !one.update.low.is_same(one.state->master_low)) return false;
  }
  return true;
}

}  // namespace semitone::optim

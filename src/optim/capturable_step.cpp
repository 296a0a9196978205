#include "src/optim/capturable_step.h"

#include "semitone/core/error.h"

#include <torch/types.h>

#include <algorithm>
#include <array>
#include <memory>
#include <unordered_set>
#include <utility>

namespace semitone::optim {
namespace {

constexpr auto kCapturableStep = "optim.capturable_step";

c10::Device common_device(std::span<const at::Tensor> parameters) {
  return parameters.empty() ? c10::Device(c10::kCPU) : parameters.front().device();
}

}  // namespace

CapturableStep::CapturableStep(FusedOptimizer& optimizer, std::span<const at::Tensor> parameters)
    : optimizer_(&optimizer), groups_(groups_now()), update_(common_device(parameters)) {
  const at::NoGradGuard no_grad;
  found_inf_ = at::zeros({}, at::TensorOptions(common_device(parameters)).dtype(at::kFloat));
  std::unordered_set<const c10::TensorImpl*> wanted;
  for (const at::Tensor& parameter : parameters) wanted.insert(parameter.unsafeGetTensorImpl());
  const auto& groups = optimizer.param_groups();
  for (std::size_t g = 0; g < groups.size(); ++g) {
    optimizer.check(groups[g].options());
    if (optimizer.keeps_bf16_state(groups[g].options())) {
      throw Error(kCapturableStep, "state in float32", "bf16_state in group " + std::to_string(g),
                  "its rounding needs other random bits in each step: use fp32 state");
    }
    for (const at::Tensor& parameter : groups[g].params()) {
      if (parameter.defined() && wanted.erase(parameter.unsafeGetTensorImpl()) > 0)
        add(parameter, g);
    }
  }
}

std::vector<CapturableStep::Group> CapturableStep::groups_now() const {
  std::vector<Group> groups;
  for (const auto& group : optimizer_->param_groups()) {
    auto& now = groups.emplace_back();
    for (const at::Tensor& parameter : group.params())
      now.parameters.push_back(parameter.unsafeGetTensorImpl());
    now.splits_masters = optimizer_->splits_masters(group.options());
    now.keeps_bf16_state = optimizer_->keeps_bf16_state(group.options());
  }
  return groups;
}

void CapturableStep::add(const at::Tensor& parameter, std::size_t group) {
  const FusedState* const theirs = optimizer_->find(parameter);
  FusedState state = theirs == nullptr ? FusedState() : *theirs;
  FusedOptimizer::Work work;
  work.options = &optimizer_->param_groups()[group].options();
  work.update.param = parameter;
  work.group = group;
  optimizer_->prepare(work, state);
  work.state = nullptr;
  work_.push_back(std::move(work));
  records_.push_back(
      {parameter.const_data_ptr(), std::move(state), theirs == nullptr ? FusedState() : *theirs});
}

// Whether the result of the last step is unknown. If it has become known, and the step was skipped,
// restores the records, as the optimizer has its state.
bool CapturableStep::result_is_open() {
  if (deferred_ == nullptr) return false;
  if (optimizer_->deferred_ == deferred_) return true;
  if (std::exchange(deferred_, nullptr)->found_inf->any_set()) {
    for (std::size_t i = 0; i < work_.size(); ++i) {
      records_[i].theirs = records_[i].before;
      work_[i].fresh = records_[i].fresh_before;
    }
  }
  return false;
}

// What the optimizer has of a parameter, with a step of unknown result as taken.
FusedState CapturableStep::state_now(const at::Tensor& parameter) const {
  const auto entry = optimizer_->state_.find(parameter.unsafeGetTensorImpl());
  return entry == optimizer_->state_.end() ? FusedState()
                                           : static_cast<const FusedState&>(*entry->second);
}

// The rules of the next step, if the one of unknown result was taken.
FusedOptimizer::Rules CapturableStep::rules_if_taken() {
  for (FusedOptimizer::Work& one : work_) one.step = state_now(one.update.param).step + 1;
  return optimizer_->rules_of(work_);
}

// The same, if it was skipped.
FusedOptimizer::Rules CapturableStep::rules_if_skipped() {
  std::vector<FusedOptimizer::Work> work = work_;
  for (std::size_t i = 0; i < work.size(); ++i) {
    work[i].step = records_[i].before.step + 1;
    work[i].fresh = records_[i].fresh_before;
  }
  return optimizer_->rules_of(work);
}

void CapturableStep::send_rules() {
  for (FusedOptimizer::Work& one : work_) {
    one.options = &optimizer_->param_groups()[one.group].options();
    optimizer_->check(*one.options);
  }
  const bool open = result_is_open();
  if (!open) optimizer_->settle();
  const FusedOptimizer::Rules taken = rules_if_taken();
  const FusedOptimizer::Rules skipped = open ? rules_if_skipped() : taken;
  std::vector<double> inputs = taken.inputs;
  inputs.insert(inputs.end(), skipped.inputs.begin(), skipped.inputs.end());
  update_.send_either({taken.rules, skipped.rules}, inputs);
}

void CapturableStep::run(const ModelCopies* copies, const at::Tensor& found_inf) {
  const at::NoGradGuard no_grad;
  std::vector<FusedOptimizer::Work> now = optimizer_->gather(FusedStep().copies(copies));
  const bool same = std::equal(now.begin(), now.end(), work_.begin(), work_.end(),
                               [](const FusedOptimizer::Work& a, const FusedOptimizer::Work& b) {
                                 return a.update.param.is_same(b.update.param);
                               });
  if (!same) {
    throw Error(kCapturableStep, "gradients of the same parameters in each step",
                "some of " + std::to_string(now.size()) + " parameters instead of " +
                    std::to_string(work_.size()),
                "a captured step must compute the same layers each time");
  }
  for (std::size_t i = 0; i < now.size(); ++i) {
    now[i].update.state = work_[i].update.state;
    now[i].update.low = work_[i].update.low;
    now[i].number = work_[i].number;
  }
  if (now.empty()) return;
  const auto items = items_of(std::span<FusedOptimizer::Work>(now));
  update_.require_capturable(items);
  update_.choose(found_inf_);
  FusedOptimizer::StepOnDevice step{update_, items, found_inf};
  optimizer_->measure(now, step);
  update_.run(items, found_inf);
  if (found_inf.defined()) found_inf_.copy_(found_inf.reshape({}));
}

void CapturableStep::count() {
  optimizer_->settle();
  result_is_open();  // not any more
  for (std::size_t i = 0; i < work_.size(); ++i) {
    FusedState& theirs = state_in(optimizer_->state_, work_[i].update.param);
    theirs.tensors = records_[i].state.tensors;
    theirs.master_low = records_[i].state.master_low;
    ++theirs.step;
    records_[i].theirs = theirs;
    work_[i].fresh = {};
  }
}

void CapturableStep::count_unless(std::shared_ptr<kernels::ReadLater> result) {
  optimizer_->settle();
  result_is_open();  // not any more
  auto deferred = std::make_shared<FusedOptimizer::Deferred>();
  for (std::size_t i = 0; i < work_.size(); ++i) {
    const at::Tensor& parameter = work_[i].update.param;
    records_[i].before = state_now(parameter);
    records_[i].fresh_before = work_[i].fresh;
    deferred->before.emplace_back(parameter.unsafeGetTensorImpl(), records_[i].before);
  }
  count();
  deferred->found_inf = std::move(result);
  optimizer_->deferred_ = deferred;
  deferred_ = std::move(deferred);
}

bool CapturableStep::is_current() {
  if (!result_is_open()) optimizer_->settle();
  const auto& groups = optimizer_->param_groups();
  if (groups_now() != groups_) return false;
  std::vector<std::vector<FusedOptimizer::Slot>> slots;
  slots.reserve(groups.size());
  for (const auto& group : groups) slots.push_back(optimizer_->slots(group.options()));
  for (std::size_t i = 0; i < work_.size(); ++i) {
    const kernels::Update& update = work_[i].update;
    if (update.param.const_data_ptr() != records_[i].data) return false;
    const FusedState now = state_now(update.param);
    if (!now.master_low.is_same(records_[i].theirs.master_low)) return false;
    const auto& of_group = slots[work_[i].group];
    for (std::size_t k = 0; k < now.tensors.size(); ++k) {
      const bool wanted = k < of_group.size() && of_group[k].wanted;
      const bool has =
          update.state[k].defined() || (wanted && of_group[k].number && work_[i].number.defined());
      if (!now.tensors[k].is_same(records_[i].theirs.tensors[k]) || wanted != has) return false;
    }
  }
  return true;
}

}  // namespace semitone::optim

#include "semitone/optim/lr_scheduler.h"

#include "semitone/core/error.h"
#include "src/core/archive.h"
#include "src/core/log.h"

#include <ATen/core/Tensor.h>
#include <torch/serialize/archive.h>
#include <torch/types.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <string>
#include <utility>

namespace semitone::optim {
namespace {

constexpr auto kLRScheduler = "optim.lr_scheduler";
constexpr auto kLoadLRScheduler = "optim.lr_scheduler.load";

std::vector<double> current_lrs(torch::optim::Optimizer& optimizer) {
  std::vector<double> lrs;
  for (const auto& group : optimizer.param_groups()) lrs.push_back(group.options().get_lr());
  return lrs;
}

std::vector<double> read_doubles(torch::serialize::InputArchive& archive, const std::string& key,
                                 std::size_t groups) {
  const auto tensor = read_value<at::Tensor>(archive, key, kLoadLRScheduler);
  if (tensor.scalar_type() != at::kDouble || tensor.dim() != 1 ||
      tensor.size(0) != static_cast<std::int64_t>(groups)) {
    throw FileError(kLoadLRScheduler,
                    c10::str("'", key, "' of ", groups, " parameter groups in fp64"),
                    c10::str("a tensor of shape ", tensor.sizes(), " in ", tensor.scalar_type()),
                    "construct the optimizer with the parameter groups of the saved run");
  }
  const at::Tensor values = tensor.cpu().contiguous();
  const double* const first = values.const_data_ptr<double>();
  return {first, first + values.numel()};
}

// Rates are computed from integers and options, so only another libm rounds them differently.
bool same_rate(double a, double b) {
  return std::abs(a - b) <= 1e-9 * std::abs(b);
}

// Whether the first groups have these rates. Groups may have been added since.
bool begins_with(const std::vector<double>& current, const std::vector<double>& lrs) {
  return current.size() >= lrs.size() && std::equal(lrs.begin(), lrs.end(), current.begin());
}

void require_rates(const std::vector<double>& current, const std::vector<double>& lrs) {
  for (std::size_t i = 0; i < lrs.size(); ++i) {
    if (i < current.size() && current[i] == lrs[i]) continue;
    throw Error(
        kLRScheduler,
        c10::str("the learning rate ", lrs[i], " in group ", i, ", as this scheduler has set it"),
        i < current.size() ? c10::str(current[i]) : "no such group",
        "let one LRScheduler alone set the rates of an optimizer: combine schedules with "
        "SequentialLR, change rates with set_base_lrs(), and load the scheduler together with the "
        "optimizer");
  }
}

// The first group whose rates differ; the number of groups if there is none.
std::size_t first_other(const std::vector<double>& a, const std::vector<double>& b) {
  std::size_t i = 0;
  while (i < a.size() && same_rate(a[i], b[i])) ++i;
  return i;
}

}  // namespace

LRScheduler::LRScheduler(torch::optim::Optimizer& optimizer, LRSchedule schedule)
    : optimizer_(&optimizer), schedule_(std::move(schedule)) {
  auto base_lrs = current_lrs(optimizer);
  auto lrs = rates(base_lrs, 0);
  set(std::move(base_lrs), 0, std::move(lrs));
}

std::vector<double> LRScheduler::rates(const std::vector<double>& base_lrs,
                                       std::int64_t steps) const {
  std::vector<double> lrs;
  for (const double base_lr : base_lrs) {
    const double lr = schedule_.lr(base_lr, steps);
    if (!(lr >= 0) || !std::isfinite(lr)) {
      throw Error(kLRScheduler, "learning rates of at least 0 and finite",
                  c10::str(lr, " after ", steps, " steps, for group ", lrs.size(),
                           " with the base rate ", base_lr));
    }
    lrs.push_back(lr);
  }
  return lrs;
}

void LRScheduler::set(std::vector<double> base_lrs, std::int64_t steps, std::vector<double> lrs) {
  auto& groups = optimizer_->param_groups();
  for (std::size_t i = 0; i < lrs.size(); ++i) groups[i].options().set_lr(lrs[i]);
  base_lrs_ = std::move(base_lrs);
  steps_ = steps;
  last_lrs_ = std::move(lrs);
}

bool LRScheduler::was_loaded_later(const std::vector<double>& current) const {
  return !loaded_lrs_.empty() && !begins_with(current, last_lrs_) &&
         begins_with(current, loaded_lrs_);
}

void LRScheduler::step() {
  const auto current = current_lrs(*optimizer_);
  const bool is_late = was_loaded_later(current);
  if (!is_late) require_rates(current, last_lrs_);
  auto base_lrs = base_lrs_;
  for (std::size_t i = base_lrs.size(); i < current.size(); ++i) base_lrs.push_back(current[i]);
  auto lrs = rates(base_lrs, steps_ + 1);
  if (const auto i = first_other(loaded_lrs_, last_lrs_); is_late && i < loaded_lrs_.size()) {
    log()->warn(
        "the optimizer was loaded after its scheduler: until now group {} had the learning rate {} "
        "of the saved run, not {}; load the optimizer first",
        i, loaded_lrs_[i], last_lrs_[i]);
  }
  set(std::move(base_lrs), steps_ + 1, std::move(lrs));
  loaded_lrs_.clear();
}

void LRScheduler::set_base_lrs(std::vector<double> base_lrs) {
  if (base_lrs.size() != optimizer_->param_groups().size()) {
    throw Error(kLRScheduler,
                c10::str(optimizer_->param_groups().size(),
                         " base rates, one for each "
                         "parameter group"),
                c10::str(base_lrs.size()));
  }
  auto lrs = rates(base_lrs, steps_);
  set(std::move(base_lrs), steps_, std::move(lrs));
}

void LRScheduler::save(torch::serialize::OutputArchive& archive) const {
  const auto current = current_lrs(*optimizer_);
  // With groups that were added since the last step, and follow from the next one on.
  const auto of_all_groups = [&current](std::vector<double> rates) {
    for (std::size_t i = rates.size(); i < current.size(); ++i) rates.push_back(current[i]);
    return rates;
  };
  const auto base_lrs = of_all_groups(base_lrs_);
  // Those that the optimizer's file has.
  const auto lrs = of_all_groups(was_loaded_later(current) ? loaded_lrs_ : last_lrs_);
  archive.write("steps", c10::IValue(steps_));
  archive.write("following", c10::IValue(static_cast<std::int64_t>(base_lrs_.size())));
  archive.write("base_lrs", torch::tensor(base_lrs, at::kDouble), /*is_buffer=*/true);
  archive.write("lrs", torch::tensor(lrs, at::kDouble), /*is_buffer=*/true);
}

void LRScheduler::load(torch::serialize::InputArchive& archive) {
  const std::size_t groups = optimizer_->param_groups().size();
  const auto steps = read_value<std::int64_t>(archive, "steps", kLoadLRScheduler);
  auto base_lrs = read_doubles(archive, "base_lrs", groups);
  auto saved = read_doubles(archive, "lrs", groups);
  const auto following =
      find_value<std::int64_t>(archive, "following", kLoadLRScheduler).value_or(groups);
  if (following < 0 || std::cmp_greater(following, groups)) {
    throw FileError(kLoadLRScheduler, c10::str("'following' from 0 to ", groups),
                    c10::str(following));
  }
  base_lrs.resize(static_cast<std::size_t>(following));
  saved.resize(static_cast<std::size_t>(following));
  std::vector<double> lrs;
  try {
    lrs = rates(base_lrs, steps);
  } catch (const Error& error) {
    throw FileError(kLoadLRScheduler, "a state that fits the schedule", error.what(),
                    "make the schedule as the saved run did, or longer");
  }
  if (const auto i = first_other(lrs, saved); i < lrs.size()) {
    log()->warn(
        "the schedule gives group {} the learning rate {} after {} steps; in the saved run it was "
        "{}. Training continues with the schedule of this program",
        i, lrs[i], steps, saved[i]);
  }
  set(std::move(base_lrs), steps, std::move(lrs));
  loaded_lrs_ = std::move(saved);
}

}  // namespace semitone::optim

#include "semitone/autocast/autocast.h"
#include "semitone/core/error.h"
#include "semitone/core/events.h"
#include "src/amp/scaled_loss_work.h"
#include "src/autocast/custom_backward.h"
#include "src/core/log.h"
#include "src/scaling/gradient_events.h"

#include <algorithm>
#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace semitone::amp {

ScaledLoss::ScaledLoss(at::Tensor scaled, std::unique_ptr<Work> work,
                       std::vector<torch::optim::Optimizer*> plain)
    : scaled_(std::move(scaled)), work_(std::move(work)), plain_(std::move(plain)) {}

ScaledLoss::ScaledLoss(ScaledLoss&& other) noexcept
    : scaled_(std::move(other.scaled_)),
      work_(std::move(other.work_)),
      plain_(std::move(other.plain_)),
      finished_(std::exchange(other.finished_, true)) {}

ScaledLoss::~ScaledLoss() {
  if (work_ == nullptr || !work_->begun) return;
  const bool by_exception = std::uncaught_exceptions() > work_->exceptions;
  const bool is_done = !by_exception && work_->any_gradient();
  if (!is_done) work_->put_back();
  if (by_exception) return;
  try {
    if (is_done) {
      work_->finish();
    } else {
      work_->mixed->warn(
          "a ScaledLoss was destroyed after value() without a backward pass: keep it until after "
          "backward, otherwise gradients stay scaled");
    }
  } catch (const std::exception& error) {
    log()->error(error.what());
    work_->put_back();
  }
}

void ScaledLoss::require_unfinished() const {
  if (finished_) {
    throw Error("amp.mixed_precision.scaled_loss", "one backward for each scale_loss",
                "another one after finish()", "call scale_loss again");
  }
}

const at::Tensor& ScaledLoss::value() & {
  require_unfinished();
  if (work_ != nullptr) work_->begin();
  return scaled_;
}

void ScaledLoss::backward(const at::Tensor& gradient, bool retain_graph, bool create_graph) {
  value();
  try {
    // A region around the whole program would cast in the backward passes of
    // torch::autograd::Functions, whatever the region of their forward was.
    const DisableCasts as_outside;
    const auto region = custom_backward::region_for(scaled_);
    const events::PhaseScope phase(events::Phase::backward);
    scaled_.backward(gradient, retain_graph, create_graph);
  } catch (...) {
    cancel();
    throw;
  }
  finish();
}

void ScaledLoss::finish() {
  require_unfinished();
  try {
    if (work_ != nullptr) work_->finish();
    for (torch::optim::Optimizer* const optimizer : plain_) emit_unscaled_gradients(*optimizer);
  } catch (...) {
    cancel();
    throw;
  }
  finished_ = true;
  work_.reset();
}

void ScaledLoss::cancel() noexcept {
  if (work_ != nullptr) work_->put_back();
  work_.reset();
  finished_ = true;
}

ScaledLoss MixedPrecision::scale_loss(const at::Tensor& loss, torch::optim::Optimizer& optimizer,
                                      ScaleLossOptions options) {
  return scale_loss(loss, OptimizerRefs{optimizer}, options);
}

ScaledLoss MixedPrecision::scale_loss(const at::Tensor& loss, const OptimizerRefs& optimizers,
                                      ScaleLossOptions options) {
  return impl().scale_loss(loss, optimizers, options);
}

std::vector<MixedPrecision::Impl::OptimizerRecord*> MixedPrecision::Impl::records_of(
    const OptimizerRefs& refs, const char* caller) {
  std::vector<OptimizerRecord*> records;
  for (const torch::optim::Optimizer& optimizer : refs) {
    OptimizerRecord* record = &of(optimizer, caller);
    if (std::find(records.begin(), records.end(), record) == records.end())
      records.push_back(record);
  }
  return records;
}

std::vector<MixedPrecision::Impl::OptimizerRecord*> MixedPrecision::Impl::sharing_with(
    const std::vector<OptimizerRecord*>& named) {
  std::vector<OptimizerRecord*> sharing;
  for (OptimizerRecord& record : optimizers) {
    const auto shares = [&](const auto* one) { return one->component == record.component; };
    if (std::find(named.begin(), named.end(), &record) == named.end() &&
        std::any_of(named.begin(), named.end(), shares))
      sharing.push_back(&record);
  }
  return sharing;
}

ScaledLoss MixedPrecision::Impl::scale_loss(const at::Tensor& loss, const OptimizerRefs& refs,
                                            ScaleLossOptions options) {
  constexpr auto kCaller = "scale_loss";
  note_use();
  if (!scale_on_device.has_value()) settle();  // not while a step is captured
  const LossScaler& with = scaler(options.loss_id(), kCaller);
  require_no_step_past(kCaller);
  if (properties.enabled) find_shared_parameters(kCaller);
  std::vector<OptimizerRecord*> named = records_of(refs, kCaller);
  if (named.empty()) {
    throw Error("amp.mixed_precision.scale_loss", "at least one optimizer", "none",
                "name the optimizers whose parameters the loss trains");
  }
  std::vector<torch::optim::Optimizer*> heard;
  if (events::wants_gradients() && !scale_on_device.has_value()) {
    for (const OptimizerRecord* record : named) heard.push_back(record->optimizer);
  }
  if (!properties.enabled) return ScaledLoss(loss, nullptr, std::move(heard));
  // Plain training: nothing to unscale, and no masters.
  const bool plain = !with.options().dynamic() && with.scale() == 1.0 &&
                     std::none_of(named.begin(), named.end(),
                                  [](const auto* record) { return record->masters.has_value(); });
  if (plain) {
    check_plain_loss(loss);
    return ScaledLoss(cast_floating(loss, at::kFloat), nullptr, std::move(heard));
  }
  const auto& on_device = scale_on_device;
  if (on_device.has_value() && on_device->loss_id != options.loss_id()) {
    throw Error("amp.mixed_precision.scale_loss", "one loss_id in a captured step",
                std::to_string(options.loss_id()) + " in addition to " +
                    std::to_string(on_device->loss_id));
  }
  std::vector<OptimizerRecord*> sharing = sharing_with(named);
  if (named_only && !sharing.empty()) {
    throw Error("amp.captured_step", "an optimizer that shares no parameter with another one",
                "one that does", "make them one optimizer with two groups");
  }
  find_free_parameters();
  return ScaledLoss(
      on_device.has_value() ? LossScaler::scaled(loss, on_device->scale) : with.scaled(loss),
      std::make_unique<ScaledLoss::Work>(
          ScaledLoss::Work{this, options.loss_id(), with.inverse(),
                           on_device.has_value() ? on_device->inverse : at::Tensor(),
                           options.delay_unscale(), std::move(named), std::move(sharing)}));
}

ScaledLoss scale_loss(const at::Tensor& loss, torch::optim::Optimizer& optimizer,
                      ScaleLossOptions options) {
  return MixedPrecision::Impl::owner_of(optimizer, "scale_loss")
      .scale_loss(loss, {optimizer}, options);
}

}  // namespace semitone::amp

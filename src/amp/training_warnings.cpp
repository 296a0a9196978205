#include "semitone/core/error.h"
#include "src/amp/mixed_precision_impl.h"
#include "src/amp/rank.h"
#include "src/autocast/model_entries.h"
#include "src/core/log.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <unordered_set>
#include <utility>

// Warnings and errors for code that would silently train badly, or not at all.

namespace semitone::amp {

void MixedPrecision::Impl::warn(const std::string& text) const {
  if (properties.verbosity >= 1 && is_first_rank()) log()->warn(text);
}

// Plain training does not check gradients. On a CPU, checking the loss costs nothing.
void MixedPrecision::Impl::check_plain_loss(const at::Tensor& loss) {
  if (warned_of_loss || !loss.defined() || !loss.is_cpu() || !loss.is_floating_point() ||
      loss.layout() != at::kStrided || loss.numel() != 1)
    return;
  if (const double value = loss.item<double>(); !std::isfinite(value)) {
    warned_of_loss = true;
    warn(fmt::format(
        "the loss is {}: steps are not skipped, since gradients are not checked with a loss scale "
        "of 1 and no master weights (a loss_scale of \"dynamic\" would skip them)",
        value));
  }
}

// Warns once of a probable mistake that would silently train badly or not at all.
void MixedPrecision::Impl::warn_of_gradients(OptimizerRecord& record) {
  if (record.warned_of_no_gradient && record.warned_of_no_scale) return;
  if (!record.has_gradient()) {
    if (!found_inf_hook && !std::exchange(record.warned_of_no_gradient, true)) {
      warn(
          "mixed.step(optimizer) without any gradient: does the optimizer belong to the model that "
          "computed the loss, and was mixed.scale_loss(loss, optimizer).backward() called?");
    }
    return;
  }
  const bool scales = std::any_of(scalers.begin(), scalers.end(), [](const LossScaler& scaler) {
    return scaler.options().dynamic() || scaler.scale() != 1;
  });
  const bool scaled = std::any_of(pending.begin(), pending.end(), [&](const Pending& one) {
    return std::find(one.optimizers.begin(), one.optimizers.end(), &record) != one.optimizers.end();
  });
  if (scaled) return;
  const bool underflows = scales && properties.dtype == at::kHalf;
  // Gradients that a loss leaves in the model of another optimizer stay there, where that optimizer's
  // zero_grad(), which has the masters, does not reach them.
  const bool remain = optimizers.size() > 1 && record.masters.has_value();
  if ((!underflows && !remain) || std::exchange(record.warned_of_no_scale, true)) return;
  warn(
      underflows
          ? "mixed.step(optimizer) with gradients that were back-propagated without a loss scale: "
            "values below 6e-8 are 0 in float16; call mixed.scale_loss(loss, optimizer).backward() "
            "instead of loss.backward()"
          : "mixed.step(optimizer) with gradients of loss.backward(), and several optimizers with "
            "master weights: optimizer.zero_grad() does not clear such gradients in the model; "
            "call "
            "mixed.scale_loss(loss, optimizer).backward() instead, or model->zero_grad()");
}

// With master weights, gradients move to the masters, away from memory of the program.
void MixedPrecision::Impl::warn_of_kept_gradients(OptimizerRecord& record) const {
  if (std::exchange(record.warned_of_kept_gradients, true)) return;
  warn(
      "the program keeps tensors that are gradients of the model: with master weights, "
      "mixed.step(optimizer) does not read them; take parameter.grad() again after each backward "
      "pass");
}

namespace {

// More micro-batches than programs accumulate.
constexpr int kManyBackwards = 64;

// Counts a backward pass. True once: for the one with which they are many.
bool are_many_now(int& backwards) {
  if (backwards == kManyBackwards) return false;
  ++backwards;
  return backwards == kManyBackwards;
}

}  // namespace

// With master weights, optimizer.step() after loss.backward() finds no gradients, and does nothing.
void MixedPrecision::Impl::count_unseen_backward(OptimizerRecord& record, const char* caller) {
  if (!record.watched || record.unseen_backwards == kManyBackwards) return;
  if (record.scaled.has_value()) return;  // those of a delayed loss
  if (!record.masters->has_gradients_in_model() || !are_many_now(record.unseen_backwards)) return;
  warn(fmt::format(
      "{} calls of mixed.{} with gradients of loss.backward() in the model, and none of "
      "mixed.step(optimizer): optimizer.step() and optimizer.zero_grad() have the fp32 master "
      "weights, and do not reach these gradients; call mixed.scale_loss(loss, "
      "optimizer).backward() and mixed.step(optimizer) instead",
      kManyBackwards, caller));
}

// optimizer.step() before a ScaledLoss is finished finds no gradients, either.
void MixedPrecision::Impl::count_unused_backward(OptimizerRecord& record) {
  if (!record.watched || !are_many_now(record.unused_backwards)) return;
  warn(
      fmt::format("{} backward passes of mixed.scale_loss(…), and no call of "
                  "mixed.step(optimizer): it is to be called after the ScaledLoss is finished",
                  kManyBackwards));
}

void MixedPrecision::Impl::require_no_step_past(const char* caller) {
  for (OptimizerRecord& record : optimizers) {
    if (!record.watch.is_on() || !record.watch.has_stepped(*record.optimizer)) continue;
    record.watch.stop();
    record.watched = false;  // reported once
    throw Error(std::string("amp.mixed_precision.") + caller,
                "mixed.step(optimizer) after a backward through scale_loss",
                "optimizer.step(), which steps on inf and never updates the loss scale",
                "call mixed.step(optimizer) instead");
  }
}

void MixedPrecision::Impl::warn_of_idle_models(const OptimizerRecord& record) {
  if (ran_elsewhere || !policy.has_value() || properties.verbosity < 1) return;
  if (std::find(ran.begin(), ran.end(), false) == ran.end() || idle_model_checks == 0) return;
  --idle_model_checks;
  for (std::size_t i = 0; i < models.size(); ++i) {
    if (ran[i] || warned_of[i]) continue;
    std::unordered_set<const c10::TensorImpl*> trained;
    record.for_each_leaf([&](const at::Tensor& parameter) {
      const bool has_gradient =
          parameter.grad().defined() ||
          (record.masters.has_value() && record.masters->has_gradient(parameter));
      if (has_gradient) trained.insert(parameter.unsafeGetTensorImpl());
    });
    const auto entries = entries_of(models[i]);
    const bool trains = std::any_of(entries.begin(), entries.end(), [&](const ModelEntry& entry) {
      return trained.count(entry.tensor.unsafeGetTensorImpl()) > 0;
    });
    if (!trains) continue;
    warned_of[i] = true;
    log()->warn(
        "{} is trained, but never ran in mixed precision: call mixed.forward(model, …) instead of "
        "model->forward(…); for other methods use mixed.call(…), or the region mixed.autocast()",
        models.size() == 1 ? "the model" : "model " + std::to_string(i));
  }
}

}  // namespace semitone::amp

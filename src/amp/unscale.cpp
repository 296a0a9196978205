#include "semitone/core/error.h"
#include "semitone/core/events.h"
#include "src/amp/mixed_precision_impl.h"
#include "src/amp/unreduced_marks.h"
#include "src/autocast/model_entries.h"
#include "src/scaling/gradient_events.h"

#include <algorithm>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

namespace semitone::amp {
namespace {

using Impl = MixedPrecision::Impl;
using OptimizerRecord = Impl::OptimizerRecord;

// Whether the model's gradients can stay where they are until the step. Only with a scale of 1,
// since programs may inspect them there.
bool may_defer(const Impl& mixed, const OptimizerRecord& record, float inverse,
               const at::Tensor& inverse_on_device) {
  if (!record.masters.has_value() || inverse_on_device.defined() || inverse != 1 ||
      !record.masters->can_defer_gradients())
    return false;
  bool may = true;
  record.for_each_leaf([&](const at::Tensor& parameter) {
    may = may && mixed.set_aside.count(parameter.unsafeGetTensorImpl()) == 0 &&
          !is_unreduced(parameter.grad());
  });
  return may;
}

// The results of a loss for the same optimizers.
auto find_same(std::vector<Impl::Pending>& pending, const Impl::Pending& wanted) {
  return std::find_if(pending.begin(), pending.end(), [&](const Impl::Pending& candidate) {
    return candidate.loss_id == wanted.loss_id && candidate.optimizers == wanted.optimizers &&
           candidate.named == wanted.named;
  });
}

// Adds a result to the list, or its flags to those of the same result.
void note(std::vector<Impl::Pending>& pending, Impl::Pending result) {
  const auto same = find_same(pending, result);
  if (same == pending.end()) {
    pending.push_back(std::move(result));
    return;
  }
  for (const at::Tensor& flag : result.found_inf) {
    const bool is_listed =
        std::any_of(same->found_inf.begin(), same->found_inf.end(),
                    [&](const at::Tensor& other) { return other.is_same(flag); });
    if (!is_listed) same->found_inf.push_back(flag);
  }
}

// The pass of Impl::unscale() over the gradients of some optimizers.
class UnscalePass {
 public:
  UnscalePass(Impl& mixed, const std::vector<OptimizerRecord*>& records, float inverse,
              const at::Tensor& inverse_on_device)
      : mixed_(mixed), records_(records), inverse_(inverse), inverse_on_device_(inverse_on_device) {
    for (const OptimizerRecord* record : records_) marks_.emplace_back(*record);
    for (OptimizerRecord* record : records_) {
      if (may_defer(mixed, *record, inverse, inverse_on_device)) deferring_.push_back(record);
    }
  }

  void run(std::vector<at::Tensor>& found_inf) {
    unscale(found_inf);
    add_earlier(found_inf);
    // Last: if an earlier statement throws, the gradients stay in the model.
    defer(found_inf);
    for (const UnreducedMarks& one : marks_) one.restore();
  }

 private:
  // The gradient that a parameter had before the backward pass, if it was set aside.
  at::Tensor earlier(const at::Tensor& parameter) const {
    const auto found = mixed_.set_aside.find(parameter.unsafeGetTensorImpl());
    const bool apart = found != mixed_.set_aside.end() && !found->second.also_inside;
    return apart ? found->second.grad : at::Tensor();
  }

  void unscale(std::vector<at::Tensor>& found_inf) const {
    Gradients scaled(inverse_on_device_.defined() ? kernels::InverseScale(inverse_on_device_)
                                                  : kernels::InverseScale(inverse_));
    for (OptimizerRecord* record : records_) {
      const auto& masters = record->masters;
      if (masters.has_value() && !defers(record)) record->masters->take_gradients(scaled);
      record->for_each_without_master(
          [&](const at::Tensor& parameter) { scaled.unscale(parameter, earlier(parameter)); });
    }
    scaled.run(found_inf);
  }

  // Gradients that were back-propagated without a scale also go to the masters.
  void add_earlier(std::vector<at::Tensor>& found_inf) const {
    Gradients unscaled(1.0F);
    for (OptimizerRecord* record : records_) {
      if (!record->masters.has_value() || defers(record)) continue;
      record->masters->for_each([&](const at::Tensor& parameter, const at::Tensor&) {
        parameter.mutable_grad() = earlier(parameter);
      });
      record->masters->take_gradients(unscaled);
    }
    unscaled.run(found_inf);
  }

  void defer(std::vector<at::Tensor>& found_inf) const {
    for (OptimizerRecord* record : deferring_) {
      record->masters->defer_gradients(inverse_, found_inf);
      found_inf_on(found_inf, device_of(*record->optimizer));  // without gradients too
    }
  }

  bool defers(const OptimizerRecord* record) const {
    return std::find(deferring_.begin(), deferring_.end(), record) != deferring_.end();
  }

  Impl& mixed_;
  const std::vector<OptimizerRecord*>& records_;
  float inverse_;
  const at::Tensor& inverse_on_device_;
  std::vector<UnreducedMarks> marks_;
  std::vector<OptimizerRecord*> deferring_;  // their gradients stay in the model
};

}  // namespace

void MixedPrecision::Impl::unscale(const std::vector<OptimizerRecord*>& of,
                                   const std::vector<OptimizerRecord*>& sharing,
                                   std::int64_t loss_id, float inverse,
                                   const at::Tensor& inverse_on_device, bool named) {
  std::vector<Pending> results;
  if (!of.empty()) results.push_back({loss_id, of, {}, named});
  // Those that only share parameters with what is unscaled skip their own next steps.
  for (OptimizerRecord* record : sharing) results.push_back({loss_id, {record}, {}, false});
  std::vector<at::Tensor> found_inf;
  if (const auto before = find_same(pending, results.front()); before != pending.end())
    found_inf = before->found_inf;
  std::vector<OptimizerRecord*> all = of;
  all.insert(all.end(), sharing.begin(), sharing.end());
  UnscalePass(*this, all, inverse, inverse_on_device).run(found_inf);
  if (!inverse_on_device.defined()) {  // while a graph is captured, nothing may be read
    for (OptimizerRecord* record : all)
      emit_unscaled_gradients(*record->optimizer,
                              record->masters.has_value() ? &*record->masters : nullptr);
  }
  for (Pending& result : results) {
    result.found_inf = found_inf;
    note(pending, std::move(result));
  }
}

void MixedPrecision::Impl::take_unscaled_gradients(OptimizerRecord& record) {
  if (!record.masters.has_value()) return;
  const events::PhaseScope phase(events::Phase::unscale);
  const UnreducedMarks marks(record);
  Gradients unscaled(1.0F);
  record.masters->take_gradients(unscaled);
  std::vector<at::Tensor> ignored;
  unscaled.run(ignored);
  marks.restore();
}

// Drops records of other optimizers' losses whose gradients were dropped in this optimizer since.
void MixedPrecision::Impl::drop_stale_results(OptimizerRecord& record) {
  const auto concerns = [&](const Pending& one) {
    return !one.named && one.optimizers.front() == &record;
  };
  if (std::none_of(pending.begin(), pending.end(), concerns)) return;
  if (record.masters.has_value()) record.masters->hide_gradients();
  if (!record.has_gradient()) std::erase_if(pending, concerns);
}

void MixedPrecision::Impl::hide_gradients() {
  for (OptimizerRecord& record : optimizers) {
    if (record.masters.has_value()) record.masters->hide_gradients();
  }
}

void MixedPrecision::Impl::show_gradients() {
  for (OptimizerRecord& record : optimizers) {
    if (record.masters.has_value()) record.masters->show_gradients();
  }
}

bool MixedPrecision::Impl::has_scaled_gradients() const {
  return std::any_of(optimizers.begin(), optimizers.end(),
                     [](const OptimizerRecord& record) { return record.scaled.has_value(); });
}

void MixedPrecision::Impl::refresh_gradients(const Model* model, const char* caller) {
  if (!at::GradMode::is_enabled() || in_backward_pass()) return;
  if (models.size() == 1) model = nullptr;  // entries_of() allocates a name for each tensor
  std::unordered_set<const c10::TensorImpl*> of_model;
  for (OptimizerRecord& record : optimizers) {
    if (!record.masters.has_value()) continue;
    count_unseen_backward(record, caller);
    if (!record.masters->shows_gradients()) continue;
    if (model != nullptr && of_model.empty()) {
      for (const ModelEntry& entry : entries_of(*model))
        of_model.insert(entry.tensor.unsafeGetTensorImpl());
    }
    bool concerns = model == nullptr;
    record.masters->for_each([&](const at::Tensor& parameter, const at::Tensor&) {
      concerns = concerns || of_model.count(parameter.unsafeGetTensorImpl()) > 0;
    });
    if (concerns) record.masters->refresh_gradients();
  }
}

void MixedPrecision::Impl::require_unscaled(const OptimizerRecord& record, const char* caller) {
  if (!record.scaled.has_value()) return;
  throw Error(std::string("amp.mixed_precision.") + caller, "gradients that are unscaled",
              record.scaled->open ? "a ScaledLoss that is not finished"
                                  : "scaled ones: the last scale_loss had delay_unscale = true",
              record.scaled->open ? "call its backward() or finish()"
                                  : "omit it in the last backward of an iteration");
}

void MixedPrecision::Impl::require_unchanged_since_clipping(const OptimizerRecord& record,
                                                            const char* caller) {
  if (!record.masters.has_value() || !record.masters->has_changed_clipped()) return;
  throw Error(std::string("amp.mixed_precision.") + caller,
              "gradients that are unchanged since clip_grad_norm_, whose factor step() applies",
              "changed ones", "change parameter.grad() before clip_grad_norm_");
}

}  // namespace semitone::amp

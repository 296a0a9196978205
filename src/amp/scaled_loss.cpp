#include "semitone/amp/autocast.h"
#include "semitone/amp/cast_tree.h"
#include "semitone/core/error.h"
#include "semitone/optim/clip_grad.h"
#include "src/amp/custom_backward.h"
#include "src/amp/mixed_precision_impl.h"
#include "src/amp/rank.h"
#include "src/core/log.h"
#include "src/core/unreduced.h"
#include "src/kernels/multi_tensor_norm.h"

#include <c10/util/ScopeExit.h>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <iterator>
#include <map>
#include <string>
#include <unordered_set>
#include <utility>

namespace semitone::amp {

namespace {

using Impl = MixedPrecision::Impl;
using OptimizerRecord = Impl::OptimizerRecord;
using SetAside = Impl::SetAside;

// Keeps a gradient while backward runs. A gradient that is part of a larger tensor, such as a
// bucket that is reduced over ranks, is copied, since the backward pass writes there.
at::Tensor kept(const at::Tensor& grad) {
  if (grad.layout() != at::kStrided) return grad;
  const bool own = grad.storage().use_count() == 1 && grad.storage().nbytes() == grad.nbytes();
  return own ? grad : grad.clone();
}

// A gradient times a scale, as backward would have left it in the parameter.
at::Tensor scaled_again(const at::Tensor& parameter, const at::Tensor& grad, float inverse) {
  const at::NoGradGuard no_grad;
  const at::Tensor product = grad.mul(1.0 / double{inverse});
  return grad.layout() == at::kStrided ? at::empty_like(parameter).copy_(product)
                                       : product.to(parameter.scalar_type());
}

// The gradients that are marked as this rank's own (core/unreduced.h), so that their successors get
// the mark too.
class UnreducedMarks {
 public:
  explicit UnreducedMarks(const OptimizerRecord& record) {
    if (record.masters.has_value()) {
      record.masters->for_each([&](const at::Tensor& parameter, const at::Tensor& master) {
        if (is_unreduced(parameter.grad()) || is_unreduced(master.grad()))
          holders_.push_back(master);
      });
    }
    for_each_parameter(*record.optimizer, [&](std::size_t, std::size_t, const at::Tensor& leaf) {
      const bool is_master = record.masters.has_value() && record.masters->is_master(leaf);
      if (!is_master && is_unreduced(leaf.grad())) holders_.push_back(leaf);
    });
  }
  bool empty() const { return holders_.empty(); }
  void restore() const {
    for (const at::Tensor& holder : holders_) mark_unreduced(holder.grad());
  }

 private:
  std::vector<at::Tensor> holders_;  // the tensors that hold them once they are unscaled
};

}  // namespace

// The processing of one loss around backward: begin() before it, finish() or put_back() after it.
struct ScaledLoss::Work {
  // Optimizers that were not named for the loss: one, or several that share parameters. They get
  // their gradients, too: as in training without a loss scale.
  struct Other {
    std::vector<OptimizerRecord*> all;
    // Whether they held gradients of another scale, delayed or in another backward; and these.
    bool was_scaled;
    bool was_open;
    std::vector<SetAside> before;
  };

  Impl* mixed;
  std::int64_t loss_id;
  float inverse;
  at::Tensor inverse_on_device;  // if it is to be read there
  bool delay;
  std::vector<OptimizerRecord*> optimizers;    // that were named for the loss
  std::vector<OptimizerRecord*> sharing = {};  // and those that share parameters with them
  std::vector<Other> others = {};
  std::vector<SetAside> free = {};  // parameters in no optimizer
  bool begun = false;
  int exceptions = std::uncaught_exceptions();

  void begin();
  void finish();
  void put_back() noexcept;
  bool any_gradient() const;

 private:
  std::vector<OptimizerRecord*> concerned() const {
    std::vector<OptimizerRecord*> all = optimizers;
    all.insert(all.end(), sharing.begin(), sharing.end());
    return all;
  }
  void check() const;
  void begin(OptimizerRecord& record);
  void begin(Other& other);
  void begin_free();
  void finish(Other& other);
  void finish_free();
  void restore(const std::vector<OptimizerRecord*>& all) noexcept;
  void erase_set_aside(const OptimizerRecord& optimizer);
  bool leaves_others_alone() const { return mixed->named_only || inverse_on_device.defined(); }
};

void ScaledLoss::Work::check() const {
  constexpr auto kComponent = "amp.mixed_precision.scale_loss";
  for (const OptimizerRecord* record : concerned()) {
    if (!record->scaled.has_value()) continue;
    const auto& scaled = *record->scaled;
    if (scaled.open) {
      throw Error(kComponent, "one loss at a time in backward for an optimizer",
                  "a second one while the first is not finished",
                  "call finish() after your own backward through value()");
    }
    if (scaled.loss_id != loss_id) {
      throw Error(kComponent,
                  "loss_id " + std::to_string(scaled.loss_id) +
                      ", with which the optimizer's gradients are scaled",
                  std::to_string(loss_id),
                  "finish the delayed loss first: call it once with delay_unscale = false");
    }
    if (scaled.inverse != inverse) {
      throw Error(kComponent, "the loss scale that the delayed gradients have", "another one",
                  "a step with the same loss_id changed it: use separate loss_ids");
    }
  }
}

// Gradients of this backward are scaled. Those in the model so far are not, and are kept apart
// until it is over. This covers all parameters, of every optimizer.
void ScaledLoss::Work::begin() {
  if (begun) return;
  check();
  mixed->pull("scale_loss");
  begun = true;
  const std::vector<OptimizerRecord*> all = concerned();
  std::map<std::size_t, Other> by_component;
  for (OptimizerRecord& record : mixed->optimizers) {
    if (std::find(all.begin(), all.end(), &record) == all.end())
      by_component[record.component].all.push_back(&record);
  }
  for (auto& [component, other] : by_component) begin(others.emplace_back(std::move(other)));
  begin_free();
  for (OptimizerRecord* record : all) {
    // Otherwise the existing gradients have the same scale.
    if (!record->scaled.has_value()) begin(*record);
    record->scaled = Impl::Scaled{loss_id, inverse, /*open=*/true};
  }
}

void ScaledLoss::Work::begin(OptimizerRecord& record) {
  mixed->drop_stale_results(record);
  if (record.masters.has_value()) record.masters->move_deferred_gradients();
  if (const UnreducedMarks marks(record); !marks.empty()) {
    // This rank's own gradients must be reduced together with the new ones.
    Impl::take_unscaled_gradients(record);
    if (record.masters.has_value()) {
      record.masters->for_each([this](const at::Tensor& parameter, const at::Tensor& master) {
        if (!is_unreduced(master.grad())) return;
        mixed->set_aside[parameter.unsafeGetTensorImpl()] = {parameter, master.grad(), master,
                                                             true};
        parameter.mutable_grad() = scaled_again(parameter, master.grad(), inverse);
        master.mutable_grad().reset();
        mark_unreduced(parameter.grad());
      });
    }
  }
  record.for_each_leaf([this](const at::Tensor& parameter) {
    at::Tensor& grad = parameter.mutable_grad();
    if (!grad.defined()) return;
    const auto [place, is_new] = mixed->set_aside.try_emplace(parameter.unsafeGetTensorImpl());
    if (!is_new && place->second.also_inside) return;
    place->second = {parameter, kept(grad), {}, is_unreduced(grad)};
    if (!place->second.also_inside) return grad.reset();
    grad = scaled_again(parameter, grad, inverse);
    mark_unreduced(grad);
  });
}

void ScaledLoss::Work::begin(Other& other) {
  const auto scaled = std::find_if(other.all.begin(), other.all.end(),
                                   [](const auto* record) { return record->scaled.has_value(); });
  other.was_scaled = scaled != other.all.end();
  if (!other.was_scaled) {
    for (OptimizerRecord* record : other.all) {
      begin(*record);
      record->scaled = Impl::Scaled{loss_id, inverse, /*open=*/true};
    }
    return;
  }
  const Impl::Scaled as_the_others = *(*scaled)->scaled;
  other.was_open = as_the_others.open;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (OptimizerRecord* record : other.all) {
    record->scaled = Impl::Scaled{as_the_others.loss_id, as_the_others.inverse, /*open=*/true};
    record->for_each_leaf([&](const at::Tensor& parameter) {
      if (!seen.insert(parameter.unsafeGetTensorImpl()).second) return;
      other.before.push_back({parameter, parameter.grad()});
      parameter.mutable_grad().reset();
    });
  }
}

void ScaledLoss::Work::begin_free() {
  for (const at::Tensor& parameter : mixed->free_parameters) {
    at::Tensor& grad = parameter.mutable_grad();
    SetAside before{parameter, grad.defined() ? kept(grad) : grad, {}, is_unreduced(grad)};
    if (before.also_inside) {
      grad = scaled_again(parameter, grad, inverse);
      mark_unreduced(grad);
    } else {
      grad.reset();
    }
    free.push_back(std::move(before));
  }
}

void ScaledLoss::Work::erase_set_aside(const OptimizerRecord& optimizer) {
  optimizer.for_each_leaf([this](const at::Tensor& parameter) {
    mixed->set_aside.erase(parameter.unsafeGetTensorImpl());
  });
}

void ScaledLoss::Work::finish() {
  begin();  // where backward was not run at all
  // Finished work leaves the list, and is not undone if something else throws.
  for (; !others.empty(); others.pop_back()) finish(others.back());
  finish_free();
  const std::vector<OptimizerRecord*> all = concerned();
  if (delay) {
    for (OptimizerRecord* record : all) record->scaled->open = false;
  } else {
    mixed->unscale(optimizers, sharing, loss_id, inverse, inverse_on_device, /*named=*/true);
    for (OptimizerRecord* record : all) {
      erase_set_aside(*record);
      record->scaled.reset();
    }
  }
  const bool may_skip = mixed->scaler(loss_id, "scale_loss").options().dynamic() || inverse != 1;
  for (OptimizerRecord* record : optimizers) {
    if (record->scaled.has_value() || inverse_on_device.defined()) continue;
    if (record->masters.has_value()) record->masters->show_gradients();
    if (record->watched && may_skip) record->watch.start(*record->optimizer);
  }
}

void ScaledLoss::Work::finish(Other& other) {
  if (other.was_scaled) {
    Gradients pass(inverse / other.all.front()->scaled->inverse);
    for (const SetAside& before : other.before) {
      if (leaves_others_alone()) before.parameter.mutable_grad().reset();
      pass.unscale(before.parameter, before.grad);
    }
    std::vector<at::Tensor> found_later;  // once they are unscaled
    pass.run(found_later);
    for (OptimizerRecord* record : other.all) record->scaled->open = other.was_open;
    return;
  }
  if (leaves_others_alone()) {
    restore(other.all);
    return;
  }
  bool any = false;
  for (const OptimizerRecord* record : other.all) {
    record->for_each_leaf(
        [&](const at::Tensor& parameter) { any = any || parameter.grad().defined(); });
  }
  // A hook is called on all ranks, or on none.
  if (any || mixed->found_inf_hook) {
    mixed->unscale({}, other.all, loss_id, inverse, {}, /*named=*/false);
    for (OptimizerRecord* record : other.all) {
      erase_set_aside(*record);
      record->scaled.reset();
    }
  } else {
    restore(other.all);
  }
  for (OptimizerRecord* record : other.all) {
    if (record->masters.has_value()) record->masters->show_gradients();
  }
}

void ScaledLoss::Work::finish_free() {
  Gradients pass(inverse);
  std::vector<at::Tensor> unreduced;
  for (const SetAside& before : free) {
    at::Tensor& grad = before.parameter.mutable_grad();
    if (leaves_others_alone()) {
      grad = before.grad;
      continue;
    }
    if (is_unreduced(grad)) unreduced.push_back(before.parameter);
    pass.unscale(before.parameter, before.also_inside ? at::Tensor() : before.grad);
  }
  std::vector<at::Tensor> ignored;  // no step to skip
  pass.run(ignored);
  for (const at::Tensor& parameter : unreduced) mark_unreduced(parameter.grad());
  free.clear();
}

// Gradients as they were before begin().
void ScaledLoss::Work::restore(const std::vector<OptimizerRecord*>& all) noexcept {
  for (const OptimizerRecord* record : all) {
    record->for_each_leaf([this](const at::Tensor& parameter) {
      const auto found = mixed->set_aside.find(parameter.unsafeGetTensorImpl());
      parameter.mutable_grad().reset();
      if (found == mixed->set_aside.end()) return;
      const at::Tensor& holder =
          found->second.master.defined() ? found->second.master : found->second.parameter;
      holder.mutable_grad() = found->second.grad;
    });
  }
  for (OptimizerRecord* record : all) {
    erase_set_aside(*record);
    record->scaled.reset();
  }
}

void ScaledLoss::Work::put_back() noexcept {
  if (!begun) return;
  restore(concerned());
  for (Other& other : others) {
    if (!other.was_scaled) {
      restore(other.all);
      continue;
    }
    for (const SetAside& before : other.before) before.parameter.mutable_grad() = before.grad;
    for (OptimizerRecord* record : other.all) {
      if (record->scaled.has_value()) record->scaled->open = other.was_open;
    }
  }
  for (const SetAside& before : free) before.parameter.mutable_grad() = before.grad;
  for (OptimizerRecord& record : mixed->optimizers) {
    if (record.masters.has_value()) record.masters->show_gradients();
  }
}

bool ScaledLoss::Work::any_gradient() const {
  return std::any_of(mixed->optimizers.begin(), mixed->optimizers.end(),
                     [](const OptimizerRecord& record) {
                       bool any = false;
                       record.for_each_leaf([&](const at::Tensor& parameter) {
                         any = any || parameter.grad().defined();
                       });
                       return any;
                     }) ||
         std::any_of(free.begin(), free.end(),
                     [](const SetAside& before) { return before.parameter.grad().defined(); });
}

namespace {

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

}  // namespace

void MixedPrecision::Impl::unscale(const std::vector<OptimizerRecord*>& of,
                                   const std::vector<OptimizerRecord*>& sharing,
                                   std::int64_t loss_id, float inverse,
                                   const at::Tensor& inverse_on_device, bool named) {
  const auto earlier = [this](const at::Tensor& parameter) {
    const auto found = set_aside.find(parameter.unsafeGetTensorImpl());
    const bool apart = found != set_aside.end() && !found->second.also_inside;
    return apart ? found->second.grad : at::Tensor();
  };
  std::vector<OptimizerRecord*> all = of;
  all.insert(all.end(), sharing.begin(), sharing.end());
  // Those that only share parameters with what is unscaled skip their own next steps.
  std::vector<std::pair<std::vector<OptimizerRecord*>, bool>> noted;
  if (!of.empty()) noted.emplace_back(of, named);
  for (OptimizerRecord* record : sharing) noted.emplace_back(std::vector{record}, false);
  const auto note_of = [&](const auto& one) {
    return std::find_if(pending.begin(), pending.end(), [&](const Pending& candidate) {
      return candidate.loss_id == loss_id && candidate.optimizers == one.first &&
             candidate.named == one.second;
    });
  };
  std::vector<at::Tensor> found_inf;
  if (const auto before = note_of(noted.front()); before != pending.end())
    found_inf = before->found_inf;

  std::vector<UnreducedMarks> marks;
  for (const OptimizerRecord* record : all) marks.emplace_back(*record);
  std::vector<OptimizerRecord*> deferring;
  std::copy_if(all.begin(), all.end(), std::back_inserter(deferring),
               [&](const OptimizerRecord* record) {
                 return may_defer(*this, *record, inverse, inverse_on_device);
               });
  const auto defers = [&](const OptimizerRecord* record) {
    return std::find(deferring.begin(), deferring.end(), record) != deferring.end();
  };
  Gradients scaled(inverse_on_device.defined() ? kernels::InverseScale(inverse_on_device)
                                               : kernels::InverseScale(inverse));
  for (OptimizerRecord* record : all) {
    if (record->masters.has_value() && !defers(record)) record->masters->take_gradients(scaled);
    for_each_parameter(*record->optimizer,
                       [&](std::size_t, std::size_t, const at::Tensor& parameter) {
                         if (!record->masters.has_value() || !record->masters->is_master(parameter))
                           scaled.unscale(parameter, earlier(parameter));
                       });
  }
  scaled.run(found_inf);

  // Gradients that were back-propagated without a scale also go to the masters.
  Gradients unscaled(1.0F);
  for (OptimizerRecord* record : all) {
    if (!record->masters.has_value() || defers(record)) continue;
    record->masters->for_each([&](const at::Tensor& parameter, const at::Tensor&) {
      parameter.mutable_grad() = earlier(parameter);
    });
    record->masters->take_gradients(unscaled);
  }
  unscaled.run(found_inf);
  // Last: if an earlier statement throws, the gradients stay in the model.
  for (OptimizerRecord* record : deferring) {
    bool found = false;
    record->masters->defer_gradients(inverse, found);
    at::Tensor& flag = found_inf_on(found_inf, device_of(*record->optimizer));
    if (found) flag.fill_(1);
  }
  for (const UnreducedMarks& one : marks) one.restore();

  for (const auto& one : noted) {
    const auto before = note_of(one);
    if (before == pending.end()) {
      pending.push_back({loss_id, one.first, found_inf, one.second});
      continue;
    }
    for (const at::Tensor& flag : found_inf) {
      const bool is_listed =
          std::any_of(before->found_inf.begin(), before->found_inf.end(),
                      [&](const at::Tensor& other) { return other.is_same(flag); });
      if (!is_listed) before->found_inf.push_back(flag);
    }
  }
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

void MixedPrecision::Impl::find_shared_parameters(const char* caller) {
  std::size_t count = 0;
  for (const OptimizerRecord& record : optimizers) {
    for (const auto& group : record.optimizer->param_groups()) count += group.params().size();
  }
  if (parameters_seen == count) return;
  std::unordered_map<const c10::TensorImpl*, OptimizerRecord*> owners;
  for (std::size_t i = 0; i < optimizers.size(); ++i) optimizers[i].component = i;
  for (OptimizerRecord& record : optimizers) {
    record.for_each_leaf([&](const at::Tensor& leaf) {
      const OptimizerRecord& owner =
          *owners.try_emplace(leaf.unsafeGetTensorImpl(), &record).first->second;
      if (&owner == &record) return;
      if (record.masters.has_value()) {
        throw Error(std::string("amp.mixed_precision.") + caller,
                    "every parameter in one optimizer where there are master weights",
                    "one that was added to a second optimizer",
                    "a parameter has one master: make it one optimizer with two groups, or use O1");
      }
      const std::size_t merged = record.component;
      for (OptimizerRecord& one : optimizers) {
        if (one.component == merged) one.component = owner.component;
      }
    });
  }
  free_parameters.clear();
  for (const Model& model : models) {
    for (const Model::Entry& entry : model.entries()) {
      if (entry.is_parameter && owners.try_emplace(entry.tensor.unsafeGetTensorImpl()).second)
        free_parameters.push_back(entry.tensor);
    }
  }
  parameters_seen = count;
}

void MixedPrecision::Impl::hide_gradients(const Model* model) {
  if (models.size() == 1) model = nullptr;  // entries() allocates a name for each tensor
  std::unordered_set<const c10::TensorImpl*> of_model;
  for (OptimizerRecord& record : optimizers) {
    if (!record.masters.has_value() || !record.masters->shows_gradients()) continue;
    if (model != nullptr && of_model.empty()) {
      for (const Model::Entry& entry : model->entries())
        of_model.insert(entry.tensor.unsafeGetTensorImpl());
    }
    bool concerns = model == nullptr;
    record.masters->for_each([&](const at::Tensor& parameter, const at::Tensor&) {
      concerns = concerns || of_model.count(parameter.unsafeGetTensorImpl()) > 0;
    });
    if (concerns) record.masters->hide_gradients();
  }
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

void MixedPrecision::Impl::warn(const std::string& text) const {
  if (properties.verbosity >= 1 && is_first_rank()) log()->warn(text);
}

ScaledLoss::ScaledLoss(at::Tensor scaled, std::unique_ptr<Work> work)
    : scaled_(std::move(scaled)), work_(std::move(work)) {}

ScaledLoss::ScaledLoss(ScaledLoss&& other) noexcept
    : scaled_(std::move(other.scaled_)),
      work_(std::move(other.work_)),
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
    // A region around the whole program would lower the products in backward passes of fp32 operators,
    // and round emulated ones twice.
    const DisableCasts as_outside;
    const auto region = custom_backward::region_for(scaled_);
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

ScaledLoss MixedPrecision::Impl::scale_loss(const at::Tensor& loss, const OptimizerRefs& refs,
                                            ScaleLossOptions options) {
  constexpr auto kCaller = "scale_loss";
  const LossScaler& with = scaler(options.loss_id, kCaller);
  require_no_step_past(kCaller);
  if (properties.enabled) find_shared_parameters(kCaller);
  std::vector<OptimizerRecord*> named;
  for (const torch::optim::Optimizer& optimizer : refs) {
    OptimizerRecord* record = &of(optimizer, kCaller);
    if (std::find(named.begin(), named.end(), record) == named.end()) named.push_back(record);
  }
  if (named.empty()) {
    throw Error("amp.mixed_precision.scale_loss", "at least one optimizer", "none",
                "name the optimizers whose parameters the loss trains");
  }
  if (!properties.enabled) return ScaledLoss(loss, nullptr);
  // Plain training: nothing to unscale, and no masters.
  const bool plain = !with.options().dynamic() && with.scale() == 1.0 &&
                     std::none_of(named.begin(), named.end(),
                                  [](const auto* record) { return record->masters.has_value(); });
  if (plain) {
    check_plain_loss(loss);
    return ScaledLoss(cast_floating(loss, at::kFloat), nullptr);
  }
  const auto& on_device = scale_on_device;
  if (on_device.has_value() && on_device->loss_id != options.loss_id) {
    throw Error(
        "amp.mixed_precision.scale_loss", "one loss_id in a captured step",
        std::to_string(options.loss_id) + " in addition to " + std::to_string(on_device->loss_id));
  }
  std::vector<OptimizerRecord*> sharing;
  for (OptimizerRecord& record : optimizers) {
    const auto shares = [&](const auto* one) { return one->component == record.component; };
    if (std::find(named.begin(), named.end(), &record) == named.end() &&
        std::any_of(named.begin(), named.end(), shares))
      sharing.push_back(&record);
  }
  if (named_only && !sharing.empty()) {
    throw Error("amp.captured_step", "an optimizer that shares no parameter with another one",
                "one that does", "make them one optimizer with two groups");
  }
  return ScaledLoss(
      on_device.has_value() ? LossScaler::scaled(loss, on_device->scale) : with.scaled(loss),
      std::make_unique<ScaledLoss::Work>(
          ScaledLoss::Work{this, options.loss_id, with.inverse(),
                           on_device.has_value() ? on_device->inverse : at::Tensor(),
                           options.delay_unscale, std::move(named), std::move(sharing)}));
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

namespace {

// An optimizer skips its next step because a loss overflowed. If several losses overflow, the skip
// is counted for the first of them.
void note_overflow(MixedPrecision::Impl& mixed, MixedPrecision::Impl::OptimizerRecord& optimizer,
                   std::int64_t loss_id) {
  LossScaler& scaler = mixed.scaler(loss_id, "step");
  const bool first = !std::exchange(optimizer.skip, true);
  const bool logs = first && mixed.properties.verbosity >= 1 && is_first_rank();
  Overflow overflow;
  if (logs || scaler.wants_names()) {
    if (optimizer.masters.has_value()) {
      const bool shown = optimizer.masters->shows_gradients();
      optimizer.masters->move_deferred_gradients();
      if (shown) optimizer.masters->show_gradients();
      optimizer.masters->for_each([&](const at::Tensor& parameter, const at::Tensor& master) {
        mixed.names.add_alias(master, parameter);
      });
    }
    overflow = find_overflow(*optimizer.optimizer, mixed.names);
  }
  if (logs) {
    const std::string where =
        overflow.parameters == 0
            ? "in gradients of another optimizer or rank"
            : fmt::format("inf or NaN in {} gradients, nearest the loss that of '{}'",
                          overflow.parameters, overflow.parameter);
    log()->info("skipped a step: loss {} overflowed at scale {}, {}", loss_id, scaler.scale(),
                where);
  }
  first ? scaler.note_skip(overflow) : scaler.note_overflow(overflow);
}

// Determines, with one host read, the results of the losses that an optimizer was named for, and
// removes them from the list. Returns found_inf by loss.
std::map<std::int64_t, bool> resolve(MixedPrecision::Impl& mixed,
                                     MixedPrecision::Impl::OptimizerRecord& optimizer) {
  using Pending = MixedPrecision::Impl::Pending;
  const auto concerns = [&](const Pending& pending) {
    return std::find(pending.optimizers.begin(), pending.optimizers.end(), &optimizer) !=
           pending.optimizers.end();
  };
  std::vector<at::Tensor> flags;
  for (Pending& pending : mixed.pending) {
    if (!concerns(pending)) continue;
    // Without gradients here, other ranks may still have some.
    if (pending.found_inf.empty()) {
      found_inf_on(pending.found_inf, device_of(*optimizer.optimizer));
    }
    for (at::Tensor& flag : pending.found_inf) {
      if (mixed.found_inf_hook) mixed.found_inf_hook(flag);
      flags.push_back(flag);
    }
  }
  const std::vector<bool> set = read_flags(flags);

  auto flag = set.begin();
  std::map<std::int64_t, bool> found_by_loss;
  for (const Pending& pending : mixed.pending) {
    if (!concerns(pending)) continue;
    const auto end = flag + static_cast<std::ptrdiff_t>(pending.found_inf.size());
    const bool found = std::find(flag, end, true) != end;
    flag = end;
    if (pending.named) found_by_loss[pending.loss_id] = found_by_loss[pending.loss_id] || found;
    if (!found) continue;
    for (auto* involved : pending.optimizers) {
      note_overflow(mixed, *involved, pending.loss_id);
    }
  }
  std::erase_if(mixed.pending, concerns);
  return found_by_loss;
}

}  // namespace

void MixedPrecision::Impl::require_unscaled(const OptimizerRecord& record, const char* caller) {
  if (!record.scaled.has_value()) return;
  throw Error(std::string("amp.mixed_precision.") + caller, "gradients that are unscaled",
              record.scaled->open ? "a ScaledLoss that is not finished"
                                  : "scaled ones: the last scale_loss had delay_unscale = true",
              record.scaled->open ? "call its backward() or finish()"
                                  : "omit it in the last backward of an iteration");
}

// Whether gradients were back-propagated without scale_loss.
void MixedPrecision::Impl::take_unscaled_gradients(OptimizerRecord& record) {
  if (!record.masters.has_value()) return;
  const UnreducedMarks marks(record);
  Gradients unscaled(1.0F);
  record.masters->take_gradients(unscaled);
  std::vector<at::Tensor> ignored;
  unscaled.run(ignored);
  marks.restore();
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

double MixedPrecision::clip_grad_norm_(torch::optim::Optimizer& optimizer, double max_norm,
                                       double norm_type, bool error_if_nonfinite) {
  Impl::OptimizerRecord& record = impl().of(optimizer, "clip_grad_norm_");
  Impl::require_unscaled(record, "clip_grad_norm_");
  impl().pull("clip_grad_norm_");
  Impl::take_unscaled_gradients(record);
  const auto deferred =
      record.masters.has_value() ? record.masters->deferred_gradients() : MasterWeights::Deferred{};
  std::unordered_set<const c10::TensorImpl*> masters;
  for (const at::Tensor& master : deferred.masters) masters.insert(master.unsafeGetTensorImpl());
  std::vector<at::Tensor> others;
  for_each_parameter(optimizer, [&](std::size_t, std::size_t, const at::Tensor& parameter) {
    if (masters.count(parameter.unsafeGetTensorImpl()) == 0) others.push_back(parameter);
  });
  const auto show = c10::make_scope_exit([&] {
    if (record.masters.has_value()) record.masters->show_gradients();
  });
  std::vector<double> norms{optim::grad_norm(others, norm_type)};
  for (const double norm : kernels::multi_tensor_norms(deferred.grads, norm_type))
    norms.push_back(norm * double{deferred.inverse_scale});
  const double norm = kernels::total_norm(norms, norm_type);
  const double factor = optim::clip_factor(norm, max_norm);
  if (!std::isfinite(norm)) {
    if (!error_if_nonfinite) return norm;
    throw Error("amp.mixed_precision.clip_grad_norm_", "finite gradients",
                "a norm of " + std::to_string(norm),
                "skip the step, or clip with error_if_nonfinite false");
  }
  if (factor == 1) return norm;
  optim::scale_grads_(others, factor);
  if (record.masters.has_value()) record.masters->scale_deferred_gradients(factor);
  return norm;
}

Step MixedPrecision::step(torch::optim::Optimizer& optimizer) {
  return impl().step(optimizer);
}

Step MixedPrecision::Impl::step(torch::optim::Optimizer& optimizer) {
  OptimizerRecord& record = of(optimizer, "step");
  if (!properties.enabled) {
    optimizer.step();
    clear_cast_cache();
    return Step::stepped;
  }
  require_unscaled(record, "step");
  pull("step");
  record.watch.stop();
  record.watched = false;
  if (record.masters.has_value()) record.masters->hide_gradients();
  drop_stale_results(record);
  warn_of_gradients(record);
  take_unscaled_gradients(record);
  warn_of_idle_models(record);
  return end_step(record, [&] {
    record.masters.has_value() ? record.masters->step() : void(optimizer.step());
  });
}

Step MixedPrecision::Impl::end_step(OptimizerRecord& record, const std::function<void()>& take) {
  const auto found_by_loss = resolve(*this, record);
  const bool skip = std::exchange(record.skip, false);
  if (!skip) {
    // An optimizer may multiply matrices, which a region would lower.
    const DisableCasts as_outside;
    take();
    clear_cast_cache();
  }
  if (record.masters.has_value()) record.masters->clear_gradients();
  std::exception_ptr diverged;
  for (const auto& [loss_id, found] : found_by_loss) {
    try {
      scaler(loss_id, "step").update(found);
    } catch (const DivergedError&) {
      if (diverged == nullptr) diverged = std::current_exception();
    }
  }
  if (diverged != nullptr) std::rethrow_exception(diverged);
  return skip ? Step::skipped : Step::stepped;
}

void MixedPrecision::zero_grad(torch::optim::Optimizer& optimizer) {
  Impl::OptimizerRecord& record = impl().of(optimizer, "zero_grad");
  if (record.masters.has_value()) record.masters->hide_gradients();
  record.watch.stop();
  optimizer.zero_grad();
  record.for_each_leaf([this](const at::Tensor& parameter) {
    parameter.mutable_grad().reset();
    impl().set_aside.erase(parameter.unsafeGetTensorImpl());
  });
  // The results of their check are dropped too.
  if (record.scaled.has_value() && !record.scaled->open) record.scaled.reset();
  record.skip = false;
  for (Impl::Pending& pending : impl().pending) std::erase(pending.optimizers, &record);
  std::erase_if(impl().pending, [](const auto& pending) { return pending.optimizers.empty(); });
}

ScaledLoss scale_loss(const at::Tensor& loss, torch::optim::Optimizer& optimizer,
                      ScaleLossOptions options) {
  return MixedPrecision::Impl::owner_of(optimizer, "scale_loss")
      .scale_loss(loss, {optimizer}, options);
}

Step step(torch::optim::Optimizer& optimizer) {
  return MixedPrecision::Impl::owner_of(optimizer, "step").step(optimizer);
}

}  // namespace semitone::amp

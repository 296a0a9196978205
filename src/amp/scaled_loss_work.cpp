#include "src/amp/scaled_loss_work.h"

#include "semitone/core/error.h"
#include "semitone/core/events.h"
#include "src/amp/unreduced_marks.h"

#include <algorithm>
#include <map>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace semitone::amp {
namespace {

bool is_part(const at::Tensor& grad) {
  return grad.layout() == at::kStrided && grad.storage().nbytes() != grad.nbytes();
}

bool shares_memory(const at::Tensor& grad) {
  return is_part(grad) || (grad.layout() == at::kStrided && grad.storage().use_count() > 1);
}

// Whether others than its parameter have a gradient: it is in memory of another tensor, such as a
// bucket that is reduced over ranks, or the program keeps the tensor.
bool is_shared(const at::Tensor& grad) {
  return shares_memory(grad) || (grad.layout() == at::kStrided && grad.use_count() > 1);
}

// Keeps a gradient while backward runs, which may write to the memory of other tensors.
at::Tensor kept(const at::Tensor& grad) {
  if (!shares_memory(grad)) return grad;
  at::Tensor copy = grad.clone();
  mark_unreduced(copy, unreduced_mark(grad));
  return copy;
}

// A gradient times a scale, as backward would have left it in the parameter, with its mark.
at::Tensor scaled_again(const at::Tensor& parameter, const at::Tensor& grad, float inverse) {
  const at::NoGradGuard no_grad;
  const at::Tensor product = grad.mul(1.0 / double{inverse});
  at::Tensor scaled = grad.layout() == at::kStrided ? at::empty_like(parameter).copy_(product)
                                                    : product.to(parameter.scalar_type());
  mark_unreduced(scaled, unreduced_mark(grad));
  return scaled;
}

// Where a gradient lies in memory that other tensors share.
struct Extent {
  const char* begin;
  const char* end;
  at::Tensor* gradient;
};

void add_extent(std::vector<Extent>& extents, const at::Tensor& parameter) {
  at::Tensor& grad = parameter.mutable_grad();
  if (!grad.defined() || grad.layout() != at::kStrided || grad.numel() == 0 ||
      grad.grad_fn() != nullptr || grad.storage().use_count() == 1)
    return;
  const auto* const begin = static_cast<const char*>(grad.const_data_ptr());
  extents.push_back(
      {begin,
       begin + at::detail::computeStorageNbytes(grad.sizes(), grad.strides(), grad.itemsize()),
       &grad});
}

// Backward may give two parameters gradients in the same memory: a sum of two views of parameters
// has one gradient. Each pass that unscales writes to them, and another one would do so again.
void give_own_memory(std::vector<Extent> extents) {
  const at::NoGradGuard no_grad;
  std::ranges::sort(extents, {}, &Extent::begin);
  const char* end = nullptr;
  for (const Extent& extent : extents) {
    if (extent.begin < end) {
      at::Tensor copy = extent.gradient->clone();
      mark_unreduced(copy, unreduced_mark(*extent.gradient));
      *extent.gradient = std::move(copy);
    }
    end = std::max(end, extent.end);
  }
}

}  // namespace

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
  if (!is_elsewhere) mixed->note_use();
  check();
  mixed->pull("scale_loss");
  // Hides gradients that a call has shown since a delayed loss: backward would add to them.
  for (OptimizerRecord& record : mixed->optimizers) {
    if (record.scaled.has_value() && record.masters.has_value()) record.masters->hide_gradients();
  }
  for (const OptimizerRecord* record : concerned()) {
    if (record->masters.has_value()) record->masters->require_updated_model();
  }
  // Before any gradient is set aside, which an optimizer may share.
  for (OptimizerRecord& record : mixed->optimizers) {
    if (!record.scaled.has_value()) mixed->drop_stale_results(record);
  }
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
  begin_elsewhere();
}

// The loss may go through models of other MixedPrecision objects. Parameters without a gradient get
// unscaled ones too, where their optimizers read them. Objects with scaled gradients of their own,
// or with a part of these models, are left alone.
void ScaledLoss::Work::begin_elsewhere() {
  if (is_elsewhere || leaves_others_alone()) return;
  std::unordered_set<const c10::TensorImpl*> seen;
  const auto shares = [&](Impl& one) {
    bool any = false;
    one.for_each_parameter_of_models([&](const at::Tensor& parameter) {
      any = !seen.insert(parameter.unsafeGetTensorImpl()).second || any;
    });
    return any;
  };
  const std::vector<Impl*> all = mixed->others_of_thread();
  if (all.empty()) return;
  shares(*mixed);
  for (Impl* const other : all) {
    if (!other->properties.enabled || other->fp32_scopes > 0 || other->has_scaled_gradients())
      continue;
    other->find_shared_parameters("scale_loss");
    other->find_free_parameters();
    if (shares(*other)) continue;
    Elsewhere& there = elsewhere.emplace_back(Elsewhere{other, other->uses, {}});
    other->hide_gradients();
    other->for_each_parameter_of_models([&](const at::Tensor& parameter) {
      if (!parameter.grad().defined()) there.without_gradient.push_back(parameter);
    });
  }
}

void ScaledLoss::Work::finish_elsewhere() {
  for (; !elsewhere.empty(); elsewhere.pop_back()) finish(elsewhere.back());
}

// As a loss of that object for which none of its optimizers was named. If the program has used the
// object since, it is not known what its gradients are.
void ScaledLoss::Work::finish(const Elsewhere& there) {
  Impl* const other = there.mixed;
  if (!Impl::is_alive(other) || other->used_by.load() != std::this_thread::get_id() ||
      other->uses != there.uses || other->has_scaled_gradients())
    return;
  std::vector<std::pair<at::Tensor, at::Tensor>> scaled;
  for (const at::Tensor& parameter : there.without_gradient) {
    const at::Tensor& grad = parameter.grad();
    if (!grad.defined()) continue;
    if (is_unreduced(grad)) {  // the pass that reduces it adds scaled gradients to it
      throw Error("amp.mixed_precision.scale_loss",
                  "models whose gradients are accumulated in no_sync() in one call of initialize",
                  "one of another, through which the loss has gone too",
                  "pass all models of the loss to initialize together");
    }
    scaled.emplace_back(parameter, grad);
  }
  // A hook is called on all ranks, or on none.
  if (scaled.empty() && !other->found_inf_hook) return other->show_gradients();
  const auto put = [&](bool back) {
    for (const auto& [parameter, grad] : scaled)
      parameter.mutable_grad() = back ? grad : at::Tensor();
  };
  Work work{other, 0, inverse, {}, /*delay=*/false, {}};
  work.is_elsewhere = true;
  put(false);
  try {
    work.begin();
    put(true);
    work.finish();
  } catch (...) {
    work.put_back();
    throw;
  }
}

void ScaledLoss::Work::begin(OptimizerRecord& record) {
  if (record.masters.has_value()) {
    record.masters->move_deferred_gradients();
    bool any_shared = false;
    record.masters->for_each([&](const at::Tensor& parameter, const at::Tensor&) {
      const at::Tensor& grad = parameter.grad();
      any_shared = any_shared || (grad.defined() && is_shared(grad));
    });
    if (any_shared) mixed->warn_of_kept_gradients(record);
  }
  if (!mixed->own_gradients.empty()) {
    record.for_each_without_master([this](const at::Tensor& leaf) {
      UnreducedMarks::mark_successor(*mixed, leaf, leaf.grad());
    });
    if (record.masters.has_value()) {
      record.masters->for_each([this](const at::Tensor& parameter, const at::Tensor& master) {
        const at::Tensor& grad = parameter.grad();
        UnreducedMarks::mark_successor(*mixed, parameter, grad.defined() ? grad : master.grad());
      });
    }
  }
  if (const UnreducedMarks marks(record); !marks.empty()) {
    // This rank's own gradients must be reduced together with the new ones.
    Impl::take_unscaled_gradients(record);
    if (record.masters.has_value()) {
      record.masters->for_each([this](const at::Tensor& parameter, const at::Tensor& master) {
        const UnreducedMark mark = unreduced_mark(master.grad());
        // A local pass adds to it in fp32, as without several ranks.
        if (mark == nullptr || mark->is_local) return;
        mixed->set_aside[parameter.unsafeGetTensorImpl()] = {parameter, master.grad(), master,
                                                             true};
        parameter.mutable_grad() = scaled_again(parameter, master.grad(), inverse);
        master.mutable_grad().reset();
      });
    }
  }
  // Backward may give two parameters gradients in the same memory, which is neither's own.
  std::unordered_map<const void*, int> users;
  record.for_each_leaf([&](const at::Tensor& parameter) {
    const at::Tensor& grad = parameter.grad();
    if (grad.defined() && shares_memory(grad)) ++users[grad.const_data_ptr()];
  });
  record.for_each_leaf([&](const at::Tensor& parameter) {
    at::Tensor& grad = parameter.mutable_grad();
    if (!grad.defined()) return;
    const auto [place, is_new] = mixed->set_aside.try_emplace(parameter.unsafeGetTensorImpl());
    if (!is_new && place->second.also_inside) return;
    const bool shared = is_shared(grad) && users[grad.const_data_ptr()] < 2;
    place->second = {parameter, kept(grad), {}, is_unreduced(grad), {}};
    if (shared && !grad.requires_grad()) place->second.place = grad;
    if (!place->second.also_inside) return grad.reset();
    grad = scaled_again(parameter, grad, inverse);
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
    UnreducedMarks::mark_successor(*mixed, parameter, grad);
    SetAside before{parameter, grad.defined() ? kept(grad) : grad, {}, is_unreduced(grad)};
    if (before.also_inside) {
      grad = scaled_again(parameter, grad, inverse);
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

// A program may keep the gradients, in one tensor or several, which it zeroes and sends to other
// ranks itself. Backward adds to such gradients in place, without a loss scale; so they return
// there. Those that others have since, such as a new bucket, stay.
void ScaledLoss::Work::return_to_places(const OptimizerRecord& optimizer) {
  const at::NoGradGuard no_grad;
  optimizer.for_each_without_master([this](const at::Tensor& parameter) {
    const auto found = mixed->set_aside.find(parameter.unsafeGetTensorImpl());
    at::Tensor& grad = parameter.mutable_grad();
    if (found == mixed->set_aside.end() || !found->second.place.defined() || !grad.defined())
      return;
    const at::Tensor& place = found->second.place;
    if (is_part(grad) || grad.use_count() > 1 || grad.is_alias_of(place) || grad.requires_grad() ||
        grad.layout() != at::kStrided || grad.scalar_type() != place.scalar_type() ||
        grad.sizes() != place.sizes())
      return;
    const UnreducedMark mark = unreduced_mark(grad);
    grad = place.copy_(grad);
    mark != nullptr ? mark_unreduced(grad, mark) : clear_unreduced(grad);
  });
}

void ScaledLoss::Work::separate_gradients() {
  std::vector<Extent> extents;
  const auto add = [&](const at::Tensor& parameter) { add_extent(extents, parameter); };
  mixed->for_each_parameter_of_models(add);
  for (const Elsewhere& there : elsewhere) std::ranges::for_each(there.without_gradient, add);
  give_own_memory(std::move(extents));
}

void ScaledLoss::Work::finish() {
  const events::PhaseScope phase(events::Phase::unscale);
  begin();  // where backward was not run at all
  if (!is_elsewhere) mixed->note_use();
  separate_gradients();
  // Finished work leaves the list, and is not undone if something else throws.
  for (; !others.empty(); others.pop_back()) finish(others.back());
  finish_free();
  finish_elsewhere();
  const std::vector<OptimizerRecord*> all = concerned();
  if (all.empty()) return;
  if (delay) {
    for (OptimizerRecord* record : all) record->scaled->open = false;
  } else {
    mixed->unscale(optimizers, sharing, loss_id, inverse, inverse_on_device, /*named=*/true);
    for (OptimizerRecord* record : all) {
      return_to_places(*record);
      UnreducedMarks(*record).remember(*mixed);
      erase_set_aside(*record);
      record->scaled.reset();
    }
  }
  const bool may_skip = mixed->scaler(loss_id, "scale_loss").options().dynamic() || inverse != 1;
  for (OptimizerRecord* record : optimizers) {
    if (record->scaled.has_value() || inverse_on_device.defined()) continue;
    if (record->masters.has_value()) record->masters->show_gradients();
    if (!record->watched || !may_skip) continue;
    if (record->masters.has_value()) mixed->count_unused_backward(*record);
    // A step since the last backward is reported by the next forward or scale_loss.
    if (!record->watch.has_stepped(*record->optimizer)) record->watch.start(*record->optimizer);
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
      UnreducedMarks(*record).remember(*mixed);
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
  std::vector<std::pair<at::Tensor, UnreducedMark>> unreduced;
  for (const SetAside& before : free) {
    at::Tensor& grad = before.parameter.mutable_grad();
    if (leaves_others_alone()) {
      grad = before.grad;
      continue;
    }
    if (auto mark = unreduced_mark(grad)) unreduced.emplace_back(before.parameter, std::move(mark));
    pass.unscale(before.parameter, before.also_inside ? at::Tensor() : before.grad);
  }
  std::vector<at::Tensor> ignored;  // no step to skip
  pass.run(ignored);
  for (const auto& [parameter, mark] : unreduced) {
    mark_unreduced(parameter.grad(), mark);
    UnreducedMarks::remember(*mixed, parameter, parameter.grad());
  }
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
      UnreducedMarks::remember(*mixed, parameter, found->second.grad);
    });
  }
  for (OptimizerRecord* record : all) {
    erase_set_aside(*record);
    record->scaled.reset();
  }
}

void ScaledLoss::Work::put_back() noexcept {
  if (!begun) return;
  for (const Elsewhere& there : elsewhere) {
    if (!Impl::is_alive(there.mixed) || there.mixed->uses != there.uses) continue;
    for (const at::Tensor& parameter : there.without_gradient) parameter.mutable_grad().reset();
    there.mixed->show_gradients();
  }
  elsewhere.clear();
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
  for (const SetAside& before : free) {
    before.parameter.mutable_grad() = before.grad;
    UnreducedMarks::remember(*mixed, before.parameter, before.grad);
  }
  mixed->show_gradients();
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
                     [](const SetAside& before) { return before.parameter.grad().defined(); }) ||
         std::any_of(elsewhere.begin(), elsewhere.end(), [](const Elsewhere& there) {
           return std::any_of(
               there.without_gradient.begin(), there.without_gradient.end(),
               [](const at::Tensor& parameter) { return parameter.grad().defined(); });
         });
}

}  // namespace semitone::amp

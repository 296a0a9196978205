#pragma once

#include "src/amp/mixed_precision_impl.h"
#include "src/core/unreduced.h"

#include <utility>
#include <vector>

namespace semitone::amp {

// The gradients that are marked as this rank's own (core/unreduced.h), so that their successors get
// the mark too.
class UnreducedMarks {
 public:
  explicit UnreducedMarks(const MixedPrecision::Impl::OptimizerRecord& record) {
    if (record.masters.has_value()) {
      record.masters->for_each([&](const at::Tensor& parameter, const at::Tensor& master) {
        auto mark = unreduced_mark(parameter.grad());
        add(parameter, master, mark != nullptr ? std::move(mark) : unreduced_mark(master.grad()));
      });
    }
    record.for_each_without_master(
        [&](const at::Tensor& leaf) { add(leaf, leaf, unreduced_mark(leaf.grad())); });
  }
  bool empty() const { return own_.empty(); }
  void restore() const {
    for (const Own& own : own_) mark_unreduced(own.holder.grad(), own.mark);
  }
  // For what the program puts in their place.
  void remember(MixedPrecision::Impl& mixed) const {
    for (const Own& own : own_) remember(mixed, own.parameter, own.holder.grad());
  }

  static void remember(MixedPrecision::Impl& mixed, const at::Tensor& parameter,
                       const at::Tensor& grad) {
    UnreducedMark mark = unreduced_mark(grad);
    if (mark == nullptr) return;
    mixed.own_gradients.insert_or_assign(parameter.unsafeGetTensorImpl(),
                                         MixedPrecision::Impl::OwnGradient(std::move(mark), grad));
  }
  // Marks a gradient that has replaced a remembered one. A tensor that has lost its mark was reduced.
  static void mark_successor(MixedPrecision::Impl& mixed, const at::Tensor& parameter,
                             const at::Tensor& grad) {
    const auto found = mixed.own_gradients.find(parameter.unsafeGetTensorImpl());
    if (found == mixed.own_gradients.end()) return;
    const auto& own = found->second;
    if (grad.defined() && own.mark->passes_done == own.passes_done &&
        own.grad._unsafe_get_target() != grad.unsafeGetTensorImpl())
      mark_unreduced(grad, own.mark);
    mixed.own_gradients.erase(found);
  }

 private:
  struct Own {
    at::Tensor parameter;
    at::Tensor holder;  // of the gradient once it is unscaled
    UnreducedMark mark;
  };

  void add(const at::Tensor& parameter, const at::Tensor& holder, UnreducedMark mark) {
    if (mark != nullptr) own_.push_back({parameter, holder, std::move(mark)});
  }

  std::vector<Own> own_;
};

}  // namespace semitone::amp

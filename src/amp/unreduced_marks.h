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
        add(master, mark != nullptr ? std::move(mark) : unreduced_mark(master.grad()));
      });
    }
    record.for_each_without_master(
        [&](const at::Tensor& leaf) { add(leaf, unreduced_mark(leaf.grad())); });
  }
  bool empty() const { return holders_.empty(); }
  void restore() const {
    for (const auto& [holder, mark] : holders_) mark_unreduced(holder.grad(), mark);
  }

 private:
  void add(const at::Tensor& holder, UnreducedMark mark) {
    if (mark != nullptr) holders_.emplace_back(holder, std::move(mark));
  }

  // The tensors that hold them once they are unscaled.
  std::vector<std::pair<at::Tensor, UnreducedMark>> holders_;
};

}  // namespace semitone::amp

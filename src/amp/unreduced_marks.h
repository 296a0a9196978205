#pragma once

#include "src/amp/mixed_precision_impl.h"
#include "src/core/unreduced.h"

#include <vector>

namespace semitone::amp {

// The gradients that are marked as this rank's own (core/unreduced.h), so that their successors get
// the mark too.
class UnreducedMarks {
 public:
  explicit UnreducedMarks(const MixedPrecision::Impl::OptimizerRecord& record) {
    if (record.masters.has_value()) {
      record.masters->for_each([&](const at::Tensor& parameter, const at::Tensor& master) {
        if (is_unreduced(parameter.grad()) || is_unreduced(master.grad()))
          holders_.push_back(master);
      });
    }
    record.for_each_without_master([&](const at::Tensor& leaf) {
      if (is_unreduced(leaf.grad())) holders_.push_back(leaf);
    });
  }
  bool empty() const { return holders_.empty(); }
  void restore() const {
    for (const at::Tensor& holder : holders_) mark_unreduced(holder.grad());
  }

 private:
  std::vector<at::Tensor> holders_;  // the tensors that hold them once they are unscaled
};

}  // namespace semitone::amp

#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

namespace semitone {

// What communicates gradients keeps it up to date.
struct NextPass {
  bool is_local = false;          // the next backward pass leaves gradients unreduced too
  std::uint64_t passes_done = 0;  // backward passes that have reduced gradients
};
using UnreducedMark = std::shared_ptr<const NextPass>;

// Marks a gradient as this rank's own: the next backward pass that reduces gradients over the ranks
// must reduce it too (parallel's no_sync). The mark lasts as long as the gradient, also through
// in-place additions. Code that takes such a gradient out of its parameter must put it back before
// that backward pass.
void mark_unreduced(const at::Tensor& gradient, UnreducedMark mark);
void clear_unreduced(const at::Tensor& gradient);
// Null if the gradient has none.
UnreducedMark unreduced_mark(const at::Tensor& gradient);
inline bool is_unreduced(const at::Tensor& gradient) {
  return unreduced_mark(gradient) != nullptr;
}

}  // namespace semitone

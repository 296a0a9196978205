#pragma once

#include <ATen/core/Tensor.h>

namespace semitone {

// Marks a gradient as this rank's own: the next backward pass that reduces gradients over the ranks
// must reduce it too (parallel's no_sync). The mark lasts as long as the gradient, also through
// in-place additions. Code that takes such a gradient out of its parameter must put it back before
// that backward pass.
void mark_unreduced(const at::Tensor& gradient);
void clear_unreduced(const at::Tensor& gradient);
bool is_unreduced(const at::Tensor& gradient);

}  // namespace semitone

#pragma once

#include <ATen/core/Tensor.h>

namespace semitone {

// A mark on a gradient: it is this rank's own so far, and the next backward pass that reduces
// gradients over the ranks is to reduce it too (parallel's no_sync). The mark lasts as long as the
// gradient, in place additions included. Whatever takes such a gradient out of its parameter has to
// put it back before that backward pass.
void mark_unreduced(const at::Tensor& gradient);
void clear_unreduced(const at::Tensor& gradient);
bool is_unreduced(const at::Tensor& gradient);

}  // namespace semitone

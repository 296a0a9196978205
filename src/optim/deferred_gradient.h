#pragma once

// Internal interface: other rooms include this header.

#include <ATen/core/Tensor.h>

namespace semitone::optim {

// A gradient in 16 bits, still scaled, that the optimizer's step will read in place of its master's
// gradient. This saves the pass that would widen it.
//
// Until then the master's gradient is a placeholder: one NaN expanded to the master's shape. So
// other code sees that there is a gradient, and cannot compute with it unnoticed. If it drops,
// replaces or fills the placeholder, as zero_grad() and clipping do, that change wins. (On devices
// other than the CPU, a write counts if autograd's version counter shows it: not one through
// .data().) A step that does not know of the deferred gradient is an Error (FusedOptimizer).
class DeferredGradient {
 public:
  // Whether a dense gradient is the placeholder of a deferred one. Nothing is read from a device.
  static bool is_placeholder(const at::Tensor& grad);

  // Defers a gradient: sets the master's to a placeholder, on the master's device.
  void defer(const at::Tensor& master, const at::Tensor& grad);

  // Whether defer() was called, and neither take() nor drop() since.
  bool defined() const { return grad_.defined(); }
  // Whether the master still has the placeholder, unfilled: the gradient counts.
  bool counts(const at::Tensor& master) const;
  const at::Tensor& grad() const { return grad_; }

  // Returns the gradient, and removes the placeholder. If the gradient no longer counts, returns an
  // undefined tensor and leaves the master's gradient as it was changed.
  at::Tensor take(const at::Tensor& master);
  // Forgets the gradient. The master's is left as it is.
  void drop();

 private:
  at::Tensor grad_;
  at::Tensor placeholder_;
};

}  // namespace semitone::optim

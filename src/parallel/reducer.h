#pragma once

// The only file that includes c10d's Reducer, whose interface changes between LibTorch's versions.

#include <torch/csrc/distributed/c10d/reducer.hpp>

namespace semitone::parallel::detail {

// c10d's Reducer, which assumes that every backward pass that begins also ends.
class Reducer final : public c10d::Reducer {
 public:
  using c10d::Reducer::Reducer;

  // Whether gradients that arrive now are reduced.
  bool expects_gradients() const;

  // Stops that until the next prepare_for_backward.
  void ignore_gradients();

  // Drops the gradients since prepare_for_backward. False if some have been sent.
  bool forget_gradients();

  // Drops the number of gradients of each parameter, which a static graph's first step counts.
  void count_from_here();
};

}  // namespace semitone::parallel::detail

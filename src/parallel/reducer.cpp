#include "src/parallel/reducer.h"

#include <mutex>

namespace semitone::parallel::detail {

bool Reducer::expects_gradients() const {
  const std::lock_guard lock(mutex_);
  return expect_autograd_hooks_;
}

void Reducer::ignore_gradients() {
  const std::lock_guard lock(mutex_);
  expect_autograd_hooks_ = false;
}

bool Reducer::forget_gradients() {
  const std::lock_guard lock(mutex_);
  if (next_bucket_ > 0) return false;
  expect_autograd_hooks_ = false;
  require_finalize_ = false;
  // All gradients of one pass, or none.
  rebuilt_params_.clear();
  rebuilt_param_indices_.clear();
  // A static graph is that of its first step, permanently.
  if (!static_graph_ && local_used_map_.defined()) local_used_map_.zero_();
  return true;
}

void Reducer::count_from_here() {
  const std::lock_guard lock(mutex_);
  for (auto& [index, count] : numGradHooksTriggeredMap_) count = 0;
  num_bwd_calls_ = 0;
  first_autograd_hook_called_ = false;
}

}  // namespace semitone::parallel::detail

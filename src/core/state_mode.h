#pragma once

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <optional>

namespace semitone {

// The mode for creating and writing tensors that outlive a call: without gradients, and not in the
// caller's inference mode, whose tensors cannot be written to outside of it.
class StateMode {
 public:
  // stay: remain in the caller's inference mode, for a model that was created in one.
  explicit StateMode(bool stay = false) {
    if (!stay && c10::InferenceMode::is_enabled()) normal_.emplace(false);
    no_grad_.emplace();
  }
  StateMode(const StateMode&) = delete;
  StateMode& operator=(const StateMode&) = delete;

 private:
  // In this order: leaving inference mode switches gradients on.
  std::optional<c10::InferenceMode> normal_;
  std::optional<at::NoGradGuard> no_grad_;
};

}  // namespace semitone

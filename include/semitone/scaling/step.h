#pragma once

#include <cstdint>
#include <memory>
#include <utility>

namespace semitone::amp {

namespace detail {
class LateFlags;
}

/// The outcome of a step.
enum class Step : std::uint8_t {
  stepped,  ///< the optimizer updated its parameters
  skipped,  ///< a gradient was inf or NaN: nothing changed, and the loss scale may have backed off
};

/// The outcome of a step that a device may still have to decide. It is used like a Step, to which it
/// converts:
///
///     if (mixed.step(optimizer) == amp::Step::skipped) ++skipped;  // waits, where it has to
///
/// On a CPU the outcome is always known. On other devices, GradScaler, MixedPrecision and
/// CapturedStep say which steps are decided there. The first use then waits until the device has
/// checked the gradients. A program that does not look at outcomes, or looks at that of the step
/// before, does not wait for them. skipped_steps() counts skipped steps in any case. Copies share
/// the outcome. Use them from one thread at a time.
class StepResult {
 public:
  StepResult(Step step)
      : step_(step) {}  // NOLINT(google-explicit-constructor): it is used like one
  explicit StepResult(std::shared_ptr<detail::LateFlags> flags) : flags_(std::move(flags)) {}

  /// Returns the outcome. Waits for the device if necessary.
  Step get() const;
  operator Step() const { return get(); }  // NOLINT(google-explicit-constructor): as above

  /// Returns whether the outcome is known, so that get() would not wait.
  bool is_known() const;

  friend bool operator==(const StepResult& result, Step step) { return result.get() == step; }
  friend bool operator==(const StepResult& a, const StepResult& b) { return a.get() == b.get(); }

 private:
  Step step_ = Step::stepped;
  std::shared_ptr<detail::LateFlags> flags_;  // null if the outcome is known
};

}  // namespace semitone::amp

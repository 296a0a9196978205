#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

/// Events of a training run, for reports, progress displays and tests.
///
/// A listener receives the events of the thread that installed it and of every thread that works
/// for it (autograd's device threads, at::launch tasks). Nothing is process-wide: two training runs
/// in two threads do not receive each other's events. Without a listener an event costs one
/// thread-local read.
namespace semitone::events {

/// Autocast converted an argument of an operator. Under amp::Emulation the operator computes in
/// fp32. An fp32 argument is rounded to 16-bit values, and reported with the 16-bit dtype in `to`.
/// A 16-bit argument is widened, and reported with fp32 in `to`.
struct Cast {
  std::string_view op;  ///< "conv2d", "softmax.int", "mylib::my_op"
  c10::ScalarType from;
  c10::ScalarType to;
  std::int64_t numel;  ///< elements of the converted tensor
  bool cached;         ///< taken from the weight cache: nothing was computed
};

/// A loss scale was updated after a step, set or loaded.
struct LossScaleUpdated {
  std::int64_t loss_id;  ///< the scaler's index; 0 with a single scaler
  double before;
  double after;
  bool found_inf;  ///< the step had a non-finite gradient
};

/// An optimizer step was skipped because a gradient was inf or NaN.
struct StepSkipped {
  /// The parameter nearest the loss whose gradient is not finite: its name, or "group 0,
  /// parameter 3" if names are not known.
  std::string parameter;
  std::int64_t non_finite;   ///< how many parameters had non-finite gradients
  std::int64_t consecutive;  ///< skips in a row, this one included
  std::int64_t total;        ///< skips so far
  double loss_scale;         ///< the scale that the gradients had
};

/// Autocast computed an operator with another kernel than LibTorch's own for these dtypes. Emitted
/// once for each call, from within the operator, after its casts. Gradients are not reported.
struct OperatorReplaced {
  std::string_view op;  ///< as in Cast
  std::string_view
      kernel;  ///< "emulated": fp32 arithmetic on rounded values; "semitone": a faster one
};

/// The gradients of an optimizer's parameters after they were divided by the loss scale, before the
/// program clips them. Several backward passes before a step emit it again, with the sums so far.
/// amp::ScaledLoss::finish, also as a part of its backward(), and amp::GradScaler::unscale_ emit it,
/// at every opt level. Steps that amp::CapturedStep replays on a device do not.
///
/// The lists have one element for each parameter, in the same order. They are valid until the
/// listener returns.
struct GradientsUnscaled {
  at::TensorList parameters;  ///< as in GradientsReady
  at::TensorList gradients;   ///< not defined where a parameter has none
  /// The gradients are still multiplied by it; 1 if they are unscaled in memory.
  double scale;
};

/// The gradients that a step of an optimizer is about to use, or would use if it were not skipped.
/// amp::MixedPrecision::step and amp::GradScaler::step emit it, at every opt level. Steps that
/// amp::CapturedStep replays on a device do not.
///
/// The lists have one element for each parameter, in the same order. They are valid until the
/// listener returns.
struct GradientsReady {
  /// The model's; with amp::GradScaler those in the optimizer.
  at::TensorList parameters;
  at::TensorList gradients;  ///< not defined where a parameter has none
  /// What the optimizer updates: the parameters themselves, or their fp32 master weights. Not
  /// defined where masters are kept as two 16-bit halves.
  at::TensorList weights;
  /// The gradients are still multiplied by it; 1 if they are unscaled and not clipped in 16 bits.
  double scale;
};

/// A part of a training step.
enum class Phase {
  data,           ///< waiting for a batch, and copying it to its device
  forward,        ///< the model and its loss
  backward,       ///< the gradients
  communication,  ///< waiting for other ranks
  unscale,        ///< dividing gradients by the loss scale, and looking for inf and NaN
  optimizer,      ///< the update of the weights
};

/// "data", "forward", "backward", "communication", "unscale" or "optimizer".
std::string_view name_of(Phase phase);

/// A part of a step began on this thread. Parts nest: communication inside of backward is not
/// counted as backward. A part may be inside another one of the same phase, and a step may have
/// several of a phase: gradients are unscaled after backward, and checked in the step.
///
/// data::PrefetchLoader, amp::MixedPrecision, amp::GradScaler, MasterWeights, fused optimizers and
/// the classes of `parallel` report their parts. PhaseScope reports those of a loop of one's own,
/// such as the loss. Steps that amp::CapturedStep replays on a device have none.
struct PhaseBegan {
  Phase phase;
};

/// The part that began last on this thread ended.
struct PhaseEnded {
  Phase phase;
};

/// Receives events. Override the functions for the events of interest. The thread in which an event
/// happens calls them, so a listener that several threads share needs a lock. Must not throw.
class Listener {
 public:
  Listener() = default;
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;
  virtual ~Listener() = default;

  virtual void on(const Cast&) {}
  virtual void on(const LossScaleUpdated&) {}
  virtual void on(const StepSkipped&) {}
  virtual void on(const OperatorReplaced&) {}
  virtual void on(const GradientsUnscaled&) {}
  virtual void on(const GradientsReady&) {}
  virtual void on(const PhaseBegan&) {}
  virtual void on(const PhaseEnded&) {}

  /// Whether GradientsUnscaled and GradientsReady are to be emitted. Checked before their lists are
  /// made, which may take memory and time. A listener that returns false may still receive them, for
  /// another one.
  virtual bool wants_gradients() const { return false; }
};

/// Installs a listener for this thread until the end of the scope. Scopes nest, and every listener
/// receives every event. Destroy in the reverse order of construction, on the same thread.
class [[nodiscard]] Listen {
 public:
  explicit Listen(std::shared_ptr<Listener> listener);
  ~Listen();
  Listen(const Listen&) = delete;
  Listen& operator=(const Listen&) = delete;

 private:
  struct Guard;
  std::unique_ptr<Guard> guard_;
};

/// Returns whether this thread has a listener. Check it before computing a value only for an event.
bool listening();

/// Returns whether a listener of this thread wants GradientsUnscaled and GradientsReady now. Check
/// it before making their lists.
bool wants_gradients();

void emit(const Cast& event);
void emit(const LossScaleUpdated& event);
void emit(const StepSkipped& event);
void emit(const OperatorReplaced& event);
void emit(const GradientsUnscaled& event);
void emit(const GradientsReady& event);
void emit(const PhaseBegan& event);
void emit(const PhaseEnded& event);

/// Reports a part of a step, from its construction to its destruction. For loops of one's own:
///
///     { const events::PhaseScope data(events::Phase::data); batch = next_batch(); }
class [[nodiscard]] PhaseScope {
 public:
  explicit PhaseScope(Phase phase) : phase_(phase) { emit(PhaseBegan{phase_}); }
  ~PhaseScope() { emit(PhaseEnded{phase_}); }
  PhaseScope(const PhaseScope&) = delete;
  PhaseScope& operator=(const PhaseScope&) = delete;

 private:
  Phase phase_;
};

}  // namespace semitone::events

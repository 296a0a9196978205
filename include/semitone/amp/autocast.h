#pragma once

#include "semitone/amp/cast_policy.h"

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <memory>
#include <optional>
#include <utility>

namespace semitone::amp {

/// A region in which operators run in the precision that a policy gives them, until the end of the
/// scope:
///
///     {
///       amp::Autocast region(torch::kCPU, torch::kBFloat16);
///       output = model->forward(input);           // convolutions and matrix products in bf16
///       loss = loss_fn(output, target);           // losses in fp32
///     }
///     loss.backward();                            // backward runs in the dtypes of the forward
///
/// - Regions nest, also of other devices, dtypes and policies, and restore what was before, also
///   when an exception leaves them.
/// - A region belongs to its thread. LibTorch carries it to the threads that work for this one: the
///   autograd engine's, at::launch's and the JIT's. For threads of your own and for
///   at::parallel_for, see AutocastState.
/// - A weight used twice in a region is cast once (fp32 parameters; also seen through .t(), which is
///   how Linear uses it). The cached copy is dropped as soon as the weight changes, is not shared
///   between dtypes, and is made again with a gradient if the first use had none. It dies with the
///   outermost region, and with a backward pass through it.
/// - What counts as a change: every write that LibTorch counts (in place, to an alias, set_data),
///   other memory, a write to that memory by add_ or sub_ in the region, and on a CPU another value of
///   one of 32 elements spread over the weight. So the steps of optimizers are seen, also of
///   torch::optim::SGD, which writes through tensor.data() by add_. Not seen: a write through
///   tensor.data() by another operator, or where casts are off, on another device than the CPU or to
///   few elements of a large weight, if no backward pass has gone through the cast before it. Write
///   under torch::NoGradGuard instead, or call clear_cast_cache().
/// - LibTorch's own cache of casts, which kernels of other libraries fill (at::autocast::cached_cast),
///   is emptied at the same times.
/// - LibTorch's profilers may start and stop inside and outside of regions, in any order.
/// - In-place operators and out= overloads run as they are, in their output's dtype.
/// - TorchScript modules are covered: their operators go through the same dispatcher.
///
/// Destroy on the thread that constructed it, in the reverse order of construction. In another order,
/// the regions that go on are as if the one that ended had never been, and the log says so once; on
/// another thread, the log says so, and it goes on where it began until the next region does.
class [[nodiscard]] Autocast {
 public:
  /// The policy's device and dtype. Error for one whose keep_fp32_params() are not resolved: bind()
  /// it.
  explicit Autocast(const CastPolicy& policy);

  /// The default policy, CastPolicy::semitone, for a device. For CUDA where there is no GPU: nothing is
  /// cast, and the log says so once.
  /// @param dtype    fp16 or bf16; default: default_16bit_dtype(device). Error for any other.
  /// @param enabled  false: operators of the device run without casts in this scope, also inside an
  /// enabled region
  explicit Autocast(c10::DeviceType device, std::optional<c10::ScalarType> dtype = std::nullopt,
                    bool enabled = true);

  ~Autocast();
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  struct Guard;
  std::unique_ptr<Guard> guard_;
};

/// Turns autocast off for every device until the end of the scope, nested in any region: Apex's
/// disable_casts. With the casts goes Emulation: matrix products of 16-bit tensors are LibTorch's
/// own here, slow and otherwise rounded where the processor lacks the dtype, and wrong for some
/// convolutions (docs/numerics.md). AutocastState::current().without_casts().enter() turns off the
/// casts alone.
class [[nodiscard]] DisableCasts {
 public:
  DisableCasts();
  ~DisableCasts();
  DisableCasts(const DisableCasts&) = delete;
  DisableCasts& operator=(const DisableCasts&) = delete;

 private:
  struct Guard;
  std::unique_ptr<Guard> guard_;
};

/// Whether a device is in an enabled region on this thread, and casts are on.
bool autocast_enabled(c10::DeviceType device);

/// The 16-bit dtype of the region that this thread is in; the device's default outside.
c10::ScalarType autocast_dtype(c10::DeviceType device);

/// Forgets the casts of weights on this thread's regions, of which there are none outside of one, and
/// those in LibTorch's own cache.
/// Needed only after a write that Autocast does not see.
void clear_cast_cache();

/// The regions that this thread is in, to take to another thread:
///
///     const auto state = amp::AutocastState::current();
///     at::parallel_for(0, n, 1, [&](int64_t begin, int64_t end) {
///       const auto guard = state.enter();
///       …
///     });
class AutocastState {
 public:
  /// Puts the state in force on this thread until destroyed.
  class [[nodiscard]] Scope {
   public:
    ~Scope();
    Scope(Scope&&) noexcept;
    Scope& operator=(Scope&&) = delete;

   private:
    friend class AutocastState;
    struct Guard;
    explicit Scope(std::unique_ptr<Guard> guard);
    std::unique_ptr<Guard> guard_;
  };

  static AutocastState current();
  /// No region at all.
  static AutocastState disabled();
  /// The same regions without casts: operators run in whatever dtype arrives, and 16-bit matrix
  /// products are computed as the policies say (Emulation).
  AutocastState without_casts() const;
  /// On a thread that is in regions of its own, those of the state replace them; devices that the
  /// state has no region of are off.
  Scope enter() const;

  AutocastState(const AutocastState&);
  AutocastState& operator=(const AutocastState&);
  AutocastState(AutocastState&&) noexcept;
  AutocastState& operator=(AutocastState&&) noexcept;
  ~AutocastState();

 private:
  struct Data;
  explicit AutocastState(std::shared_ptr<const Data> data);
  std::shared_ptr<const Data> data_;
};

}  // namespace semitone::amp

#pragma once

#include "semitone/autocast/cast_policy.h"

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <memory>
#include <optional>
#include <utility>

namespace semitone::amp {

/// Until the end of its scope, operators of this thread run in the precision that a policy gives
/// them:
///
///     {
///       amp::Autocast region(torch::kCPU, torch::kBFloat16);
///       output = model->forward(input);           // convolutions and matrix products in bf16
///       loss = loss_fn(output, target);           // losses in fp32
///     }
///     loss.backward();                            // backward runs in the dtypes of the forward
///
/// - Regions nest, also with other devices, dtypes and policies. The end of a region restores the
///   enclosing one, also when an exception ends it.
/// - A region belongs to its thread. LibTorch also applies it on the threads that work for this
///   one: the autograd engine's, at::launch's and the JIT's. For other threads and for
///   at::parallel_for, see AutocastState.
/// - An fp32 parameter that requires gradients is cast once, however often a region uses it. A
///   frozen one is cast at each use, unless the policy is bound to the model (CastPolicy::bind,
///   amp::initialize). One that was made in c10::InferenceMode is always cast at each use, since
///   such tensors have no version counter. torch::nn::Linear passes weight.t() to its operator;
///   this view uses the cached copy of the weight, too, and so gets no gradient of its own if a hook
///   or torch::autograd::grad asks for one after the operator. There is one cached copy per dtype.
///   A copy is not used any more once the weight has changed. A copy that was made without a gradient is
///   replaced when a gradient is needed. All copies are dropped when the outermost region ends, or
///   when a backward pass runs through one of them.
/// - A weight is taken as changed after every write that increments its version counter (in place,
///   through an alias, set_data), when its memory is replaced, and after a write to that memory by
///   add_ or sub_ in the region. On a CPU it is also taken as changed if one of 32 sampled elements
///   has another value. The steps of optimizers are therefore detected, including
///   torch::optim::SGD's, which writes through tensor.data() with add_. A write through
///   tensor.data() by another operator, or while casts are off, is not detected on devices other
///   than the CPU. On a CPU it is missed if it changes none of the sampled elements. After such a
///   write call clear_cast_cache(), or write under torch::NoGradGuard instead. Neither is needed
///   after a backward pass through one of the region's casts, which drops all copies.
/// - LibTorch's own cache of casts, which kernels of other libraries fill
///   (at::autocast::cached_cast), is emptied at the same times.
/// - LibTorch's profilers may start and stop inside and outside of regions, in any order.
/// - In-place operators and out= overloads are not cast: they run in their output's dtype.
/// - A backward pass in the region computes as outside: LibTorch's derivatives, and hooks on their
///   gradients, are not cast. The backward of a torch::autograd::Function is cast, as its forward.
/// - TorchScript modules are covered, since their operators use the same dispatcher.
///
/// Destroy it on the thread that constructed it, in the reverse order of construction. If the order
/// is wrong, the remaining regions continue as if the destroyed one had never existed, and a
/// warning is logged once. If the thread is wrong, an error is logged, and the region stays in
/// force on its own thread until another region begins or ends there.
class [[nodiscard]] Autocast {
 public:
  /// Enters a region with the policy's device and dtype. Error if the policy has keep_fp32_params()
  /// globs or fp8() and is not bound: call bind() first.
  explicit Autocast(const CastPolicy& policy);

  /// Enters a region with the default policy, CastPolicy::semitone, for a device. If device is CUDA
  /// and there is no GPU, nothing is cast, and a warning is logged once.
  /// @param dtype    fp16 or bf16; default: default_16bit_dtype(device). Error for any other. Not used
  ///                 if enabled is false.
  /// @param enabled  false: operators on this device run without casts in the scope, also inside an
  ///                 enabled region
  explicit Autocast(c10::DeviceType device, std::optional<c10::ScalarType> dtype = std::nullopt,
                    bool enabled = true);

  ~Autocast();
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  struct Guard;
  std::unique_ptr<Guard> guard_;
};

/// Turns autocast off for every device until the end of the scope, inside any region. Apex:
/// disable_casts. It also turns Emulation off: matrix products of 16-bit tensors are then
/// LibTorch's. If the processor lacks kernels for the dtype, these are slow and round differently,
/// and some convolutions are wrong (docs/numerics.md). To turn off the casts alone, use
/// AutocastState::current().without_casts().enter().
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

/// Returns whether this thread is in an enabled region for the device, with casts on.
bool autocast_enabled(c10::DeviceType device);

/// Returns the 16-bit dtype of this thread's region, or the device's default outside of regions.
c10::ScalarType autocast_dtype(c10::DeviceType device);

/// Empties the cache of weight casts in this thread's regions, and LibTorch's own cache. Needed
/// only after a write that Autocast does not detect. No effect outside of regions, except on
/// LibTorch's cache.
void clear_cast_cache();

/// The regions of a thread, to be entered on another thread:
///
///     const auto state = amp::AutocastState::current();
///     at::parallel_for(0, n, 1, [&](int64_t begin, int64_t end) {
///       const auto guard = state.enter();
///       …
///     });
class AutocastState {
 public:
  /// Applies the state to this thread until it is destroyed.
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

  /// Returns the regions of this thread.
  static AutocastState current();
  /// Returns a state without regions.
  static AutocastState disabled();
  /// Returns the same regions without casts: operators run in the dtypes of their arguments, and
  /// 16-bit matrix products are computed as the policies say (Emulation).
  AutocastState without_casts() const;
  /// Returns the same regions with a cache of weight casts for each scope: casts that were made
  /// outside are not used inside, nor the other way round.
  AutocastState with_own_cache() const;
  /// Returns whether the state has a region for the device.
  bool has_region(c10::DeviceType device) const;
  /// Applies the regions of the state to this thread, in place of the thread's own. Devices for
  /// which the state has no region are off.
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

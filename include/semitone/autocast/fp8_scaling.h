#pragma once

#include <ATen/core/Tensor.h>
#include <torch/serialize/archive.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace semitone::amp {

class Fp8State;

/// The scales of a model's products in fp8 (CastPolicy::fp8). Each weight has three: for its inputs,
/// for itself, and for the gradients of its results. fp8 has 8 bits, of which 2 or 3 are the significand's, so
/// the range of a tensor has to be brought to that of the format: values are multiplied by a scale,
/// rounded, and the product is divided by the two scales.
///
/// Scaling is delayed, as in NVIDIA's Transformer Engine: the scale of a step comes from the
/// largest magnitudes (amax) of the steps before, so that a tensor is read once:
///
///     scale = largest number of the format / largest amax of the history / 2^margin
///
/// A value beyond that range becomes the largest number. Before the first update() the scale comes
/// from the tensor itself; so it does in a program that never calls update().
///
/// This is a handle: copies refer to the same scales. The functions may be called from any thread,
/// but update() and load() only between steps.
class Fp8Scaling {
 public:
  /// Ends a step: appends the amax of each tensor since the last call to the history, and computes
  /// the scales of the next step. amp::MixedPrecision::step calls it. In a loop without that, call
  /// it after the optimizer's step:
  ///
  ///     scaler.update();
  ///     policy.fp8_scaling().update();
  ///
  /// If a tensor's amax is 0 in all steps of the history, its scale stays. Infinities and NaNs do
  /// not count in an amax. Gradients have an amax of forward passes that record gradients only;
  /// evaluation changes nothing.
  void update();

  /// Forgets the amaxes since the last update(), those of a batch that is left out after its forward
  /// pass: a single broken one would otherwise set the scales of as many steps as the history has.
  void discard();

  /// Sets a hook through which ranks agree, with a MAX all-reduce, so that from the second step on all
  /// use the same scales. Without it, each rank has scales for its own batches; weights have the same
  /// ones anyway. update() calls it once, with all amaxes: one fp32 tensor on the device of the
  /// weights. update() throws an Error, and changes nothing, if the hook leaves another shape, dtype,
  /// or a value that is negative or not finite. Default: none.
  ///
  ///     scaling.set_amax_hook([&](at::Tensor& amax) {
  ///       group.all_reduce(amax, comm::ReduceOp::max);
  ///     });
  using AmaxHook = std::function<void(at::Tensor& amax)>;
  void set_amax_hook(AmaxHook hook);

  /// The scales of the next step; 0 before there is an amax.
  struct Scales {
    std::string parameter;  ///< its name
    float input_scale;
    float weight_scale;
    float grad_output_scale;
  };
  std::vector<Scales> scales() const;

  /// Saves and loads the history, the scales and the amaxes since the last update(). load() throws
  /// FileError, and changes nothing, if the weights or the Fp8Options differ.
  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive);

 private:
  friend class CastPolicy;
  explicit Fp8Scaling(std::shared_ptr<Fp8State> state) : state_(std::move(state)) {}

  std::shared_ptr<Fp8State> state_;
};

}  // namespace semitone::amp

#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <unordered_map>

namespace semitone::amp {

class Masters;

/// fp32 copies of an optimizer's 16-bit parameters. The optimizer updates the copies ("masters"),
/// and the model gets the rounded values. Updates that are too small for 16 bits accumulate instead
/// of getting lost.
///
/// From construction on, the optimizer's param_groups hold the masters in place of the 16-bit
/// parameters. fp32 parameters and frozen parameters stay in the groups. Existing optimizer state
/// moves to the masters, in fp32. Parameters whose masters a FusedOptimizer splits (split_master)
/// also stay: their masters are part of the optimizer's state.
///
///     model->to(torch::kBFloat16);  // except BatchNorm: amp::initialize does that
///     torch::optim::AdamW optimizer(model->parameters(), 1e-3);
///     amp::MasterWeights masters(optimizer);
///     …
///     optimizer.zero_grad();
///     loss.backward();
///     if (!masters.take_gradients()) {
///       optimizer.step();
///       masters.write_model();
///     }
///
/// Parameters may be added to the groups, and get a master at sync() or pull(). They may also be
/// removed: sync(), pull(), take_gradients(), step() and write_model() notice which ones have left
/// or come back. A parameter that has left is not trained: its gradient stays in the model, and
/// another optimizer may change it. If it returns, it has its state again, and its exact value
/// unless it was changed.
///
/// amp::initialize does all of this at O2. Works with every torch::optim::Optimizer except LBFGS,
/// which is an Error: it evaluates the model inside its step. The optimizer must outlive this
/// object. The destructor gives the optimizer the model's parameters back, with the state of their
/// masters; it then trains them in 16 bits. (The state of parameters that have left is dropped.) An
/// object that was moved from can only be destroyed.
///
/// Tensors that outlive a call are created outside of the caller's c10::InferenceMode. Evaluation
/// in inference mode between two steps is therefore safe.
class [[nodiscard]] MasterWeights {
 public:
  /// Initial values that are more exact than the parameters: the weights before they were cast. A
  /// master takes over the memory of its value, and values that share memory give masters that
  /// share it. Optimizer state for such a parameter is taken to be in fp32, like the values.
  using ExactValues = std::unordered_map<const c10::TensorImpl*, at::Tensor>;

  /// Error for LBFGS, and for 16-bit optimizer state without serialize(), which cannot be widened
  /// to fp32. In these cases nothing is changed.
  explicit MasterWeights(torch::optim::Optimizer& optimizer, const ExactValues& exact = {});
  MasterWeights(const MasterWeights&) = delete;
  MasterWeights& operator=(const MasterWeights&) = delete;
  MasterWeights(MasterWeights&& other) noexcept;
  MasterWeights& operator=(MasterWeights&&) = delete;
  ~MasterWeights();

  /// Number of parameters in the optimizer's groups with a master in this object.
  std::size_t size() const;

  /// Moves gradients from the model to the masters: adds model.grad / scale to master.grad, and
  /// drops the model's gradients. Gradients of fp32 parameters are divided in place, including
  /// anything accumulated before. To accumulate under a scale, accumulate in the model and call
  /// this once. Returns whether an inf or NaN was found, with one host read. Non-finite values stay
  /// in the gradients until these are zeroed. Error if a gradient is still this rank's own: of a
  /// backward pass in DistributedDataParallel::no_sync(), without one after it.
  /// @param inverse_scale  1/scale
  bool take_gradients(float inverse_scale = 1.0F);

  /// Calls visit(parameter, master) for every parameter in the groups that has a master.
  void for_each(const std::function<void(const at::Tensor& parameter, const at::Tensor& master)>&
                    visit) const;

  /// Rounds every master into its parameter. Call it after optimizer.step().
  void write_model();

  /// Synchronises parameters and masters after changes that this class did not make.
  /// - A parameter was written to (clamped, masked, loaded, averaged). Its version counter shows
  ///   this. A write through tensor.data() is only noticed on a CPU, and only if it changes one of
  ///   16 elements of the parameter, spread evenly. Elements that differ from their
  ///   rounded master, also NaNs, are copied to the master. Other elements keep their exact value,
  ///   so that clamping after each step costs no precision.
  /// - A master was changed (optimizer.step() without write_model()). It is rounded into its
  ///   parameter.
  /// - A 16-bit parameter was added to the optimizer or unfrozen. It gets a master.
  ///
  /// If a parameter and its master both changed, the master takes all values of the parameter. Error
  /// if the parameter was changed in place after optimizer.step() and before write_model(): such a
  /// change is one of the weights before the step. (On a GPU it is not noticed for
  /// torch::optim::SGD, whose steps change no version counter.) The call is cheap if nothing
  /// changed. Between take_gradients() and write_model() it costs as much as write_model().
  ///
  /// With split masters, a changed element cannot be recognised, so the lower halves stay. This is
  /// exact for unchanged elements, and shifts changed ones by at most half a unit in the last
  /// place. This function and all that call it throw Error for a parameter whose shape has changed.
  void sync();

  /// Does the part of sync() that changes masters.
  void pull();

  /// Calls optimizer.step(), and rounds the masters that it has changed into their parameters, in
  /// one pass for a FusedOptimizer.
  void step();

  /// Drops the masters' gradients. Call it if no step will use them.
  void clear_gradients();

  /// Returns whether a tensor is one of the masters.
  bool is_master(const at::Tensor& tensor) const;

  /// Returns whether a parameter has a master, as a tensor in this object or split. Also true for one
  /// that has left the optimizer's groups, until it is changed.
  bool has(const at::Tensor& parameter) const;
  /// Returns the fp32 value of a parameter: its master, assembled from its halves if it is split.
  /// Undefined without a master.
  at::Tensor master_of(const at::Tensor& parameter) const;

  /// Sets a parameter and its master to an fp32 value. Error if it has no master.
  void set(const at::Tensor& parameter, const at::Tensor& value);

  /// Saves and loads the masters bit for bit, by group and index in the optimizer. load() throws
  /// FileError, and changes nothing, if a master is missing, is extra, or has another shape.
  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive);

 private:
  std::unique_ptr<Masters> masters_;
};

}  // namespace semitone::amp

#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <cstdint>
#include <unordered_map>
#include <vector>

namespace semitone::amp {

class Gradients;

}  // namespace semitone::amp

namespace semitone::optim {
class FusedOptimizer;
class CapturableStep;
}  // namespace semitone::optim

namespace semitone::amp {

/// fp32 copies of an optimizer's 16-bit parameters. The optimizer updates the copies ("masters"),
/// and the model gets them rounded. Updates that are too small for 16 bits accumulate instead of
/// getting lost.
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
/// amp::initialize does all of this at O2. Works with every torch::optim::Optimizer except LBFGS,
/// which is an Error: it evaluates the model inside its step. The optimizer must outlive this
/// object. The destructor gives the optimizer the model's parameters back, with the state of their
/// masters; it then trains them in 16 bits.
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
  /// to fp32. Nothing is changed then.
  explicit MasterWeights(torch::optim::Optimizer& optimizer, const ExactValues& exact = {});
  MasterWeights(const MasterWeights&) = delete;
  MasterWeights& operator=(const MasterWeights&) = delete;
  MasterWeights(MasterWeights&& other) noexcept;
  MasterWeights& operator=(MasterWeights&&) = delete;
  ~MasterWeights();

  /// Number of parameters with a master in this object.
  std::size_t size() const { return pairs_.size(); }

  /// Moves gradients from the model to the masters: adds model.grad / scale to master.grad, and
  /// drops the model's gradients. Gradients of fp32 parameters are divided in place, including
  /// anything accumulated before. To accumulate under a scale, accumulate in the model and call
  /// this once. Returns whether an inf or NaN was found, with one host read. Non-finite values stay
  /// in the gradients until these are zeroed.
  /// @param inverse_scale  1/scale
  bool take_gradients(float inverse_scale = 1.0F);

  /// Calls visit(parameter, master) for every pair.
  template <typename Visit>
  void for_each(Visit&& visit) const {
    for (const Pair& pair : pairs_) visit(pair.parameter, pair.master);
  }

  /// Rounds every master into its parameter. Call it after optimizer.step().
  void write_model();

  /// Synchronises parameters and masters after changes that this class did not make.
  /// - A parameter was written to (clamped, masked, loaded, averaged), as seen by its version
  ///   counter, so not through tensor.data(). Elements that differ from their rounded master, also
  ///   NaNs, are copied to the master. Other elements keep their exact value, so that clamping
  ///   after each step costs no precision.
  /// - A master was changed (optimizer.step() without write_model()). It is rounded into its
  ///   parameter.
  /// - A 16-bit parameter was added to the optimizer or unfrozen. It gets a master.
  ///
  /// If both sides changed, the whole parameter wins. Cheap if nothing changed; as expensive as
  /// write_model() between take_gradients() and write_model().
  ///
  /// With split masters, a changed element cannot be recognised, so the lower halves stay. This is
  /// exact for unchanged elements, and shifts changed ones by at most half a unit in the last
  /// place. This function and all that call it throw Error for a parameter whose shape has changed.
  void sync();

  /// The part of sync() that changes masters only.
  void pull();

  /// optimizer.step() and write_model(); one pass for a FusedOptimizer.
  void step();

  /// Drops the masters' gradients, if no step will use them.
  void clear_gradients();

  /// take_gradients() without the pass that moves gradients: checks the model's gradients, and
  /// leaves them in 16 bits for step() to read. Only for a FusedOptimizer on the CPU, and only if
  /// the masters have no gradients to add to. Returns whether the gradients were deferred.
  ///
  /// Until the gradients are moved or the step is over, reading a master's gradient returns a
  /// placeholder: one NaN expanded to its shape. FusedOptimizer::step, called directly instead of
  /// step() of this class, recognises placeholders and is an Error. (A master of one element gets
  /// its gradient at once.)
  /// @param found_inf  set to true if an inf or NaN was found, otherwise unchanged
  bool defer_gradients(float inverse_scale, bool& found_inf);
  /// Returns whether defer_gradients() would defer.
  bool can_defer_gradients() const;

  /// Moves deferred gradients to the masters.
  void move_deferred_gradients();

  /// For the library itself: sets the gradients of the model's parameters to the tensors that
  /// step() will read: the masters' fp32 gradients, or the model's own if they are deferred.
  /// In-place changes of `parameter.grad()` therefore take effect in step().
  void show_gradients();
  /// For the library itself: undoes show_gradients(). A gradient that was replaced in the model
  /// replaces the master's, and one that was dropped on either side is dropped on both.
  void hide_gradients();
  /// Whether gradients are shown.
  bool shows_gradients() const { return shown_; }

  /// For the library itself: deferred gradients, and the factor that step() applies to them.
  struct Deferred {
    std::vector<at::Tensor> masters;
    std::vector<at::Tensor> grads;  ///< the model's gradient for each master
    float inverse_scale;
  };
  Deferred deferred_gradients();
  /// For the library itself: multiplies the deferred gradients by an additional factor.
  void scale_deferred_gradients(double factor);

  /// For the library itself: take_gradients() for the masters only, as part of a larger pass.
  void take_gradients(Gradients& pass);
  /// For the library itself: a step that can be captured, and that changes nothing if found_inf is
  /// set.
  void step(optim::CapturableStep& step, const at::Tensor& found_inf);
  /// For the library itself: a device has replayed such a step. Updates autograd's version
  /// counters.
  void note_step();

  /// Whether a tensor is one of the masters.
  bool is_master(const at::Tensor& tensor) const {
    return by_master_.count(tensor.unsafeGetTensorImpl()) > 0;
  }

  /// Whether a parameter has a master, as a tensor in this object or split.
  bool has(const at::Tensor& parameter) const;
  /// Whether a parameter's master (not a split one) has a gradient, moved or deferred.
  bool has_gradient(const at::Tensor& parameter) const;

  /// Returns the fp32 value of a parameter: its master, assembled from its halves if it is split.
  /// Undefined without a master.
  at::Tensor master_of(const at::Tensor& parameter) const;

  /// Sets a parameter and its master to an fp32 value. Error if it has no master.
  void set(const at::Tensor& parameter, const at::Tensor& value);

  /// Saves and loads the masters by their places in the optimizer, exactly. load() is a FileError,
  /// and changes nothing, if a master is missing, is extra, or has another shape.
  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive);

  /// The two halves of load(): read() returns an archive's values for these masters, and assign()
  /// sets the masters to them.
  std::vector<at::Tensor> read(torch::serialize::InputArchive& archive);
  void assign(const std::vector<at::Tensor>& values);

 private:
  // Exact values that a parameter has overwritten since the last step: it may get its own back, as
  // after an evaluation with averaged weights.
  struct Replaced {
    at::Tensor places;  // in the order of the sizes; undefined: all
    at::Tensor values;  // undefined: none
  };
  struct Pair {
    at::Tensor parameter;
    at::Tensor master;
    // Versions and addresses when the two last agreed.
    std::uint32_t parameter_version;
    const void* parameter_data;
    std::uint32_t master_version;
    const void* master_data;
    at::Tensor deferred = {};     // the model's scaled gradient, while it is deferred
    at::Tensor placeholder = {};  // the master's gradient during that time
    at::Tensor shown = {};        // the gradient that show_gradients() set on the parameter
    Replaced replaced = {};
  };

  struct Adoption;
  // Gives every 16-bit parameter that has none a master.
  void adopt(const ExactValues& exact);
  Adoption find_adoption(const ExactValues& exact);
  void give_back();
  static bool parameter_changed(const Pair& pair);
  static bool master_changed(const Pair& pair);
  static void take_parameter(Pair& pair);
  static void keep_replaced(Pair& pair, const at::Tensor& differs);
  static at::Tensor with_replaced(const Pair& pair, const at::Tensor& value,
                                  const at::Tensor& otherwise);
  at::Tensor make_master(const at::Tensor& parameter, const ExactValues& exact,
                         const std::vector<Pair>& fresh) const;
  static void agreed(Pair& pair);
  static bool is_deferred(const Pair& pair);
  bool take_deferred(Pair& pair);
  template <typename Visit>
  void for_each_place(Visit&& visit) const;

  torch::optim::Optimizer* optimizer_;  // null after a move
  optim::FusedOptimizer* fused_;        // optimizer_ if it is a FusedOptimizer, else null
  std::vector<Pair> pairs_;
  std::unordered_map<const c10::TensorImpl*, std::size_t> by_parameter_;
  std::unordered_map<const c10::TensorImpl*, std::size_t> by_master_;
  // The masters got gradients, and were not written to the model since: the optimizer may have
  // stepped. Version counters cannot tell, since LibTorch's SGD writes through tensor.data().
  bool maybe_stepped_ = false;
  float deferred_inverse_ = 1;  // 1/scale of all deferred gradients
  bool shown_ = false;          // some gradients are shown
};

}  // namespace semitone::amp

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
class RepeatedStep;
}  // namespace semitone::optim

namespace semitone::amp {

/// fp32 copies of an optimizer's 16-bit parameters: the optimizer updates the copies, and the model
/// gets them rounded. Updates that are too small for 16 bits add up instead of getting lost.
///
/// From construction on the optimizer's param_groups hold the masters in place of the 16-bit
/// parameters; parameters in fp32 stay as they are (they are their own masters), frozen ones too.
/// State that the optimizer already has moves along, in fp32. Parameters whose masters a
/// FusedOptimizer splits (split_master) stay too: their masters are in the optimizer's state.
///
///     model->to(torch::kBFloat16);  // BatchNorm excepted: amp::initialize does that
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
/// amp::initialize does all of this at O2. Works with every torch::optim::Optimizer but LBFGS,
/// which is an Error: it evaluates the model inside its step. The optimizer must outlive this
/// object. When this object is gone, the optimizer has the model's parameters again, with the state
/// of their masters: it trains them in 16 bits.
///
/// State that outlives a call is made outside of the caller's c10::InferenceMode: evaluation in it,
/// between two steps, is like any other.
class [[nodiscard]] MasterWeights {
 public:
  /// Values to start from that are more exact than a parameter's own: the weights before they were
  /// cast. A master takes over the memory; tensors that share theirs give masters that do. State that
  /// the optimizer has for such a parameter is taken to be in fp32 as the values are.
  using ExactValues = std::unordered_map<const c10::TensorImpl*, at::Tensor>;

  /// Error for LBFGS, and for state in 16 bits that cannot be saved (no serialize()): it could not
  /// be brought to fp32. Nothing is changed then.
  explicit MasterWeights(torch::optim::Optimizer& optimizer, const ExactValues& exact = {});
  MasterWeights(const MasterWeights&) = delete;
  MasterWeights& operator=(const MasterWeights&) = delete;
  MasterWeights(MasterWeights&& other) noexcept;
  MasterWeights& operator=(MasterWeights&&) = delete;
  ~MasterWeights();

  /// How many parameters have a master here.
  std::size_t size() const { return pairs_.size(); }

  /// Moves gradients from the model to the masters: master.grad = model.grad / scale, added to what
  /// master.grad holds; the model's gradients are dropped. fp32 parameters' gradients are divided
  /// in place, all of what they hold: to accumulate under a scale, accumulate in the model and take
  /// once. Returns whether an inf or NaN was found (one host read); it stays in the gradients until
  /// they are zeroed.
  /// @param inverse_scale  1/scale
  bool take_gradients(float inverse_scale = 1.0F);

  /// Calls visit(parameter, master) for every pair.
  template <typename Visit>
  void for_each(Visit&& visit) const {
    for (const Pair& pair : pairs_) visit(pair.parameter, pair.master);
  }

  /// Rounds every master into its parameter. After optimizer.step().
  void write_model();

  /// Repairs what happened behind its back: parameters that were written to since (clamped, masked,
  /// loaded, averaged; seen by version counters, so not through tensor.data()) give their masters
  /// the elements that are no longer what the master rounds to, NaNs too: an element that was not
  /// changed keeps its exact value, so that clamping after each step costs no precision. Masters
  /// that were changed (optimizer.step() without write_model()) are rounded into their parameters;
  /// 16-bit parameters that were added to the optimizer, or are frozen no more, get masters. If both
  /// sides changed, the parameter wins, all of it. Cheap when nothing happened; as dear as
  /// write_model() between take_gradients() and write_model().
  ///
  /// Split masters have nothing that a changed element could be told by: their lower halves stay,
  /// which is exact for elements that were not changed and moves others by at most half a unit.
  /// Error, from here and whatever calls it, for a parameter that has another shape now.
  void sync();

  /// The half of sync() that changes masters only.
  void pull();

  /// optimizer.step() and write_model(); of a FusedOptimizer, in one pass.
  void step();

  /// Drops the masters' gradients: there will be no step with them.
  void clear_gradients();

  /// take_gradients() without the pass that moves them: the model's gradients are looked at, and
  /// kept in 16 bits for step() to read. Only for a FusedOptimizer on the CPU, and only if nothing
  /// is there that they would have to be added to; returns whether that was so.
  ///
  /// Until they are moved or the step is over, each master has a gradient of NaNs in place of its
  /// own, one number spread over its shape, to be dropped or to be noticed: FusedOptimizer::step,
  /// called past this object, is an Error. (A master of one number gets its gradient at once.)
  /// @param found_inf  set to true if an inf or NaN was found; else left
  bool defer_gradients(float inverse_scale, bool& found_inf);
  /// Whether it would.
  bool can_defer_gradients() const;

  /// Moves what was deferred to the masters.
  void move_deferred_gradients();

  /// For the library itself: gives the model's parameters the gradients that their masters have,
  /// the same tensors: fp32 ones, or the model's own where they are deferred. What is done to
  /// `parameter.grad()` in place is done to what step() reads.
  void show_gradients();
  /// For the library itself: ends that. A gradient that was replaced in the model replaces the
  /// master's, and one that was dropped on either side is dropped on both.
  void hide_gradients();
  /// Whether some are shown.
  bool shows_gradients() const { return shown_; }

  /// For the library itself: gradients that are deferred, and what step() multiplies them by.
  struct Deferred {
    std::vector<at::Tensor> masters;
    std::vector<at::Tensor> grads;  ///< of each master, as it is in the model
    float inverse_scale;
  };
  Deferred deferred_gradients();
  /// For the library itself: multiplies the deferred gradients by a factor more.
  void scale_deferred_gradients(double factor);

  /// For the library itself: take_gradients() of the masters alone, as part of a larger pass.
  void take_gradients(Gradients& pass);
  /// For the library itself: step() by a step that can be captured, which changes nothing if
  /// found_inf is set.
  void step(optim::RepeatedStep& repeated, const at::Tensor& found_inf);
  /// For the library itself: a device has taken such a step again; autograd is to know.
  void note_step();

  /// Whether a tensor is one of the masters.
  bool is_master(const at::Tensor& tensor) const {
    return by_master_.count(tensor.unsafeGetTensorImpl()) > 0;
  }

  /// Whether a parameter has a master here, whole or split.
  bool has(const at::Tensor& parameter) const;
  /// Whether there is a gradient for its whole master: moved there, or deferred.
  bool has_gradient(const at::Tensor& parameter) const;

  /// The fp32 value of a parameter: its master, put together if it is split; undefined if it has
  /// none.
  at::Tensor master_of(const at::Tensor& parameter) const;

  /// Sets a parameter and its master to an fp32 value. Error if it has no master.
  void set(const at::Tensor& parameter, const at::Tensor& value);

  /// Saves the masters by their places in the optimizer, exactly. load() is a FileError, and
  /// changes nothing, if one is missing, too many, or of another shape.
  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive);

  /// The two halves of load(): what an archive holds for these masters, and taking it over.
  std::vector<at::Tensor> read(torch::serialize::InputArchive& archive);
  void assign(const std::vector<at::Tensor>& values);

 private:
  struct Pair {
    at::Tensor parameter;
    at::Tensor master;
    // What the two looked like when they last agreed.
    std::uint32_t parameter_version;
    const void* parameter_data;
    std::uint32_t master_version;
    const void* master_data;
    at::Tensor deferred = {};     // the model's gradient, scaled
    at::Tensor placeholder = {};  // the master's gradient meanwhile
    at::Tensor shown = {};        // what show_gradients() gave the parameter
  };

  void adopt(const ExactValues& exact);
  void give_back();
  static bool parameter_changed(const Pair& pair);
  static bool master_changed(const Pair& pair);
  static void take_parameter(Pair& pair);
  at::Tensor make_master(const at::Tensor& parameter, const ExactValues& exact,
                         const std::vector<Pair>& beside) const;
  static void agreed(Pair& pair);
  static bool is_deferred(const Pair& pair);
  bool take_deferred(Pair& pair);
  template <typename Visit>
  void for_each_place(Visit&& visit) const;

  torch::optim::Optimizer* optimizer_;  // null: moved from
  optim::FusedOptimizer* fused_;        // the optimizer, if it is one
  std::vector<Pair> pairs_;
  std::unordered_map<const c10::TensorImpl*, std::size_t> by_parameter_;
  std::unordered_map<const c10::TensorImpl*, std::size_t> by_master_;
  // The masters got gradients and were not written since: the optimizer may have stepped. No
  // version counter tells: LibTorch's SGD writes through tensor.data().
  bool maybe_stepped_ = false;
  float deferred_inverse_ = 1;  // of the scale of all deferred gradients
  bool shown_ = false;          // some gradients are
};

}  // namespace semitone::amp

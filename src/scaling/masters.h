#pragma once

// Internal interface: other rooms include this header.

#include "semitone/optim/fused_optimizer.h"
#include "semitone/scaling/master_weights.h"
#include "src/optim/deferred_gradient.h"

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace semitone::optim {
class CapturableStep;
}  // namespace semitone::optim

namespace semitone::kernels {
class ReadLater;
}  // namespace semitone::kernels

namespace semitone::amp {

class Gradients;

// What MasterWeights does, and what the library does with masters beyond it: it shows the masters'
// gradients in the model, defers them, and captures steps. Members without a comment are those of
// MasterWeights.
class Masters {
 public:
  using ExactValues = MasterWeights::ExactValues;

  explicit Masters(torch::optim::Optimizer& optimizer, const ExactValues& exact = {});
  Masters(const Masters&) = delete;
  Masters& operator=(const Masters&) = delete;
  Masters(Masters&& other) noexcept;
  Masters& operator=(Masters&&) = delete;
  ~Masters();

  std::size_t size() const;
  bool is_master(const at::Tensor& tensor) const {
    return by_master_.count(tensor.unsafeGetTensorImpl()) > 0;
  }
  // Also for a parameter that has left the optimizer's groups, until its value changes.
  bool has(const at::Tensor& parameter) const;
  at::Tensor master_of(const at::Tensor& parameter) const;
  // Whether it has a master, and the optimizer trains it.
  bool trains(const at::Tensor& parameter) const;
  // The parameter of a master; undefined for another tensor.
  at::Tensor parameter_of(const at::Tensor& master) const;
  void set(const at::Tensor& parameter, const at::Tensor& value);
  template <typename Visit>
  void for_each(Visit&& visit) const {
    for (const Pair& pair : pairs_)
      if (pair.in_groups) visit(pair.parameter, pair.master);
  }
  // Finds out which parameters have left the optimizer's groups, and which have come back. The
  // gradients of the former are not taken, nor their values written: another optimizer may train
  // them. Functions that take gradients, write weights or step begin with it, except the captured
  // step, before which sync() is called.
  void follow_groups();
  // Gives every 16-bit parameter that has none a master.
  void adopt(const ExactValues& exact);

  void write_model();
  void sync();
  void pull();
  // @param in_one_pass  whether LibTorch's optimizers step as optim::step_in_one_pass does
  void step(bool in_one_pass = false);
  // step(), unless found_inf, one fp32 element on the masters' device, is not 0. The optimizer is a
  // fused one. Nothing is read: result tells the host later what is in found_inf.
  void step_unless(const at::Tensor& found_inf, std::shared_ptr<kernels::ReadLater> result);
  void clear_gradients();
  bool take_gradients(float inverse_scale = 1.0F);
  // The same for the masters only, as part of a larger pass.
  void take_gradients(Gradients& pass);

  // Whether a parameter's master (not a split one) has a gradient, moved or deferred.
  bool has_gradient(const at::Tensor& parameter) const;

  // take_gradients() without the pass that moves gradients: checks the model's gradients, and
  // leaves them in 16 bits for step() to read. Only for a FusedOptimizer, on devices with kernels,
  // and only if the masters have no gradients to add to. Returns whether the gradients were
  // deferred.
  // @param found_inf  one flag per device, as in Gradients::run(); nothing is read from a device
  bool defer_gradients(float inverse_scale, std::vector<at::Tensor>& found_inf);
  // Whether defer_gradients() would defer.
  bool can_defer_gradients() const;
  // Moves deferred gradients to the masters.
  void move_deferred_gradients();
  // The deferred gradients of what is in the optimizer's groups, and the factor that step() applies
  // to them.
  struct Deferred {
    std::vector<at::Tensor> masters;
    std::vector<at::Tensor> grads;  // the model's gradient for each master
    float inverse_scale;
  };
  Deferred deferred_gradients();
  // Multiplies the deferred gradients by an additional factor.
  void scale_deferred_gradients(double factor);

  // Sets the gradients of the model's parameters to the tensors that step() will read: the masters'
  // fp32 gradients, or the model's own if they are deferred. In-place changes of `parameter.grad()`
  // therefore take effect in step().
  void show_gradients();
  // Undoes show_gradients(). A gradient that was replaced in the model replaces the master's, and
  // one that was dropped on either side is dropped on both.
  void hide_gradients();
  bool shows_gradients() const { return shown_; }
  // Before a forward pass, after which the program may zero the model's gradients, clip them, or add
  // to them: what it has changed so far takes effect, and the rest stays where it is shown, in fp32.
  void refresh_gradients();
  // Whether backward has left gradients in the model that nothing has taken.
  bool has_gradients_in_model() const;
  // Error if optimizer.step() has changed masters since the model was updated: gradients of the
  // model's old weights would be taken for theirs.
  void require_updated_model() const;
  // Whether the program has changed a gradient that is shown, but clipped only when step() reads it.
  bool has_changed_clipped() const;

  // A step that can be captured, and that changes nothing if found_inf is set.
  void step(optim::CapturableStep& step, const at::Tensor& found_inf);
  // A device has replayed such a step: updates autograd's version counters.
  void note_step();

  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive);
  // The two halves of load(): read() returns an archive's values for these masters, and assign()
  // sets the masters to them.
  std::vector<at::Tensor> read(torch::serialize::InputArchive& archive);
  void assign(const std::vector<at::Tensor>& values);

 private:
  // Exact values that a parameter has overwritten since the last step: it may get its own back, as
  // after an evaluation with averaged weights.
  struct Replaced {
    at::Tensor places;  // in the order of the sizes; undefined: all
    at::Tensor values;  // undefined: none
  };
  // The bits of some numbers of a tensor, from the start of its memory to its end; on a CPU only.
  // They show writes through tensor.data(), which has a version counter of its own.
  using Probes = std::array<std::uint32_t, 16>;
  struct Pair {
    at::Tensor parameter;
    at::Tensor master;
    bool in_groups = true;  // the optimizer's
    // Versions, addresses and probes when the two last agreed.
    std::uint32_t parameter_version = 0;
    const void* parameter_data = nullptr;
    Probes parameter_probes = {};
    std::uint32_t master_version = 0;
    const void* master_data = nullptr;
    Probes master_probes = {};
    optim::DeferredGradient deferred = {};
    at::Tensor shown = {};  // the gradient that show_gradients() set on the parameter
    std::uint32_t shown_version = 0;
    Probes shown_probes = {};      // where gradients are clipped only when step() reads them
    bool changed_clipped = false;  // it was hidden with such a change: see has_changed_clipped()
    Replaced replaced = {};
  };

  void step_fused(const std::function<void(const optim::FusedStep&)>& take);

  void widen_states();
  struct Adoption;
  Adoption find_adoption(const ExactValues& exact);
  void give_back();
  void set_aside(Pair& pair);
  std::optional<std::size_t> index_at(const at::Tensor& place) const;
  const Pair* find(const at::Tensor& parameter) const;
  static bool parameter_changed(const Pair& pair);
  static bool master_changed(const Pair& pair);
  static Probes probe(const at::Tensor& tensor);
  static bool shown_changed(const Pair& pair);
  bool is_ahead(const Pair& pair) const;
  void require_updated_model(const Pair& pair) const;
  static void take_parameter(Pair& pair);
  static void keep_replaced(Pair& pair, const at::Tensor& differs);
  static at::Tensor with_replaced(const Pair& pair, const at::Tensor& value,
                                  const at::Tensor& otherwise);
  at::Tensor make_master(const at::Tensor& parameter, const ExactValues& exact,
                         const std::vector<Pair>& fresh) const;
  static void agreed(Pair& pair);
  // Returns a deferred gradient to the model. False if there is none, or if it was dropped or
  // replaced in the optimizer.
  static bool take_deferred(Pair& pair);
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
  float deferred_inverse_ = 1;  // 1/scale of all deferred gradients, times a clipping factor
  bool clipped_ = false;        // deferred_inverse_ has such a factor
  bool shown_ = false;          // some gradients are shown
};

}  // namespace semitone::amp

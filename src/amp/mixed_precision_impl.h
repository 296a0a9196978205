#pragma once

#include "semitone/amp/mixed_precision.h"
#include "semitone/core/events.h"
#include "src/amp/cudnn_scope.h"
#include "src/core/unreduced.h"
#include "src/scaling/gradients.h"
#include "src/scaling/late_flags.h"
#include "src/scaling/masters.h"
#include "src/scaling/step_watch.h"

#include <c10/core/UndefinedTensorImpl.h>
#include <c10/util/DimVector.h>
#include <torch/nn/module.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace semitone::amp {

// The state behind amp::initialize, by the order of a training loop:
//
// - initialize.cpp makes it, and mixed_precision.cpp runs models.
// - scaled_loss.cpp scales losses, scaled_loss_work.cpp works around their backward passes, and
//   unscale.cpp unscales the gradients.
// - mixed_precision_step.cpp steps, clips and clears gradients.
// - model_weights.cpp compares models with their masters, mixed_precision_io.cpp saves and loads.
// - optimizer_records.cpp finds what it has of an optimizer, training_warnings.cpp warns.
struct MixedPrecision::Impl {
  Impl();
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;
  ~Impl();

  // Gradients in a model that are multiplied by a loss scale.
  struct Scaled {
    std::int64_t loss_id;
    float inverse;  // of the scale
    bool open;      // a ScaledLoss is in progress; else delay_unscale left them
  };

  struct OptimizerRecord {
    torch::optim::Optimizer* optimizer;
    std::optional<Masters> masters;
    std::optional<Scaled> scaled;
    bool skip = false;            // the next step: a loss overflowed
    bool skipped = false;         // the last step: what overflowed may still be in the gradients
    std::int64_t overflowed = 0;  // the loss that last made a step skip
    // Until the first call of MixedPrecision::step: watches for calls of optimizer.step().
    StepWatch watch;
    bool watched = true;
    // The same number: optimizers that have parameters in common, directly or by way of another one.
    std::size_t component = 0;
    bool warned_of_no_gradient = false;
    bool warned_of_no_scale = false;
    bool warned_of_kept_gradients = false;
    // Until the first call of MixedPrecision::step, with masters: forward passes with gradients in
    // the model, and backward passes of scaled losses.
    int unseen_backwards = 0;
    int unused_backwards = 0;

    // Calls visit(parameter) for the tensors that backward gives gradients: the model's parameters,
    // not their masters.
    template <typename Visit>
    void for_each_leaf(Visit&& visit) const {
      if (masters.has_value()) {
        masters->for_each(
            [&](const at::Tensor& parameter, const at::Tensor&) { visit(parameter); });
      }
      for_each_without_master(visit);
    }

    // The optimizer's parameters that are the model's own.
    template <typename Visit>
    void for_each_without_master(Visit&& visit) const {
      for_each_parameter(*optimizer, [&](std::size_t, std::size_t, const at::Tensor& parameter) {
        if (!masters.has_value() || !masters->is_master(parameter)) visit(parameter);
      });
    }

    // Whether there is a gradient, in the model or for the optimizer.
    bool has_gradient() const {
      bool found = false;
      const auto look = [&](const at::Tensor& tensor) { found = found || tensor.grad().defined(); };
      for_each_leaf(look);
      for_each_parameter(*optimizer, [&](std::size_t, std::size_t, const at::Tensor& parameter) {
        look(parameter);
      });
      return found;
    }
  };

  // The result of a loss's backward passes, not yet read by the host.
  struct Pending {
    std::int64_t loss_id;
    std::vector<OptimizerRecord*> optimizers;
    std::vector<at::Tensor> found_inf;
    bool named = true;  // false: the loss was scaled for others, whose steps update its scale
  };

  // A step that a device decides, and whose result the host has not read yet.
  struct Undecided {
    std::shared_ptr<detail::LateFlags> flags;
    struct Loss {
      std::int64_t id;
      bool named;  // as Pending::named
    };
    std::vector<Loss> losses;  // of each flag
    OptimizerRecord* optimizer;
  };

  // The scale of one loss, in a device's memory.
  struct ScaleOnDevice {
    std::int64_t loss_id;
    at::Tensor scale;
    at::Tensor inverse;
  };

  // A parameter and its gradient.
  struct SetAside {
    at::Tensor parameter;
    at::Tensor grad;
    at::Tensor master = {};    // whose gradient it was; undefined: the parameter's
    bool also_inside = false;  // the model's gradient contains it too, scaled
    at::Tensor place = {};     // the gradient as the program has it too
  };

  // A gradient that is to be reduced with those of the next pass.
  struct OwnGradient {
    OwnGradient(UnreducedMark mark_, const at::Tensor& grad_)
        : mark(std::move(mark_)), passes_done(mark->passes_done), grad(grad_.getIntrusivePtr()) {}

    UnreducedMark mark;
    std::uint64_t passes_done;  // of the mark
    c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> grad;
  };

  // A tensor of a model that initialize cast to 16 bits.
  struct LowTensor {
    std::string name;
    at::Tensor tensor;
    c10::DimVector sizes;  // as at initialize
    c10::ScalarType dtype;
  };

  // One that stays fp32. Its address stays its own, its memory does not stay for this.
  struct WideTensor {
    WideTensor(std::string name_, const at::Tensor& tensor)
        : name(std::move(name_)), impl(tensor.getIntrusivePtr()) {}
    std::string name;
    c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> impl;
  };

  // A submodule that forward was called with. While it can be locked, no other module has its
  // address.
  struct Part {
    std::weak_ptr<const torch::nn::Module> module;
    std::size_t model;
  };

  class Exact;

  Properties properties;
  std::vector<Model> models;
  std::vector<at::Tensor> located;  // a tensor of each model; undefined: any device will do
  std::vector<LowTensor> low_tensors;
  std::shared_ptr<Exact> exact;      // the masters as seen by other rooms
  bool inference_tensors = false;    // the models were made in inference mode
  std::optional<CastPolicy> policy;  // of the region that autocast() gives, where there is one
  bool forward_in_region = false;    // forward runs in it, too
  std::unordered_map<const void*, Part> parts;
  std::vector<bool> ran;        // each model, through forward
  bool ran_elsewhere = false;   // call() or autocast() ran code of unknown models
  int idle_model_checks = 32;   // remaining checks, which bound the cost of idle models
  std::vector<bool> warned_of;  // each model
  std::vector<OptimizerRecord> optimizers;
  std::vector<LossScaler> scalers;
  std::vector<Pending> pending;
  std::vector<Undecided> undecided;
  // Gradients from before a scaled backward, which are not scaled. They are kept apart from the
  // model's until these are unscaled.
  std::unordered_map<const c10::TensorImpl*, SetAside> set_aside;
  // The gradients that a loss has left as this rank's own (core/unreduced.h), by parameter: what the
  // program puts in their place has no mark.
  std::unordered_map<const c10::TensorImpl*, OwnGradient> own_gradients;
  // While a step is captured, replaces the scaler's number.
  std::optional<ScaleOnDevice> scale_on_device;
  // For a CapturedStep: a loss changes nothing in optimizers that were not named for it.
  bool named_only = false;
  // Parameters of the models that are in no optimizer.
  std::vector<at::Tensor> free_parameters;
  // Those of the optimizers when find_shared_parameters() last ran, with a null after each.
  std::optional<std::vector<const c10::TensorImpl*>> parameters_seen;
  // The models' other floating-point tensors, which stay fp32.
  std::vector<WideTensor> wide_tensors;
  bool warned_of_loss = false;
  detail::ParameterNames names;
  FoundInfHook found_inf_hook;
  std::optional<CudnnScope> cudnn;
  std::shared_ptr<events::Listener> cast_log;
  int fp32_scopes = 0;  // Fp32Weights that are alive
  // The thread that last ran a model, scaled a loss or stepped; none before.
  std::atomic<std::thread::id> used_by;
  std::atomic<std::int64_t> uses = 0;  // the number of such calls

  void note_use();
  static bool in_backward_pass();
  bool has_scaled_gradients() const;

  // Lets owner_of() find this object by its optimizers.
  void own_optimizers();
  void disown_optimizers();
  // The object that has an optimizer, among all of the process. Error if there is none, or several.
  static Impl& owner_of(const torch::optim::Optimizer& optimizer, const char* caller);
  // Error if one of the optimizers has master weights of another object.
  static void require_no_owner(const OptimizerRefs& optimizers);
  // Other objects that this thread used last, with an optimizer.
  std::vector<Impl*> others_of_thread();
  static bool is_alive(const Impl* impl);

  // Whether the policy computes products in fp8.
  bool has_fp8() const { return policy.has_value() && policy->fp8_options().has_value(); }

  // Calls visit(parameter) for the tensors that backward gives gradients, of all optimizers and of
  // none.
  template <typename Visit>
  void for_each_parameter_of_models(const Visit& visit) const {
    std::unordered_set<const c10::TensorImpl*> seen;  // optimizers may share some
    const auto once = [&](const at::Tensor& parameter) {
      if (seen.insert(parameter.unsafeGetTensorImpl()).second) visit(parameter);
    };
    for (const OptimizerRecord& record : optimizers) record.for_each_leaf(once);
    for (const at::Tensor& parameter : free_parameters) once(parameter);
  }

  OptimizerRecord& of(const torch::optim::Optimizer& optimizer, const char* caller);
  const Model& of(const void* identity, const char* caller) const;
  // The index of the model that a module is, or is part of.
  std::size_t model_with(const void* identity, const char* caller);
  // Error if a model is no longer on the device where initialize found it.
  void require_on_device(std::size_t model) const;
  LossScaler& scaler(std::int64_t loss_id, const char* caller);

  // The records of optimizers, each once.
  std::vector<OptimizerRecord*> records_of(const OptimizerRefs& refs, const char* caller);
  // The other optimizers that share parameters with these.
  std::vector<OptimizerRecord*> sharing_with(const std::vector<OptimizerRecord*>& named);

  // The functions of MixedPrecision with the same names.
  ScaledLoss scale_loss(const at::Tensor& loss, const OptimizerRefs& refs,
                        ScaleLossOptions options);
  StepResult step(torch::optim::Optimizer& optimizer);

  // Waits for the results of steps that a device decides, and does what the host does after a step:
  // counts it, updates the scales and logs. Before anything reads or changes these.
  void settle();

  // Unscales the gradients that a backward left in the model, for these optimizers and those that
  // share parameters with them. The result, with earlier gradients added, is where each optimizer
  // reads it, and is shown in the model.
  void unscale(const std::vector<OptimizerRecord*>& of,
               const std::vector<OptimizerRecord*>& sharing, std::int64_t loss_id, float inverse,
               const at::Tensor& inverse_on_device, bool named);

  // If an optimizer has dropped its gradients since, drops what losses of other optimizers recorded
  // for it.
  void drop_stale_results(OptimizerRecord& record);

  // Finds the optimizers that share parameters, again when groups have changed. Error for master
  // weights of a parameter that two optimizers have.
  void find_shared_parameters(const char* caller);
  void pass_on_masters();
  // Before each scaled loss, since a program may register further layers.
  void find_free_parameters();

  // Undoes Masters::show_gradients: the coming backward pass would add to these gradients.
  void hide_gradients();
  void show_gradients();
  // Masters::refresh_gradients() for a model (null: for all), before its forward pass. Not before one
  // without gradients, nor one that a backward pass computes again.
  void refresh_gradients(const Model* model, const char* caller);

  // Error if an optimizer has stepped without MixedPrecision::step, which would have skipped the
  // step at an overflow and updated the scale.
  void require_no_step_past(const char* caller);

  // Warnings for code that would silently train badly or not at all.
  void check_plain_loss(const at::Tensor& loss);
  void warn_of_gradients(OptimizerRecord& record);
  void warn_of_kept_gradients(OptimizerRecord& record) const;
  void count_unseen_backward(OptimizerRecord& record, const char* caller);
  void count_unused_backward(OptimizerRecord& record);
  // One line in the log, at verbosity 1 and on the first rank.
  void warn(const std::string& text) const;

  // Moves gradients that are in the model, and are not scaled, to the masters.
  static void take_unscaled_gradients(OptimizerRecord& record);

  // Error while an optimizer's gradients are scaled.
  static void require_unscaled(const OptimizerRecord& record, const char* caller);
  // Error if gradients whose clipping is left to step() were changed after it.
  static void require_unchanged_since_clipping(const OptimizerRecord& record, const char* caller);

  // What comes before the decision of a step: the masters have the model's weights and gradients.
  void prepare_step(OptimizerRecord& record);

  // Ends the step of an optimizer whose gradients are unscaled and checked: calls take() unless the
  // step is skipped, and updates the scales.
  Step end_step(OptimizerRecord& record, const std::function<void()>& take);

  // Adds to the results what is left in the gradients of a step that was skipped.
  void check_earlier_gradients(OptimizerRecord& record);
  // Whether the device of an optimizer can decide its step. The host does if it needs the names of
  // parameters, for which it has to look at the gradients.
  bool may_defer(const OptimizerRecord& record) const;
  // end_step(), but the device decides: take() starts the optimizer's work, which changes nothing
  // if found_inf is set.
  using TakeUnless = std::function<void(const at::Tensor& found_inf,
                                        const std::shared_ptr<detail::LateFlags>& flags)>;
  StepResult end_step_on_device(OptimizerRecord& record, const TakeUnless& take);

  // At a step: warns, once, of a model that the optimizer trains but that never ran through
  // forward, call or autocast.
  void warn_of_idle_models(const OptimizerRecord& record);

  // Lets other rooms find the masters of the models' weights, until withdraw_exact_weights().
  void announce_exact_weights();
  void withdraw_exact_weights();
  // Lists the models' tensors in 16 bits, and announces them: all of them, and later those of layers
  // that were added since.
  void list_low_tensors();

  // Masters::pull and sync of every optimizer, after take_loaded(). Error inside
  // fp32_weights().
  void pull(const char* caller);
  void sync(const char* caller);

  // torch::load gives a 16-bit tensor the memory of a wider one in the file, and keeps its dtype
  // (LibTorch 2.11: set_). Converts the values in that memory. Error if it could be a view of other
  // 16-bit memory.
  void take_loaded(const char* caller);
  // The masters among which a parameter's is, or null.
  Masters* masters_of(const at::Tensor& parameter);

 private:
  void require_own_dtypes(const char* caller) const;
  // Error if the program has cast a model since: to 16 bits, where nothing would keep what is below
  // them, or to what no product takes. 16-bit weights may be fp32 again.
  void require_dtypes_as_left(const char* caller) const;

  void convert_loaded(const std::vector<const LowTensor*>& loaded);
};

}  // namespace semitone::amp

#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <cstdint>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace semitone::amp {

/// fp32 copies of an optimizer's 16-bit parameters: the optimizer updates the copies, and the model
/// gets them rounded. Updates that are too small for 16 bits add up instead of getting lost.
///
/// From construction on the optimizer's param_groups hold the masters in place of the 16-bit
/// parameters; parameters in fp32 stay as they are (they are their own masters), frozen ones too.
/// State that the optimizer already has moves along.
///
///     model->to(torch::kBFloat16);                       // BatchNorm excepted: amp::initialize
///     does that torch::optim::AdamW optimizer(model->parameters(), 1e-3); amp::MasterWeights
///     masters(optimizer); … loss.backward(); if (!masters.take_gradients()) { optimizer.step();
///     masters.write_model(); }
///
/// amp::initialize does all of this at O2. Works with every torch::optim::Optimizer. The optimizer
/// must outlive this object.
class MasterWeights {
 public:
  /// Values to start from that are more exact than a parameter's own: the weights before they were
  /// cast.
  using ExactValues = std::unordered_map<const c10::TensorImpl*, at::Tensor>;

  explicit MasterWeights(torch::optim::Optimizer& optimizer, const ExactValues& exact = {});
  MasterWeights(const MasterWeights&) = delete;
  MasterWeights& operator=(const MasterWeights&) = delete;
  MasterWeights(MasterWeights&&) = default;
  MasterWeights& operator=(MasterWeights&&) = delete;

  /// How many parameters have a master.
  std::size_t size() const { return pairs_.size(); }

  /// Moves gradients from the model to the masters: master.grad = model.grad / scale, added to what
  /// master.grad holds; the model's gradients are dropped. fp32 parameters' gradients are divided
  /// in place. Returns whether an inf or NaN was found (one host read).
  /// @param inverse_scale  1/scale
  bool take_gradients(float inverse_scale = 1.0F);

  /// The same with the flag left on the device: found_inf gets one fp32 element a device, 1 where a
  /// result is not finite.
  void take_gradients(float inverse_scale, std::vector<at::Tensor>& found_inf);

  /// Calls visit(parameter, master) for every pair.
  template <typename Visit>
  void for_each(Visit&& visit) {
    for (Pair& pair : pairs_) visit(pair.parameter, pair.master);
  }

  /// Rounds every master into its parameter. After optimizer.step().
  void write_model();

  /// Repairs what happened behind its back, by version counters: parameters that were changed since
  /// (weights loaded, re-initialised, averaged) give their values to their masters; masters that
  /// were changed (optimizer.step() without write_model()) are rounded into their parameters;
  /// 16-bit parameters that were added to the optimizer get masters. If both sides changed, the
  /// parameter wins. Cheap when nothing happened.
  void sync();

  /// Drops the masters' gradients.
  void clear_gradients();

  /// Whether a tensor is one of the masters.
  bool is_master(const at::Tensor& tensor) const {
    return masters_.count(tensor.unsafeGetTensorImpl()) > 0;
  }

  /// The fp32 value of a parameter: its master, undefined if it has none.
  at::Tensor master_of(const at::Tensor& parameter) const;

  /// Sets a parameter and its master to an fp32 value.
  void set(const at::Tensor& parameter, const at::Tensor& value);

  /// Saves the masters in the optimizer's order, exactly. load() is a FileError, and changes
  /// nothing, if number or shapes differ.
  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive);

 private:
  struct Pair {
    at::Tensor parameter;
    at::Tensor master;
    // What the two looked like when they last agreed.
    std::uint32_t parameter_version;
    const void* parameter_data;
    std::uint32_t master_version;
    const void* master_data;
  };

  void adopt(const ExactValues& exact);
  static void agreed(Pair& pair);

  torch::optim::Optimizer* optimizer_;
  std::vector<Pair> pairs_;
  std::unordered_map<const c10::TensorImpl*, std::size_t> by_parameter_;
  std::unordered_set<const c10::TensorImpl*> masters_;
};

}  // namespace semitone::amp

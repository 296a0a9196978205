#pragma once

#include "src/kernels/multi_tensor_update.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <array>
#include <cstddef>
#include <span>

namespace semitone::kernels {

// Whether a rule has numbers that the device may compute.
template <typename Rule>
inline constexpr bool kHasComputedNumbers =
    requires(const Update& item, const Rule& rule) { ref::update(item, rule, ComputedNumbers()); };

// multi_tensor_update without the host: the rules, and whether the step is skipped, are read from
// the parameters' device when its work runs. The device may also compute numbers of the rules, from
// norms. Nothing is read back.
//
//     UpdateOnDevice update(device);
//     update.send(rules, inputs);                     // of the next step
//     update.set({.trust_ratio = …update.inputs()…});  // numbers that depend on norms
//     update.run(items, found_inf);
//
// All but the functions that send can be captured in a CUDA graph (require_capturable) and repeated with other
// rules. Without a capture, parameters that no kernel supports are updated by the references.
class UpdateOnDevice {
 public:
  explicit UpdateOnDevice(c10::Device device);

  // Sends the rules of the next step to the device, and numbers from which the device computes
  // others: the same number of inputs for each rule. The first call allocates memory there. Later
  // calls need as many rules of the same kind, and as many inputs.
  void send(const Rules& rules, std::span<const double> inputs = {});

  // Sends the rules of the next step for either result of something that only the device knows yet:
  // choose() takes the second ones if that is not 0 (one fp32 element), and the first ones
  // otherwise. Half of the inputs belong to each. For kernels: the references take the first ones.
  void send_either(const std::array<Rules, 2>& rules, std::span<const double> inputs = {});
  void choose(const at::Tensor& second) const;

  // The inputs that were sent: (rules, inputs of each), in fp64, on the device.
  const at::Tensor& inputs() const { return inputs_; }

  // Replaces numbers of the rules, until the next send(): those that are defined, (rules) each.
  void set(const ComputedNumbers& numbers);

  // The first pass of LAMB, unless found_inf is set: see run(). Returns the norms of each parameter
  // and its update: (items, 2), in fp64, on the device.
  at::Tensor lamb_moments(std::span<const Update> items, const at::Tensor& found_inf) const;

  // Runs the step, or changes nothing if found_inf, of one fp32 element, is not 0 (it may be
  // undefined). All parameters are on the device.
  void run(std::span<const Update> items, const at::Tensor& found_inf) const;

  // Error unless a CUDA graph can repeat a step of these parameters: the references would repeat
  // it with the rules of the capture. Parameters are in 16 bits or fp32, without gaps.
  void require_capturable(std::span<const Update> items) const;

 private:
  void allocate(std::size_t rules, std::size_t numbers_of_each, std::size_t inputs);
  void prepare(const Rules& rules, std::size_t inputs);
  void upload(std::span<const Rules> sets, std::span<const double> inputs, const at::Tensor& into);
  template <typename Rule>
  void run_rules(std::span<const Update> items, const std::vector<Rule>& rules,
                 const at::Tensor& found_inf) const;
  void check(const at::Tensor& found_inf) const;

  c10::Device device_;
  Rules rules_;        // as they were sent
  at::Tensor sent_;    // (rules, numbers of each) and the inputs behind them, in fp64
  at::Tensor either_;  // two of these; undefined unless send_either() was called
  at::Tensor table_;
  at::Tensor inputs_;
  ComputedNumbers computed_;  // since
};

}  // namespace semitone::kernels

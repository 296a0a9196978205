#pragma once

// Internal interface: other rooms include this header.

#include "semitone/optim/fused_optimizer.h"
#include "src/kernels/read_later.h"
#include "src/kernels/update_on_device.h"
#include "src/optim/deferred_step.h"
#include "src/optim/fused_state.h"
#include "src/optim/work.h"

#include <ATen/core/Tensor.h>

#include <array>
#include <cstddef>
#include <memory>
#include <span>
#include <vector>

namespace semitone::optim {

// A step of an optimizer that can be repeated without the host: learning rates, step counts and
// found_inf are read from the device's memory when the kernels run. It can therefore be captured in
// a CUDA graph.
//
//     CapturableStep step(optimizer, parameters);
//     step.send_rules();        // of the next step, by the options and step counts as they are now
//     step.run(copies, found_inf);
//     if (…found_inf is 0…) step.count();
//
// The host need not know found_inf before the next step. It may call count_unless(result) instead,
// and until the result is read, send_rules() sends rules for either one. run() keeps found_inf on
// the device, and chooses there.
class CapturableStep {
 public:
  // For these parameters of the optimizer, all on one device: those that will have gradients.
  // Creates the state that they lack; the optimizer gets it with the first counted step. Error if
  // the optimizer has bf16 state, which is rounded with other random bits in each step.
  CapturableStep(FusedOptimizer& optimizer, std::span<const at::Tensor> parameters);
  CapturableStep(const CapturableStep&) = delete;  // what was captured has pointers to its memory
  CapturableStep& operator=(const CapturableStep&) = delete;

  void send_rules();

  // FusedOptimizer::step, unless found_inf (may be undefined) is not 0. Nothing is read back, and
  // the step is not counted. Error unless the same parameters have gradients.
  void run(const ModelCopies* copies, const at::Tensor& found_inf);

  // Counts a step that was run and has changed the parameters.
  void count();

  // Counts a step that was run, unless result says that found_inf was set. The optimizer assumes
  // that the step was taken, until one of its functions needs the result and waits for it. So does
  // the next call of count_unless(), for this one's result.
  void count_unless(std::shared_ptr<kernels::ReadLater> result);

  // Whether the optimizer still has the same parameters and state, in the same memory, and needs no
  // other state. Does not wait for the result of count_unless().
  bool is_current();

 private:
  struct Group {
    std::vector<const c10::TensorImpl*> parameters;
    bool splits_masters = false;
    bool keeps_bf16_state = false;
    bool operator==(const Group&) const = default;
  };
  std::vector<Group> groups_now() const;
  struct Record {
    const void* data;        // of the parameter
    FusedState state;        // that the step works on
    FusedState theirs;       // what the optimizer has: nothing, until a step was counted
    FusedState before = {};  // what it had before a step whose result may be unknown
    std::array<bool, 3> fresh_before = {};
  };
  void add(const at::Tensor& parameter, std::size_t group);
  bool result_is_open();
  FusedState state_now(const at::Tensor& parameter) const;
  FusedOptimizer::Rules rules_if_taken();
  FusedOptimizer::Rules rules_if_skipped();

  FusedOptimizer* optimizer_;
  std::vector<Group> groups_;  // as they were
  std::vector<FusedOptimizer::Work> work_;
  std::vector<Record> records_;  // of each in work_
  kernels::UpdateOnDevice update_;
  at::Tensor found_inf_;  // of the last step
  // That the optimizer has, or had, of the step whose result may be unknown.
  std::shared_ptr<const FusedOptimizer::Deferred> deferred_;
};

}  // namespace semitone::optim

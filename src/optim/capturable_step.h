#pragma once

// Internal interface: other rooms include this header.

#include "semitone/optim/fused_optimizer.h"
#include "src/kernels/update_on_device.h"
#include "src/optim/fused_state.h"
#include "src/optim/work.h"

#include <ATen/core/Tensor.h>

#include <cstddef>
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

  // Whether the optimizer still has the same parameters and state, in the same memory, and needs no
  // other state.
  bool is_current() const;

 private:
  struct Group {
    std::vector<const c10::TensorImpl*> parameters;
    bool splits_masters = false;
    bool keeps_bf16_state = false;
    bool operator==(const Group&) const = default;
  };
  std::vector<Group> groups_now() const;
  struct Record {
    const void* data;   // of the parameter
    FusedState state;   // that the step works on
    FusedState theirs;  // what the optimizer has: nothing, until a step was counted
  };
  void add(const at::Tensor& parameter, std::size_t group);

  FusedOptimizer* optimizer_;
  std::vector<Group> groups_;  // as they were
  std::vector<FusedOptimizer::Work> work_;
  std::vector<Record> records_;  // of each in work_
  kernels::UpdateOnDevice update_;
};

}  // namespace semitone::optim

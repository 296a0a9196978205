#pragma once

#include "semitone/amp/divergence_guard.h"
#include "semitone/amp/mixed_precision.h"
#include "src/train/observer.h"
#include "src/train/train_options.h"

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <vector>

namespace semitone::train {

// Watches the losses of a training for spikes, and does what TrainOptions::on_spike says, on all
// processes alike. Does nothing if TrainOptions::divergence_guard has no limit. For a rollback it
// throws DivergedError, and the caller rolls back.
class LossWatch {
 public:
  // The options, the model and the MixedPrecision must outlive it. Error for a guard's options out
  // of range.
  // @param computes_in_fp8  whether mixed has scales of fp8
  LossWatch(const TrainOptions& options, const torch::nn::Module& model, amp::MixedPrecision& mixed,
            bool computes_in_fp8);
  LossWatch(const LossWatch&) = delete;
  LossWatch& operator=(const LossWatch&) = delete;

  // For checkpoints.
  amp::DivergenceGuard& guard() { return guard_; }

  void before_forward();

  // Called between the forward and the backward pass. Returns whether all processes leave out this
  // batch; the model is then as before_forward() found it. DivergedError on all processes.
  // @param step  the number of the step in the training, from 1
  bool leaves_out(const at::Tensor& loss, std::int64_t step, Observer& observer);

  // Called after the optimizer's step, unless the batch was left out. DivergedError on all
  // processes.
  void after_step(const at::Tensor& loss, amp::Step outcome, std::int64_t step, Observer& observer);

  // Whether a checkpoint has to wait, since losses are spikes and the training rolls back to
  // checkpoints. The same on all processes.
  bool delays_checkpoints() const;

  // Returns the spikes since the start of this process, without those of a run that it resumed.
  std::int64_t spikes() const { return spikes_; }

 private:
  bool is_on() const;
  void report_spike(std::int64_t step, Observer& observer);

  const TrainOptions& options_;
  amp::MixedPrecision& mixed_;
  bool computes_in_fp8_;
  amp::DivergenceGuard guard_;
  std::int64_t spikes_ = 0;
  // Running statistics, which forward updates, and their values before it. Empty unless batches are
  // skipped.
  std::vector<at::Tensor> buffers_;
  std::vector<at::Tensor> earlier_;
};

}  // namespace semitone::train

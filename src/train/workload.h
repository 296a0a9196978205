#pragma once

#include "semitone/amp/opt_level.h"
#include "semitone/autocast/cast_policy.h"
#include "semitone/zoo/decoder.h"
#include "semitone/zoo/encoder.h"
#include "src/train/memory_format.h"

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>
#include <torch/arg.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

// Trainings on synthetic data for measuring speed and memory, as `semitone bench` does.
namespace semitone::train {

struct WorkloadChoice;

// Options of a workload. The defaults are those of its row in workloads().
class WorkloadOptions {
 public:
  // Error for a name that no workload has.
  explicit WorkloadOptions(std::string_view name);
  explicit WorkloadOptions(const WorkloadChoice& workload);

  const WorkloadChoice& workload() const { return *workload_; }

  TORCH_ARG(amp::OptLevel, opt_level) = amp::OptLevel::O1;
  // The 16-bit dtype, fp16 or bf16. Default: default_16bit_dtype of the device.
  TORCH_ARG(std::optional<c10::ScalarType>, dtype);
  TORCH_ARG(c10::Device, device) = c10::DeviceType::CPU;
  // Cast policy, see amp::Options::policy.
  TORCH_ARG(std::optional<amp::CastPolicy>, policy);
  // Memory format of images and convolutions; automatic: choose_memory_format.
  TORCH_ARG(MemoryFormat, memory_format) = MemoryFormat::automatic;
  // True: optim::FusedSGD and optim::FusedAdam. False: LibTorch's own SGD and AdamW.
  TORCH_ARG(bool, fused_optimizer) = true;
  // Whether a fused optimizer splits the masters of bf16 weights (O2; docs/optimizers.md).
  TORCH_ARG(bool, split_masters) = false;
  // Whether a fused optimizer keeps its state in bf16, rounded stochastically.
  TORCH_ARG(bool, bf16_state) = false;

  // Images or sequences per step.
  TORCH_ARG(std::int64_t, batch_size);
  // Height and width of resnet50's images, at least 32.
  TORCH_ARG(std::int64_t, image_size) = 224;
  // Whether resnet50's blocks, or the layers of encoder and decoder, are checkpointed
  // (nn::checkpoint).
  TORCH_ARG(bool, checkpoint_activations) = false;
  // Tokens per sequence of encoder and decoder.
  TORCH_ARG(std::int64_t, length);
  TORCH_ARG(zoo::EncoderOptions, encoder);
  TORCH_ARG(zoo::DecoderOptions, decoder);

  // Random seed of weights, data and dropout.
  TORCH_ARG(std::uint64_t, seed) = 0;
  // Number of losses to compare with those of fp32, at least 2.
  TORCH_ARG(std::int64_t, check_steps) = 4;
  // Number of steps before the measurement, at least 1.
  TORCH_ARG(std::int64_t, warm_up) = 2;

 private:
  const WorkloadChoice* workload_;
};

// The result of the check of a workload's losses: see Workload.
struct WorkloadCheck {
  std::vector<double> losses;
  std::vector<double> fp32_losses;  // the reference losses; one for each that is compared
  double tolerance = 0;             // of losses[i] - fp32_losses[i], over fp32_losses[0]

  // The largest difference, relative to fp32_losses[0].
  double difference() const;
};

// Bytes of tensors on the device, measured in the warm-up steps.
struct TensorMemory {
  std::int64_t parameters = 0;  // of the model, buffers included
  std::int64_t masters = 0;     // fp32 copies of 16-bit parameters, or their lower halves
  std::int64_t gradients = 0;   // between backward and the optimizer's step
  std::int64_t optimizer_state = 0;
  // The largest sum at any time. The batch is not included.
  std::int64_t peak = 0;
  // The peak minus the other numbers: activations, casts, workspace. If the peak comes before the
  // last gradient exists, the result is too small. It is never negative: in the optimizer's step
  // parameters, masters, gradients and state exist at the same time, so the peak is at least their
  // sum.
  std::int64_t rest() const { return peak - parameters - masters - gradients - optimizer_state; }
};

// A training that runs step by step, as a user's loop does: amp::initialize, and then zero_grad,
// forward, loss, backward, step, and reading the loss, always on the same batch.
//
//     Workload workload(WorkloadOptions("resnet50").opt_level(amp::OptLevel::O2));
//     const double seconds = workload.run(10);
class Workload {
 public:
  // Checks the losses, sets up the training to be measured, and warms up.
  //
  // The check runs without dropout. The first check_steps losses must match those of the same
  // training at O0 with LibTorch's optimizer and memory format, within the tolerance, and the last
  // must be below the first. At O3, where small updates get lost, only the first loss is compared.
  // Steps that a dynamic loss scale skips do not count.
  //
  // The tolerance is relative to the first loss: 1e-4 in fp32, and half a 16-bit dtype's epsilon
  // (4.9e-4 in fp16, 3.9e-3 in bf16). Very small batches, whose BatchNorm depends on rounding, do
  // not pass in 16 bits: resnet50 needs 8 images of 64 x 64.
  //
  // Seeds LibTorch's default generator. Error for options out of range, or if the check fails.
  // DivergedError if a step that was not skipped has a non-finite loss.
  explicit Workload(const WorkloadOptions& options);
  ~Workload();
  Workload(Workload&&) noexcept;
  Workload& operator=(Workload&&) noexcept;

  // Runs at least one step, and returns the duration in seconds. DivergedError as above.
  double run(std::int64_t steps);

  // The loss of every step of run(), before the step.
  const std::vector<double>& losses() const;
  // Number of steps that run() skipped.
  std::int64_t skipped_steps() const;

  const WorkloadOptions& options() const;
  // The dtype to which the opt level lowers operators (O1) or weights (O2, O3); fp32 at O0.
  c10::ScalarType dtype() const;
  // The chosen memory format.
  MemoryFormat memory_format() const;
  // Images, or tokens, per step.
  std::int64_t items() const;
  const WorkloadCheck& check() const;
  const TensorMemory& memory() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace semitone::train

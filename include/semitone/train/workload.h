#pragma once

#include "semitone/amp/cast_policy.h"
#include "semitone/amp/opt_level.h"
#include "semitone/train/trainer.h"
#include "semitone/zoo/encoder.h"

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>
#include <torch/arg.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

/// Trainings on made-up data, to measure speed and memory with: what `semitone bench` does.
namespace semitone::train {

/// | workload | model           | a step                | optimizer                |
/// |----------|-----------------|-----------------------|--------------------------|
/// | mnist    | zoo::ConvNet    | 100 images of 28 x 28 | SGD, momentum 0.9        |
/// | resnet50 | zoo::ResNet50   | 16 images of 224²     | SGD, momentum 0.9        |
/// | encoder  | zoo::Encoder    | 8 x 128 tokens        | AdamW, weight decay 0.01 |
///
/// Images are normal noise with random labels; ResNet-50 has a residual_gain of 0.2. Of the encoder's tokens 15 % are masked (token 0);
/// the loss is that of all tokens.
enum class WorkloadKind { mnist, resnet50, encoder };

std::string_view name_of(WorkloadKind kind);
/// "mnist", "resnet50" or "encoder". Error for anything else.
WorkloadKind parse_workload(std::string_view name);

/// What to measure. The defaults are the table's.
class WorkloadOptions {
 public:
  WorkloadOptions(WorkloadKind kind);  // NOLINT(google-explicit-constructor)

  WorkloadKind kind() const { return kind_; }

  TORCH_ARG(amp::OptLevel, opt_level) = amp::OptLevel::O1;
  /// fp16 or bf16; default: default_16bit_dtype of the device.
  TORCH_ARG(std::optional<c10::ScalarType>, dtype);
  TORCH_ARG(c10::DeviceType, device) = c10::DeviceType::CPU;
  /// As amp::Options::policy.
  TORCH_ARG(std::optional<amp::CastPolicy>, policy);
  /// Of images and convolutions; automatic: choose_memory_format.
  TORCH_ARG(MemoryFormat, memory_format) = MemoryFormat::automatic;
  /// optim::FusedSGD and optim::FusedAdam; false: LibTorch's own SGD and AdamW.
  TORCH_ARG(bool, fused_optimizer) = true;
  /// Whether a fused optimizer splits the masters of bf16 weights (O2; docs/optimizers.md).
  TORCH_ARG(bool, split_masters) = false;
  /// Whether a fused optimizer keeps its state in bf16, rounded stochastically.
  TORCH_ARG(bool, bf16_state) = false;

  /// Images or sequences of a step.
  TORCH_ARG(std::int64_t, batch_size);
  /// Height and width of resnet50's images, from 32 on.
  TORCH_ARG(std::int64_t, image_size) = 224;
  /// Tokens of a sequence of the encoder.
  TORCH_ARG(std::int64_t, length) = 128;
  TORCH_ARG(zoo::EncoderOptions, encoder);

  /// Of weights, data and dropout.
  TORCH_ARG(std::uint64_t, seed) = 0;
  /// How many losses are compared with those of fp32, at least 2.
  TORCH_ARG(std::int64_t, check_steps) = 4;
  /// Steps before the first that counts, at least 1.
  TORCH_ARG(std::int64_t, warm_up) = 2;

 private:
  WorkloadKind kind_;
};

/// How a workload has proved itself right: see Workload.
struct WorkloadCheck {
  std::vector<double> losses;
  std::vector<double> fp32_losses;  ///< as many of them as are compared
  double tolerance = 0;             ///< of losses[i] - fp32_losses[i], over fp32_losses[0]

  /// The largest difference, over fp32_losses[0].
  double difference() const;
};

/// Bytes of tensors on the device: what they were in the warm-up steps.
struct TensorMemory {
  std::int64_t parameters = 0;  ///< of the model, buffers included
  std::int64_t masters = 0;     ///< fp32 copies of 16-bit parameters, or their lower halves
  std::int64_t gradients = 0;   ///< between backward and the optimizer's step
  std::int64_t optimizer_state = 0;
  /// The most that there was at a time. The batch is not in it.
  std::int64_t peak = 0;
  /// Peak less the others: activations, casts, workspace. (Less than they ever take, where the peak
  /// comes before the last gradient; never negative, as the others meet in the optimizer's step.)
  std::int64_t rest() const { return peak - parameters - masters - gradients - optimizer_state; }
};

/// A training that runs step by step, as a user's loop would: amp::initialize, and then zero_grad,
/// forward, loss, backward, step, and the loss as a number, of the same batch again and again.
///
///     Workload workload(WorkloadOptions(WorkloadKind::resnet50).opt_level(amp::OptLevel::O2));
///     const double seconds = workload.run(10);
class Workload {
 public:
  /// Proves itself right, then sets up what is to be measured, and warms up.
  ///
  /// The proof: without dropout, the first check_steps losses have to be those of the same training
  /// at O0 with LibTorch's optimizer and layout, within the tolerance, and the last has to be below
  /// the first. At O3, where updates get lost, only the first loss is compared. Steps that a dynamic
  /// loss scale skips do not count.
  ///
  /// The tolerance is relative to the first loss: 1e-4 in fp32, and half a 16-bit dtype's epsilon
  /// (4.9e-4 in fp16, 3.9e-3 in bf16). Very small batches, whose BatchNorm depends on rounding, do
  /// not pass in 16 bits: resnet50 needs 8 images of 64 x 64.
  ///
  /// Seeds LibTorch's default generator. Error for options out of range, or if the proof fails;
  /// DivergedError for a loss that is not finite in a step that was not skipped.
  explicit Workload(const WorkloadOptions& options);
  ~Workload();
  Workload(Workload&&) noexcept;
  Workload& operator=(Workload&&) noexcept;

  /// Runs steps, at least one, and returns the seconds that they took. DivergedError as above.
  double run(std::int64_t steps);

  /// The loss of every step that run() ran, before the step.
  const std::vector<double>& losses() const;
  /// Of run().
  std::int64_t skipped_steps() const;

  const WorkloadOptions& options() const;
  /// Of weights or operators: fp32 at O0.
  c10::ScalarType dtype() const;
  /// As chosen.
  MemoryFormat memory_format() const;
  /// Images, or tokens, of a step.
  std::int64_t items() const;
  const WorkloadCheck& check() const;
  const TensorMemory& memory() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace semitone::train

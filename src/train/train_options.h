#pragma once

#include "semitone/amp/divergence_guard.h"
#include "semitone/amp/opt_level.h"
#include "semitone/autocast/cast_policy.h"
#include "semitone/comm/group.h"
#include "semitone/core/dtype.h"
#include "semitone/parallel/distributed_data_parallel_options.h"
#include "src/core/dtype_limits.h"
#include "src/core/named_rows.h"
#include "src/train/memory_format.h"
#include "src/train/on_spike.h"
#include "src/train/optimizers.h"
#include "src/train/save_interval.h"
#include "src/train/schedule.h"

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <torch/arg.h>

#include <cmath>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>

namespace semitone::train {

// Options of a training run. Setters return the object:
//
//     TrainOptions().opt_level(amp::OptLevel::O2).dtype(torch::kHalf).epochs(2)
//
// With the defaults the ConvNet exceeds 98.5 % on MNIST at every level in one epoch.
class TrainOptions {
  TORCH_ARG(amp::OptLevel, opt_level) = amp::OptLevel::O1;
  // The 16-bit dtype, fp16 or bf16. Default: default_16bit_dtype of the device.
  TORCH_ARG(std::optional<c10::ScalarType>, dtype);
  // A group of several processes on this kind of device chooses each process's own.
  TORCH_ARG(c10::Device, device) = c10::DeviceType::CPU;
  // Cast policy of O1; at O2 and O3, which parameters stay in fp32, which products are in fp8, and
  // which operators run in Semitone's kernels. Not used at O0. Default: CastPolicy::semitone.
  TORCH_ARG(std::optional<amp::CastPolicy>, policy);
  // Compute as CastPolicy::fp8 says, added to the policy. Options of fp8 in the policy stay. Not used
  // at O0.
  TORCH_ARG(bool, fp8) = false;
  // Loss scale. Default: the level's, see amp::OptLevel.
  TORCH_ARG(std::optional<amp::detail::LossScale>, loss_scale);

  TORCH_ARG(std::int64_t, epochs) = 1;
  // Images, or sequences of a text, per step and process. The last batch of an epoch may be smaller.
  TORCH_ARG(std::int64_t, batch_size) = 100;
  // The name of one of optimizers(), which has its own defaults for everything that is not set
  // here. With fp16 weights and no masters (O3), eps is 2^-14: fp16 rounds Adam's 1e-8 to 0, which
  // gives 0/0 where a gradient is 0.
  TORCH_ARG(std::string, optimizer) = "sgd";
  TORCH_ARG(double, lr) = 0.05;
  // Momentum of an optimizer that has one (OptimizerChoice::has_momentum).
  TORCH_ARG(double, momentum) = 0.9;
  TORCH_ARG(Schedule, schedule) = Schedule::cosine;
  // Random seed of the initial weights, of each epoch's order and of the augmentation, which do not
  // depend on the opt level.
  TORCH_ARG(std::int64_t, seed) = 0;
  // Move training images by up to 4 pixels and mirror half of them, differently in each epoch
  // (zoo::augment). Not for digits and letters, which have no mirror images.
  TORCH_ARG(bool, augment) = false;
  TORCH_ARG(MemoryFormat, memory_format) = MemoryFormat::automatic;

  // Number of good steps after which a dynamic loss scale doubles. LibTorch's default of 2000
  // exceeds the number of steps of most runs of this size.
  TORCH_ARG(std::int64_t, growth_interval) = 100;

  // Largest number of batches per epoch; 0: all.
  TORCH_ARG(std::int64_t, limit_batches) = 0;
  // Stop after this number of steps, including steps before a resume, without changing the
  // schedule; 0: train to the end.
  TORCH_ARG(std::int64_t, max_steps) = 0;
  // Stop with a DivergedError after this number of consecutive skipped steps; 0: never. A scale of
  // 2^16 needs 40 skips to fall to its lower bound.
  TORCH_ARG(std::int64_t, max_consecutive_skips) = 100;

  // Which losses are spikes, and how many in a row are a divergence. Without max_loss_ratio and
  // max_z_score none is. The training replaces max_consecutive_skips (by its own, above), agree (by
  // the mean over the group) and rollback (by on_spike).
  TORCH_ARG(amp::DivergenceGuardOptions, divergence_guard);
  // What to do about a spike. Needs one of the two limits; OnSpike::lower_scale also a dynamic loss
  // scale, and OnSpike::rollback a checkpoint_dir and save_every. The training then rolls back at
  // most divergence_guard().max_rollbacks() times, and does not save while losses are spikes,
  // except at its end, or if it is stopped and there is no checkpoint yet.
  TORCH_ARG(OnSpike, on_spike) = OnSpike::none;

  // Look for the operator that makes the first inf or NaN of a step (report::NonFiniteCheck). If the
  // step is taken, the training ends with a DivergedError that names it. If it is skipped, as a
  // dynamic loss scale does now and then, the observer is told. Slower; no result changes.
  TORCH_ARG(bool, check_nonfinite) = false;

  // The processes that train together, each with its share of the data. Their options must be
  // equal (require_same_run compares them). Default: this process only.
  TORCH_ARG(comm::Group, group);
  // Use the statistics of all processes' batches together in BatchNorm layers.
  TORCH_ARG(bool, sync_batch_norm) = false;
  // Options for averaging gradients.
  TORCH_ARG(parallel::DistributedDataParallelOptions, ddp);

  // Directory for a checkpoint at the end; empty: none. See train_classifier.
  TORCH_ARG(std::filesystem::path, checkpoint_dir);
  // When to save checkpoints on the way too. With several processes, process 0's clock counts.
  TORCH_ARG(SaveInterval, save_every);
  // Number of checkpoints that stay in checkpoint_dir, the newest ones; 0: all.
  TORCH_ARG(std::int64_t, keep) = 3;
  // Resume from the newest undamaged checkpoint of checkpoint_dir, or start a new run if it has no
  // checkpoints; FileError if all are damaged. The first start and every later one can therefore
  // have the same options.
  TORCH_ARG(bool, resume_auto) = false;
  // Directory to resume from: one of checkpoints, whose newest is taken, or that of one step. Empty:
  // start anew. Not with resume_auto.
  TORCH_ARG(std::filesystem::path, resume_from);
  // Called between steps. Returns 0, or the number of a signal that has arrived: training stops
  // there, a checkpoint is saved (but see on_spike), and nothing is tested. With several
  // processes, one of them stops all, after 0.1 s or a step, whichever takes longer
  // (StepDecisions). Either all processes set it, or no process does. Default: none.
  TORCH_ARG(std::function<int()>, stop_signal);
  // File for the fp32 weights after the training and its test: NAME.safetensors, or NAME.pt, .pth or
  // .bin for Python's torch.load. Empty: none.
  TORCH_ARG(std::filesystem::path, save_weights);
};

// Returns the dtype of the weights or operators in training: fp32 at O0, else the options' 16-bit
// dtype.
c10::ScalarType training_dtype(const TrainOptions& options);

// Returns whether losses can be spikes.
inline bool has_spike_limit(const TrainOptions& options) {
  const amp::DivergenceGuardOptions& guard = options.divergence_guard();
  return guard.max_loss_ratio() > 0 || guard.max_z_score() > 0;
}

// Returns whether the loss scale is dynamic: as set, or by default at the level.
bool has_dynamic_scale(const TrainOptions& options);

// The largest number that a flag for a count takes.
inline constexpr std::int64_t kLargestCount = 1'000'000'000;

// The flags of `semitone train` that set these options, in the order of its help. A new flag is an
// option above, a line here, its effect in trainer.cpp, and a test.
//
// @param add  cli::Flags, which makes a flag of each line
template <typename Flags>
void add_training_flags(Flags& add, TrainOptions& options) {
  add.choice(
      "--dtype", "auto", {"auto", "bf16", "fp16"},
      [&](const std::string& name) {
        options.dtype(name == "auto" ? std::nullopt : std::optional(parse_dtype(name)));
      },
      "16-bit dtype; auto: bf16 on a CPU, else fp16");
  add.integer("--epochs", options.epochs(), 1, 1'000'000, "Number of epochs");
  add.integer("--batch-size", options.batch_size(), 1, 1'000'000,
              "Images, or sequences of a text, per step and process");
  add.choice("--optimizer", options.optimizer(), names_of(optimizers()),
             "Optimizer; fused: Semitone's, a step in one pass; others: LibTorch's");
  add.number(
      "--lr", options.lr(),
      [](double value) { return value > 0 && value <= dtype_limits(at::kFloat).max; },
      "above 0 that float32 holds", "Learning rate, the maximum of the schedule");
  add.number(
      "--momentum", options.momentum(), [](double value) { return value >= 0 && value < 1; },
      "from 0 to below 1", "Momentum of sgd and fused-sgd");
  add.choice(
      "--schedule", std::string(name_of(options.schedule())), {"constant", "cosine"},
      [&](const std::string& name) { options.schedule(parse_schedule(name)); },
      "Learning rate schedule; cosine: up over a quarter of the steps, then down to 0");
  add.number_or_word(
      "--loss-scale", {"auto", "dynamic"},
      [&](const std::string& text) {
        options.loss_scale(text == "auto" ? std::nullopt
                                          : std::optional(amp::detail::LossScale(text)));
      },
      "Loss scale, dynamic or a number; auto: dynamic for fp16 at O1 and O2, else 1");
  add.integer("--growth-interval", options.growth_interval(), 0, kLargestCount,
              "Number of good steps after which a dynamic loss scale doubles; 0: never");
  add.integer("--seed", options.seed(), 0, kLargestCount,
              "Random seed of the initial weights, the order of the data, and --augment");
  add.mark("--augment", options.augment(),
           "Move training images by up to 4 pixels and mirror half of them, at random");
  add.choice(
      "--memory-format", "auto", {"auto", "nchw", "nhwc"},
      [&](const std::string& name) { options.memory_format(parse_memory_format(name)); },
      "Memory format of images; auto: nhwc, which is fastest at every level");
  add.integer("--limit-batches", options.limit_batches(), 0, kLargestCount,
              "Largest number of batches per epoch; 0: all");
  add.integer("--max-steps", options.max_steps(), 0, kLargestCount,
              "Stop after this step, counted from the start of the training; 0: train to the end");
  add.mark("--check-nonfinite", options.check_nonfinite(),
           "Name the operator that makes the first inf or NaN, and stop there; slower");
}

// The flags for spikes of the loss.
template <typename Flags>
void add_spike_flags(Flags& add, TrainOptions& options) {
  amp::DivergenceGuardOptions& guard = options.divergence_guard();
  const std::string in_a_row = std::to_string(guard.max_consecutive_spikes()) + " in a row";
  add.number(
      "--max-loss-ratio", guard.max_loss_ratio(),
      [](double value) { return value == 0 || (value > 1 && std::isfinite(value)); },
      "of 0 (no limit) or above 1",
      "A loss above this many times its running mean is a spike, from step " +
          std::to_string(guard.warmup_steps() + 1) + " on; " + in_a_row +
          " end the training; 0: no limit");
  add.choice(
      "--on-spike", std::string(name_of(options.on_spike())),
      {"none", "skip", "lower-scale", "rollback"},
      [&](const std::string& name) { options.on_spike(parse_on_spike(name)); },
      "skip: leave out the batch; lower-scale: lower the loss scale; rollback: after " + in_a_row +
          ", load the newest checkpoint and go on with the next batch, at most " +
          std::to_string(guard.max_rollbacks()) + " times");
}

// The flags for processes that train together.
template <typename Flags>
void add_group_flags(Flags& add, TrainOptions& options) {
  add.mark("--sync-bn", options.sync_batch_norm(),
           "Compute BatchNorm's statistics over the batches of all processes");
  add.choice(
      "--compress", "none", {"none", "bf16", "fp16"},
      [&](const std::string& name) {
        if (name != "none") options.ddp().compress(parse_dtype(name));
      },
      "Dtype in which fp32 gradients are sent between processes");
}

// The flags for checkpoints and weights.
template <typename Flags>
void add_checkpoint_flags(Flags& add, TrainOptions& options) {
  add.text(
      "--checkpoint-dir", "DIR", [&](const std::string& path) { options.checkpoint_dir(path); },
      "Directory of checkpoints, one directory for each saved step: the last one, those of "
      "--save-every, and the one at which SIGTERM or SIGUSR1 ends the training");
  add.parsed(
      "--save-every", "N[steps|min|s]", "0",
      [&](const std::string& text) {
        const auto interval = parse_save_interval(text);
        if (interval.has_value()) options.save_every(*interval);
        return interval.has_value();
      },
      "to be a number of steps, or 5min or 90s",
      "Also save a checkpoint every N steps, minutes or seconds; 0: never");
  add.integer("--keep", options.keep(), 0, kLargestCount,
              "Number of checkpoints that stay, the newest ones; 0: all");
  add.text(
      "--resume", "auto|PATH",
      [&](const std::string& path) {
        options.resume_auto(path == "auto").resume_from(path == "auto" ? "" : path);
      },
      "Resume bit for bit. auto: from the newest undamaged checkpoint of --checkpoint-dir, or a "
      "new run if it has no checkpoints; PATH: a directory of checkpoints, or that of one step");
  add.text(
      "--save-weights", "FILE", [&](const std::string& path) { options.save_weights(path); },
      "Write the trained weights in fp32: NAME.safetensors, or NAME.pt, .pth or .bin for Python's "
      "torch.load");
}

}  // namespace semitone::train

#pragma once

#include "semitone/amp/opt_level.h"
#include "semitone/comm/group.h"
#include "semitone/parallel/distributed_data_parallel_options.h"
#include "src/train/memory_format.h"
#include "src/train/schedule.h"

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>
#include <torch/arg.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>

namespace semitone::train {

// Options of a training. Setters return the object:
//
//     TrainOptions().opt_level(amp::OptLevel::O2).dtype(torch::kHalf).epochs(2)
//
// With the defaults the ConvNet exceeds 98.5 % on MNIST at every level in one epoch.
class TrainOptions {
  TORCH_ARG(amp::OptLevel, opt_level) = amp::OptLevel::O1;
  // The 16-bit dtype, fp16 or bf16. Default: default_16bit_dtype of the device.
  TORCH_ARG(std::optional<c10::ScalarType>, dtype);
  TORCH_ARG(c10::DeviceType, device) = c10::DeviceType::CPU;
  // Loss scale. Default: the level's, see amp::OptLevel.
  TORCH_ARG(std::optional<amp::LossScale>, loss_scale);

  TORCH_ARG(std::int64_t, epochs) = 1;
  // Images per step and process. The last batch of an epoch may be smaller.
  TORCH_ARG(std::int64_t, batch_size) = 100;
  // The name of one of optimizers(), which has its own defaults for everything that is not set
  // here. With fp16 weights and no masters (O3), eps is 2^-14: fp16 rounds Adam's 1e-8 to 0, which
  // gives 0/0 where a gradient is 0.
  TORCH_ARG(std::string, optimizer) = "sgd";
  TORCH_ARG(double, lr) = 0.05;
  // Momentum of an optimizer that has one (OptimizerChoice::has_momentum).
  TORCH_ARG(double, momentum) = 0.9;
  TORCH_ARG(Schedule, schedule) = Schedule::cosine;
  // Random seed of the initial weights and of each epoch's order. It gives the same at every
  // level.
  TORCH_ARG(std::uint64_t, seed) = 0;
  TORCH_ARG(MemoryFormat, memory_format) = MemoryFormat::automatic;

  // Number of good steps after which a dynamic loss scale doubles. LibTorch's default of 2000
  // exceeds the length of most trainings of this size.
  TORCH_ARG(std::int64_t, growth_interval) = 100;

  // Largest number of batches per epoch; 0: all.
  TORCH_ARG(std::int64_t, limit_batches) = 0;
  // Stop after this number of steps, including those before a resume, without changing the
  // schedule; 0: train to the end.
  TORCH_ARG(std::int64_t, max_steps) = 0;
  // Stop with a DivergedError after this number of consecutive skipped steps; 0: never. A scale of
  // 2^16 needs 40 skips to fall to its lower bound.
  TORCH_ARG(std::int64_t, max_consecutive_skips) = 100;

  // The processes that train together, each with its share of the images. Their options must be
  // equal. Default: this process only.
  TORCH_ARG(comm::Group, group);
  // Use the statistics of all processes' batches together in BatchNorm layers.
  TORCH_ARG(bool, sync_batch_norm) = false;
  // Options for averaging gradients.
  TORCH_ARG(parallel::DistributedDataParallelOptions, ddp);

  // File for the state at the end; empty: none. See train_classifier.
  TORCH_ARG(std::filesystem::path, save);
  // Also save the state after each this many steps; 0: at the end only. A process that is killed
  // can resume from it.
  TORCH_ARG(std::int64_t, save_every) = 0;
  // Saved state to resume from; empty: start anew. If it is the same file as save, and does not
  // exist yet, training starts anew, so that the first start and every later one can have the same
  // options.
  TORCH_ARG(std::filesystem::path, resume);
  // Called after a step; true stops the training there, for example after a signal. The state is
  // then saved, and nothing is tested. With several processes it is called after every tenth step,
  // and true on one stops all. Either all processes set it or none. Default: none.
  TORCH_ARG(std::function<bool()>, stop);
};

// Returns the dtype of a training's weights or operators: fp32 at O0, else the options' 16-bit
// dtype.
c10::ScalarType training_dtype(const TrainOptions& options);

}  // namespace semitone::train

#pragma once

#include "semitone/amp/mixed_precision.h"
#include "semitone/amp/model.h"
#include "semitone/amp/opt_level.h"
#include "semitone/comm/group.h"
#include "semitone/parallel/ddp_options.h"
#include "semitone/train/schedule.h"
#include "semitone/zoo/mnist.h"

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>
#include <c10/core/MemoryFormat.h>
#include <c10/core/ScalarType.h>
#include <torch/arg.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string_view>

/// Training a classifier of images at an opt level: what `semitone train` does.
namespace semitone::train {

/// A model that maps images, (N, 1, height, width) from 0 to 1, to logits, (N, classes).
class Classifier {
 public:
  template <typename Module>
  Classifier(torch::nn::ModuleHolder<Module> model)  // NOLINT(google-explicit-constructor)
      : module_(model.ptr()),
        forward_([model](amp::MixedPrecision& mixed, const at::Tensor& images) mutable {
          return mixed.forward(model, images);
        }) {}

  const std::shared_ptr<torch::nn::Module>& module() const { return module_; }
  at::Tensor forward(amp::MixedPrecision& mixed, const at::Tensor& images) const {
    return forward_(mixed, images);
  }

 private:
  std::shared_ptr<torch::nn::Module> module_;
  std::function<at::Tensor(amp::MixedPrecision&, const at::Tensor&)> forward_;
};

/// Makes a model with fresh weights, drawn from LibTorch's default generator.
using ModelFactory = std::function<Classifier()>;

struct DataSet {
  zoo::ImageSet train;
  zoo::ImageSet test;
};

/// LibTorch's optimizers, with LibTorch's defaults for what TrainOptions does not set. With fp16
/// weights and no masters (O3), Adam's and AdamW's eps is 2^-14 in place of 1e-8, which fp16 rounds
/// to 0: 0/0 where a gradient is 0.
enum class OptimizerKind { sgd, adam, adamw };

std::string_view name_of(OptimizerKind kind);
/// "sgd", "adam" or "adamw". Error for anything else.
OptimizerKind parse_optimizer(std::string_view name);

/// How images and weights of convolutions lie in memory.
enum class MemoryFormat { automatic, nchw, nhwc };

std::string_view name_of(MemoryFormat format);
/// "auto", "nchw" or "nhwc". Error for anything else.
MemoryFormat parse_memory_format(std::string_view name);

/// What automatic means: nhwc on every device. The ConvNet's convolutions take it without
/// reordering, so a step at 16 bits is about a fifth shorter; in fp32 the two are even.
MemoryFormat choose_memory_format(c10::DeviceType device);

/// How to train. Setters return the object:
///
///     TrainOptions().opt_level(amp::OptLevel::O2).dtype(torch::kHalf).epochs(2)
///
/// The defaults bring the ConvNet on MNIST above 98.5 % at every level in one epoch.
class TrainOptions {
  TORCH_ARG(amp::OptLevel, opt_level) = amp::OptLevel::O1;
  /// fp16 or bf16; default: default_16bit_dtype of the device.
  TORCH_ARG(std::optional<c10::ScalarType>, dtype);
  TORCH_ARG(c10::DeviceType, device) = c10::DeviceType::CPU;
  /// Default: the level's, see amp::OptLevel.
  TORCH_ARG(std::optional<amp::LossScale>, loss_scale);

  TORCH_ARG(std::int64_t, epochs) = 1;
  /// Images a step, of each process; the last batch of an epoch has what is left.
  TORCH_ARG(std::int64_t, batch_size) = 100;
  TORCH_ARG(OptimizerKind, optimizer) = OptimizerKind::sgd;
  TORCH_ARG(double, lr) = 0.05;
  /// Of SGD.
  TORCH_ARG(double, momentum) = 0.9;
  TORCH_ARG(Schedule, schedule) = Schedule::cosine;
  /// Of the initial weights and of each epoch's order, which the level has no part in.
  TORCH_ARG(std::uint64_t, seed) = 0;
  TORCH_ARG(MemoryFormat, memory_format) = MemoryFormat::automatic;

  /// Good steps after which a dynamic loss scale doubles. LibTorch's 2000 would be more than most
  /// trainings of this size have.
  TORCH_ARG(std::int64_t, growth_interval) = 100;

  /// Batches an epoch at most; 0: all.
  TORCH_ARG(std::int64_t, limit_batches) = 0;
  /// Stop when so many steps are done, those before a resume included, and leave the schedule as it
  /// is; 0: at the end.
  TORCH_ARG(std::int64_t, max_steps) = 0;
  /// Stop with a DivergedError after so many skipped steps in a row; 0: never. A scale of 2^16
  /// needs 40 to fall to its floor.
  TORCH_ARG(std::int64_t, max_consecutive_skips) = 100;

  /// The processes that train together, each with its share of the images; default: this one alone.
  /// All give the same options.
  TORCH_ARG(comm::Group, group);
  /// BatchNorm layers take the statistics of all processes' batches together.
  TORCH_ARG(bool, sync_batch_norm) = false;
  /// How gradients are averaged.
  TORCH_ARG(parallel::DdpOptions, ddp);

  /// Write the state at the end to this file; empty: do not. See train_classifier.
  TORCH_ARG(std::filesystem::path, save);
  /// Write it after so many steps each time, too; 0: at the end only. What a process that is killed
  /// can go on from.
  TORCH_ARG(std::int64_t, save_every) = 0;
  /// Go on from a saved state; empty: start anew. The same file as save: start anew if it is not
  /// there yet, so that the first start and every later one have the same options.
  TORCH_ARG(std::filesystem::path, resume);
  /// Asked after a step whether to stop here: where a signal has said so, for one. Then the state is
  /// saved, and nothing is tested. Of several processes every tenth step is asked, and one that says
  /// yes stops all; either all have such a function or none. Default: none.
  TORCH_ARG(std::function<bool()>, stop);
};

/// What the weights or operators of a training are in: fp32 at O0, else the options' 16-bit dtype.
c10::ScalarType training_dtype(const TrainOptions& options);

/// A step is done.
struct StepDone {
  std::int64_t epoch;  ///< from 1
  std::int64_t epochs;
  std::int64_t batch;    ///< of the epoch, from 1
  std::int64_t batches;  ///< of an epoch
  std::int64_t step;     ///< of the training, from 1
  double loss;           ///< of this process's batch, before the step
  bool skipped;
  double loss_scale;         ///< after the step
  double images_per_second;  ///< so far, of all processes together
  double seconds_left;       ///< of the training, estimated
};

/// The last batch of an epoch is done.
struct EpochDone {
  std::int64_t epoch;
  std::int64_t epochs;
  double train_loss;  ///< mean, see TrainResult
  double loss_scale;
  std::int64_t skipped_steps;  ///< so far
  double images_per_second;    ///< so far
  double seconds;              ///< that the steps of this epoch took
};

/// The test images were classified.
struct Tested {
  double accuracy;  ///< 0 to 1
  double loss;      ///< mean
};

/// Hears how a training goes on; override what is of interest.
class Observer {
 public:
  Observer() = default;
  Observer(const Observer&) = delete;
  Observer& operator=(const Observer&) = delete;
  virtual ~Observer() = default;

  virtual void on(const StepDone&) {}
  virtual void on(const EpochDone&) {}
  virtual void on(const Tested&) {}
};

struct TrainResult {
  amp::OptLevel opt_level = amp::OptLevel::O1;
  c10::ScalarType dtype = c10::ScalarType::Float;   ///< of the level: fp32 at O0
  MemoryFormat memory_format = MemoryFormat::nchw;  ///< as chosen
  std::int64_t epochs = 0;                          ///< as asked for
  std::int64_t steps = 0;                           ///< done, those before a resume included
  double test_accuracy = 0;                         ///< 0 to 1
  double test_loss = 0;
  double train_loss = 0;            ///< mean over the last epoch's steps that were not skipped
  double images_per_second = 0;     ///< of all processes together
  double ms_per_step = 0;           ///< median; making the batch included
  std::int64_t peak_rss_bytes = 0;  ///< of this process
  std::int64_t peak_tensor_bytes =
      0;  ///< of the training, in this process; the data set is not in it
  std::int64_t skipped_steps = 0;
  double final_loss_scale = 1;
  /// Wall time of all of this run's steps, what lies between them included; not of the test.
  double train_seconds = 0;
  /// TrainOptions::stop said so: the test's numbers are NaN.
  bool stopped = false;
  std::uint64_t seed = 0;
  int processes = 1;
  int threads = 1;  ///< of a process
};

/// Trains, and then classifies the test images.
///
/// Deterministic: with the same options, data, threads and machine, every loss and weight comes out
/// the same bit for bit, in one run or in several with save and resume between them. Seeds
/// LibTorch's default generator.
///
/// With a group, every process calls it; each step is one of batch_size images of each, in the order
/// that one process with batches as large in all would take them, and the gradients are averaged: see
/// parallel::DistributedDataParallel. Each process draws random numbers of its own. Accuracy and
/// losses are those over all processes, on each of them. Observers hear of their own process.
///
/// A saved state is one file: weights (fp32 at every level), master weights, optimizer, loss scale,
/// random numbers, position, and the options that a resumed run must agree on. It appears whole or
/// not at all. Rank 0 alone writes and reads it.
///
/// Error for options out of range; FileError for a state that cannot be written (asked before
/// training) or read, or that belongs to another run. DivergedError if training cannot go on: too
/// many steps in a row were skipped, a loss that is not finite was stepped on, or the test loss is
/// not finite; nothing is saved then. CommError, naming the rank, if another process is lost.
TrainResult train_classifier(const ModelFactory& make_model, const DataSet& data,
                             const TrainOptions& options, Observer& observer);
TrainResult train_classifier(const ModelFactory& make_model, const DataSet& data,
                             const TrainOptions& options);

}  // namespace semitone::train

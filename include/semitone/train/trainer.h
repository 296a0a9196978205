#pragma once

#include "semitone/amp/mixed_precision.h"
#include "semitone/amp/opt_level.h"
#include "semitone/autocast/model.h"
#include "semitone/comm/group.h"
#include "semitone/parallel/distributed_data_parallel_options.h"
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

/// Trains an image classifier at an opt level, as `semitone train` does.
namespace semitone::train {

/// A model that maps images, (N, 1, height, width) in [0, 1], to logits, (N, classes).
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

/// Creates a model with new weights, drawn from LibTorch's default generator.
using ModelFactory = std::function<Classifier()>;

struct DataSet {
  zoo::ImageSet train;
  zoo::ImageSet test;
};

/// The memory format of images and of the weights of convolutions.
enum class MemoryFormat { automatic, nchw, nhwc };

std::string_view name_of(MemoryFormat format);
/// Parses "auto", "nchw" or "nhwc". Error for anything else.
MemoryFormat parse_memory_format(std::string_view name);

/// Returns the format that automatic stands for: nhwc on every device. The ConvNet's convolutions
/// use it without reordering, so that a step in 16 bits is about a fifth shorter; in fp32 both are
/// equally fast.
MemoryFormat choose_memory_format(c10::DeviceType device);

/// Options of a training. Setters return the object:
///
///     TrainOptions().opt_level(amp::OptLevel::O2).dtype(torch::kHalf).epochs(2)
///
/// With the defaults the ConvNet exceeds 98.5 % on MNIST at every level in one epoch.
class TrainOptions {
  TORCH_ARG(amp::OptLevel, opt_level) = amp::OptLevel::O1;
  /// The 16-bit dtype, fp16 or bf16. Default: default_16bit_dtype of the device.
  TORCH_ARG(std::optional<c10::ScalarType>, dtype);
  TORCH_ARG(c10::DeviceType, device) = c10::DeviceType::CPU;
  /// Loss scale. Default: the level's, see amp::OptLevel.
  TORCH_ARG(std::optional<amp::LossScale>, loss_scale);

  TORCH_ARG(std::int64_t, epochs) = 1;
  /// Images per step and process. The last batch of an epoch may be smaller.
  TORCH_ARG(std::int64_t, batch_size) = 100;
  /// The name of one of optimizers(), which has its own defaults for everything that is not set
  /// here. With fp16 weights and no masters (O3), eps is 2^-14: fp16 rounds Adam's 1e-8 to 0, which
  /// gives 0/0 where a gradient is 0.
  TORCH_ARG(std::string, optimizer) = "sgd";
  TORCH_ARG(double, lr) = 0.05;
  /// Momentum of an optimizer that has one (OptimizerChoice::has_momentum).
  TORCH_ARG(double, momentum) = 0.9;
  TORCH_ARG(Schedule, schedule) = Schedule::cosine;
  /// Random seed of the initial weights and of each epoch's order. It gives the same at every
  /// level.
  TORCH_ARG(std::uint64_t, seed) = 0;
  TORCH_ARG(MemoryFormat, memory_format) = MemoryFormat::automatic;

  /// Number of good steps after which a dynamic loss scale doubles. LibTorch's default of 2000
  /// exceeds the length of most trainings of this size.
  TORCH_ARG(std::int64_t, growth_interval) = 100;

  /// Largest number of batches per epoch; 0: all.
  TORCH_ARG(std::int64_t, limit_batches) = 0;
  /// Stop after this number of steps, including those before a resume, without changing the
  /// schedule; 0: train to the end.
  TORCH_ARG(std::int64_t, max_steps) = 0;
  /// Stop with a DivergedError after this number of consecutive skipped steps; 0: never. A scale of
  /// 2^16 needs 40 skips to fall to its lower bound.
  TORCH_ARG(std::int64_t, max_consecutive_skips) = 100;

  /// The processes that train together, each with its share of the images. Their options must be
  /// equal. Default: this process only.
  TORCH_ARG(comm::Group, group);
  /// Use the statistics of all processes' batches together in BatchNorm layers.
  TORCH_ARG(bool, sync_batch_norm) = false;
  /// Options for averaging gradients.
  TORCH_ARG(parallel::DistributedDataParallelOptions, ddp);

  /// File for the state at the end; empty: none. See train_classifier.
  TORCH_ARG(std::filesystem::path, save);
  /// Also save the state after each this many steps; 0: at the end only. A process that is killed
  /// can resume from it.
  TORCH_ARG(std::int64_t, save_every) = 0;
  /// Saved state to resume from; empty: start anew. If it is the same file as save, and does not
  /// exist yet, training starts anew, so that the first start and every later one can have the same
  /// options.
  TORCH_ARG(std::filesystem::path, resume);
  /// Called after a step; true stops the training there, for example after a signal. The state is
  /// then saved, and nothing is tested. With several processes it is called after every tenth step,
  /// and true on one stops all. Either all processes set it or none. Default: none.
  TORCH_ARG(std::function<bool()>, stop);
};

/// Returns the dtype of a training's weights or operators: fp32 at O0, else the options' 16-bit
/// dtype.
c10::ScalarType training_dtype(const TrainOptions& options);

/// Event: a step is done.
struct StepDone {
  std::int64_t epoch;  ///< from 1
  std::int64_t epochs;
  std::int64_t batch;    ///< in the epoch, from 1
  std::int64_t batches;  ///< per epoch
  std::int64_t step;     ///< in the training, from 1
  double loss;           ///< of this process's batch, before the step
  bool skipped;
  double loss_scale;         ///< after the step
  double images_per_second;  ///< so far, over all processes
  double seconds_left;       ///< until the end of the training, estimated
};

/// Event: the last batch of an epoch is done.
struct EpochDone {
  std::int64_t epoch;
  std::int64_t epochs;
  double train_loss;  ///< mean, see TrainResult
  double loss_scale;
  std::int64_t skipped_steps;  ///< so far
  double images_per_second;    ///< so far
  double seconds;              ///< duration of this epoch's steps
};

/// Event: the test images were classified.
struct Tested {
  double accuracy;  ///< 0 to 1
  double loss;      ///< mean
};

/// Receives the events of a training. Override the functions for the events of interest.
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
  MemoryFormat memory_format = MemoryFormat::nchw;  ///< the chosen one
  std::int64_t epochs = 0;                          ///< as requested
  std::int64_t steps = 0;                           ///< including those before a resume
  double test_accuracy = 0;                         ///< 0 to 1
  double test_loss = 0;
  double train_loss = 0;               ///< mean over the last epoch's steps that were not skipped
  double images_per_second = 0;        ///< over all processes
  double ms_per_step = 0;              ///< median; includes making the batch
  std::int64_t peak_rss_bytes = 0;     ///< of this process
  std::int64_t peak_tensor_bytes = 0;  ///< of the training in this process, without the data set
  std::int64_t skipped_steps = 0;
  double final_loss_scale = 1;
  /// Wall time of all of this run's steps and of the time between them, without the test.
  double train_seconds = 0;
  /// Whether TrainOptions::stop ended the training; the results of the test are then NaN.
  bool stopped = false;
  std::uint64_t seed = 0;
  int processes = 1;
  int threads = 1;  ///< per process
};

/// Trains a classifier and then tests it.
///
/// Training is deterministic. With the same options, data, threads and machine, every loss and
/// weight is bit for bit the same, in one run or in several with save and resume between them.
/// Seeds LibTorch's default generator.
///
/// With a group, every process must call it. Each step trains on batch_size images per process, in
/// the order in which one process with batches of the total size would take them. Gradients are
/// averaged by parallel::DistributedDataParallel. Each process draws its own random numbers.
/// Accuracy and losses are those over all processes, on each of them. An observer receives the
/// events of its own process.
///
/// A saved state is one file: weights (fp32 at every level), master weights, optimizer, loss scale,
/// random numbers, position, and the options that must match in a resumed run. It appears whole or
/// not at all. Only rank 0 reads and writes it.
///
/// Error for options out of range. FileError for a state that cannot be written (checked before
/// training) or read, or that belongs to another run. DivergedError if too many consecutive steps
/// were skipped, if a step was taken with a non-finite loss, or if the test loss is not finite;
/// nothing is saved then. CommError, naming the rank, if another process is lost.
TrainResult train_classifier(const ModelFactory& make_model, const DataSet& data,
                             const TrainOptions& options, Observer& observer);
TrainResult train_classifier(const ModelFactory& make_model, const DataSet& data,
                             const TrainOptions& options);

}  // namespace semitone::train

#include "src/train/trainer.h"

#include "semitone/amp/mixed_precision.h"
#include "semitone/core/device.h"
#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "semitone/parallel/detail/replica_sync.h"
#include "semitone/parallel/sync_batch_norm.h"
#include "src/core/dtype_limits.h"
#include "src/core/file.h"
#include "src/train/batches.h"
#include "src/train/checkpoint.h"
#include "src/train/meter.h"
#include "src/train/numbers.h"
#include "src/train/optimizers.h"
#include "src/train/setup.h"

#include <ATen/Parallel.h>
#include <torch/nn/functional/loss.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <fmt/format.h>

#include <chrono>
#include <cmath>
#include <limits>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

namespace semitone::train {
namespace {

constexpr auto kTrainer = "train.trainer";
// Number of steps between two queries of all processes: a query takes some 0.1 ms, a step some 10.
constexpr std::int64_t kBetweenQuestions = 10;
using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

void check_set(const zoo::ImageSet& set, const char* name) {
  if (set.images.dim() != 3 || set.images.scalar_type() != torch::kByte || set.size() == 0) {
    throw Error(kTrainer, std::string("uint8 images (N, height, width) in the ") + name + " set",
                set.images.defined() ? c10::str(dtype_name(set.images.scalar_type()), " of sizes ",
                                                set.images.sizes())
                                     : "none");
  }
  if (!set.labels.defined() || set.labels.scalar_type() != torch::kLong || set.labels.dim() != 1 ||
      set.labels.size(0) != set.size()) {
    throw Error(kTrainer, std::to_string(set.size()) + " int64 labels in the " + name + " set",
                set.labels.defined() ? c10::str(dtype_name(set.labels.scalar_type()), " of sizes ",
                                                set.labels.sizes())
                                     : "none");
  }
}

void check_options(const TrainOptions& options) {
  const auto require = [](bool good, const char* expected, double got) {
    if (!good) throw Error(kTrainer, expected, fmt::format("{}", got));
  };
  const auto count = [](std::int64_t value) { return static_cast<double>(value); };
  require(options.epochs() > 0, "epochs above 0", count(options.epochs()));
  require(options.batch_size() > 0, "a batch size above 0", count(options.batch_size()));
  require(options.lr() > 0 && options.lr() <= dtype_limits(torch::kFloat).max,
          "a learning rate above 0 that float32 holds", options.lr());
  if (precision_of(options).has_fp16_weights_only()) {
    require(options.lr() <= dtype_limits(torch::kHalf).max,
            "a learning rate of at most 65504 with float16 weights", options.lr());
  }
  find_optimizer(options.optimizer());
  require(options.momentum() >= 0 && options.momentum() < 1, "a momentum in [0, 1)",
          options.momentum());
  require(options.growth_interval() >= 0, "a growth interval of 0 (never) or more",
          count(options.growth_interval()));
  require(options.max_consecutive_skips() >= 0, "a limit of consecutive skips of 0 (none) or more",
          count(options.max_consecutive_skips()));
  require(options.limit_batches() >= 0, "a batch limit of 0 (none) or more",
          count(options.limit_batches()));
  require(options.max_steps() >= 0, "a step limit of 0 (none) or more", count(options.max_steps()));
  require(options.save_every() >= 0, "steps between saves of 0 (none) or more",
          count(options.save_every()));
  if (options.save_every() > 0 && options.save().empty())
    throw Error(kTrainer, "a file to save to, with save_every", "none");
  precision_of(options).check(kTrainer);
}

amp::Options amp_options(const TrainOptions& options, MemoryFormat format) {
  amp::Options result = precision_of(options).amp_options(format);
  result.loss_scale_options(amp::LossScaleOptions()
                                .growth_interval(options.growth_interval())
                                .max_consecutive_skips(options.max_consecutive_skips()));
  if (options.loss_scale().has_value()) result.loss_scale(*options.loss_scale());
  return result;
}

// This process's device: of several GPUs, the one that its group selected.
c10::Device device_of(const TrainOptions& options) {
  const c10::Device given = options.group().device();
  return given.type() == options.device().type() ? given : options.device();
}

Classifier make_seeded(const ModelFactory& make_model, const TrainOptions& options) {
  torch::manual_seed(static_cast<std::uint64_t>(options.seed()));
  Classifier model = make_model();
  model.module()->to(device_of(options));
  if (options.sync_batch_norm()) {
    parallel::convert_sync_batchnorm(*model.module(), options.group());
  }
  return model;
}

// The processes have equal weights, but each draws its own dropout. The first one draws what a
// single process would.
void reseed(const comm::Group& group) {
  if (group.rank() == 0) return;
  const auto next =
      torch::randint(std::numeric_limits<std::int64_t>::max(), {group.rank()}, torch::kLong);
  torch::manual_seed(static_cast<std::uint64_t>(next[-1].item<std::int64_t>()));
}

// One training, from start or resume to its result.
class Run {
 public:
  Run(const ModelFactory& make_model, const DataSet& data, const TrainOptions& options,
      Observer& observer)
      : options_(options),
        observer_(observer),
        format_(resolve(options.memory_format(), options.device().type())),
        train_(data.train, device_of(options), format_ == MemoryFormat::nhwc, share()),
        test_(data.test, device_of(options), format_ == MemoryFormat::nhwc, share()),
        setup_(precision_of(options), make_seeded(make_model, options), options.optimizer(),
               {.lr = options.lr(), .momentum = options.momentum()}, amp_options(options, format_)),
        replicas_(parallel::detail::tensors_of(*setup_.model.module()), options.group(),
                  options.ddp()) {
    reseed(options.group());
    const std::int64_t all = train_.count(options.batch_size());
    batches_ = options.limit_batches() > 0 ? std::min(all, options.limit_batches()) : all;
    steps_ = batches_ * options.epochs();
  }

  void resume() {
    if (goes_on_with_what_it_saves() && !is_there(options_.resume())) return;
    load_checkpoint(options_.resume(), training(), config());
  }

  void save() { save_checkpoint(options_.save(), training(), config()); }

  TrainResult train() {
    const std::int64_t end =
        options_.max_steps() > 0 ? std::min(options_.max_steps(), steps_) : steps_;
    // A finished training that is started again is only tested.
    if (position_.step >= end && !goes_on_with_what_it_saves()) {
      throw Error(kTrainer, fmt::format("a state with fewer than {} steps", end),
                  std::to_string(position_.step),
                  options_.schedule() == Schedule::constant || end < steps_
                      ? "raise epochs or max_steps"
                      : "a finished cosine schedule cannot be extended");
    }
    end_step_ = end;
    setup_.model.module()->train();
    std::vector<at::Tensor> order;
    const auto begin = Clock::now();
    while (position_.step < end && !stopped_) {
      const std::int64_t epoch = position_.step / batches_;
      const std::int64_t batch = position_.step % batches_;
      if (batch == 0 || order.empty()) {
        order = train_.shuffled(options_.batch_size(), static_cast<std::uint64_t>(options_.seed()),
                                epoch);
        epoch_seconds_ = 0;
      }
      if (batch == 0) {
        position_.loss_sum = 0;
        position_.loss_count = 0;
      }
      step(order[static_cast<std::size_t>(batch)]);
      if (batch + 1 == batches_) {
        observer_.on(EpochDone{epoch + 1, options_.epochs(), train_loss(), loss_scale(),
                               setup_.mixed.skipped_steps(), meter_.items_per_second(),
                               epoch_seconds_});
      }
      stopped_ = must_stop();
      const bool last = position_.step == end || stopped_;
      if (!last && options_.save_every() > 0 && position_.step % options_.save_every() == 0) save();
    }
    train_seconds_ = seconds_since(begin);
    constexpr double kNone = std::numeric_limits<double>::quiet_NaN();
    return result(stopped_ ? Tested{kNone, kNone} : test());
  }

 private:
  void step(const at::Tensor& indices) {
    const auto begin = Clock::now();
    const Batch batch = train_.batch(indices);
    const double rate = learning_rate(options_.schedule(), options_.lr(), position_.step, steps_);
    for (auto& group : setup_.optimizer->param_groups()) group.options().set_lr(rate);
    setup_.optimizer->zero_grad();
    replicas_.before_forward();
    const at::Tensor logits =
        replicas_.after_forward(setup_.model.forward(setup_.mixed, batch.images));
    const at::Tensor loss = torch::cross_entropy_loss(logits, batch.labels);
    setup_.mixed.scale_loss(loss, *setup_.optimizer).backward();
    const bool skipped = setup_.mixed.step(*setup_.optimizer) == amp::Step::skipped;
    const double value = loss.item<double>();
    if (!skipped) {
      if (!std::isfinite(value)) {
        throw DivergedError(
            kTrainer, "a finite training loss",
            fmt::format("{} at step {}", without_sign_of_nan(value), position_.step + 1),
            "lower the learning rate, or use a level with a loss scale");
      }
      position_.loss_sum += value;
      ++position_.loss_count;
    }
    ++position_.step;
    const double seconds = seconds_since(begin);
    meter_.add(seconds, batch.labels.size(0) * group().size());
    epoch_seconds_ += seconds;
    observer_.on(StepDone{
        (position_.step - 1) / batches_ + 1, options_.epochs(), (position_.step - 1) % batches_ + 1,
        batches_, position_.step, value, skipped, loss_scale(), meter_.items_per_second(),
        1e-3 * meter_.mean_ms() * static_cast<double>(end_step_ - position_.step)});
  }

  Tested test() {
    const torch::NoGradGuard no_grad;
    setup_.model.module()->eval();
    // Running statistics are each process's own since its last forward.
    group().broadcast(setup_.model.module()->buffers());
    std::int64_t correct = 0;
    double loss = 0;
    for (const at::Tensor& indices : test_.in_order(options_.batch_size())) {
      const Batch batch = test_.batch(indices);
      const at::Tensor logits = setup_.model.forward(setup_.mixed, batch.images);
      correct += logits.argmax(1).eq(batch.labels).sum().item<std::int64_t>();
      loss +=
          torch::cross_entropy_loss(logits, batch.labels, {}, at::Reduction::Sum).item<double>();
    }
    const auto images = static_cast<double>(test_.size());
    const Tested tested{total(static_cast<double>(correct)) / images, total(loss) / images};
    if (!std::isfinite(tested.loss)) {
      throw DivergedError(kTrainer, "a finite test loss",
                          fmt::format("{}", without_sign_of_nan(tested.loss)),
                          "lower the learning rate, or use a level with a loss scale");
    }
    observer_.on(tested);
    return tested;
  }

  TrainResult result(const Tested& tested) const {
    TrainResult result;
    result.opt_level = options_.opt_level();
    result.dtype = training_dtype(options_);
    result.memory_format = format_;
    result.epochs = options_.epochs();
    result.steps = position_.step;
    result.test_accuracy = tested.accuracy;
    result.test_loss = tested.loss;
    result.train_loss = train_loss();
    result.images_per_second = meter_.items_per_second();
    result.ms_per_step = meter_.median_ms();
    result.skipped_steps = setup_.mixed.skipped_steps();
    result.final_loss_scale = loss_scale();
    result.train_seconds = train_seconds_;
    result.stopped = stopped_;
    result.seed = static_cast<std::uint64_t>(options_.seed());
    result.processes = group().size();
    result.threads = at::get_num_threads();
    return result;
  }

  bool goes_on_with_what_it_saves() const {
    return !options_.resume().empty() && options_.resume() == options_.save();
  }

  // Checked on rank 0, which reads it.
  bool is_there(const std::filesystem::path& path) const {
    std::error_code ignored;
    return total(group().rank() == 0 && std::filesystem::is_regular_file(path, ignored) ? 1 : 0) >
           0;
  }

  // All processes save the same step.
  bool must_stop() const {
    if (!options_.stop()) return false;
    if (group().size() == 1) return options_.stop()();
    if (position_.step % kBetweenQuestions != 0) return false;
    return total(options_.stop()() ? 1 : 0) > 0;
  }

  const comm::Group& group() const { return options_.group(); }
  Share share() const { return {group().rank(), group().size()}; }
  Training training() {
    return {setup_.handle, *setup_.optimizer, setup_.mixed, position_, group()};
  }

  // Over all processes.
  double total(double value) const {
    if (group().size() == 1) return value;
    at::Tensor sum =
        torch::full({1}, value, torch::dtype(torch::kDouble).device(device_of(options_)));
    group().all_reduce(sum);
    return sum.item<double>();
  }

  // NaN if every step of the epoch was skipped, which happens on all processes together.
  double train_loss() const {
    return without_sign_of_nan(total(position_.loss_sum) /
                               static_cast<double>(position_.loss_count * group().size()));
  }

  double loss_scale() const { return setup_.mixed.loss_scaler().scale(); }

  RunConfig config() const {
    const auto text = [](const auto& value) { return fmt::format("{}", value); };
    RunConfig result{
        {"--opt-level", std::string(amp::name_of(options_.opt_level()))},
        {"--dtype", dtype_name(training_dtype(options_))},
        {"--loss-scale", options_.loss_scale() ? options_.loss_scale()->to_string() : "default"},
        {"--growth-interval", text(options_.growth_interval())},
        {"--batch-size", text(options_.batch_size())},
        {"--optimizer", options_.optimizer()},
        {"--lr", text(options_.lr())},
        {"--schedule", std::string(name_of(options_.schedule()))},
        {"--seed", text(options_.seed())},
        {"--limit-batches", text(options_.limit_batches())},
        {"--memory-format", std::string(name_of(format_))},
        {"training images", text(train_.size())},
        {"--nproc", text(group().size())},
        {"--sync-bn", text(options_.sync_batch_norm())},
        {"--compress",
         options_.ddp().compress() ? dtype_name(*options_.ddp().compress()) : "none"}};
    if (find_optimizer(options_.optimizer()).has_momentum)
      result.emplace_back("--momentum", text(options_.momentum()));
    // A constant rate does not depend on the end, so the end may change.
    if (options_.schedule() != Schedule::constant)
      result.emplace_back("--epochs", text(options_.epochs()));
    return result;
  }

  const TrainOptions& options_;
  Observer& observer_;
  MemoryFormat format_;
  Batches train_;
  Batches test_;
  Setup setup_;
  parallel::detail::ReplicaSync replicas_;
  std::int64_t batches_ = 0;  // of an epoch
  std::int64_t steps_ = 0;    // of all epochs
  std::int64_t end_step_ = 0;
  Position position_;
  StepMeter meter_;
  double epoch_seconds_ = 0;
  double train_seconds_ = 0;
  bool stopped_ = false;
};

}  // namespace

c10::ScalarType training_dtype(const TrainOptions& options) {
  return precision_of(options).dtype();
}

TrainResult train_classifier(const ModelFactory& make_model, const DataSet& data,
                             const TrainOptions& options, Observer& observer) {
  check_options(options);
  check_set(data.train, "training");
  check_set(data.test, "test");
  const bool writes = !options.save().empty() && options.group().rank() == 0;
  if (writes) require_writable(options.save(), kTrainer);
  const TensorMemoryMeter memory;
  TrainResult result;
  {
    Run run(make_model, data, options, observer);
    if (!options.resume().empty()) run.resume();
    result = run.train();
    if (!options.save().empty()) run.save();
  }
  result.peak_tensor_bytes = memory.peak_bytes();
  result.peak_rss_bytes = peak_rss_bytes();
  return result;
}

TrainResult train_classifier(const ModelFactory& make_model, const DataSet& data,
                             const TrainOptions& options) {
  Observer silent;
  return train_classifier(make_model, data, options, silent);
}

}  // namespace semitone::train

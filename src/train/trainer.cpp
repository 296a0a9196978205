#include "src/train/trainer.h"

#include "semitone/amp/mixed_precision.h"
#include "semitone/core/device.h"
#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "semitone/core/events.h"
#include "semitone/parallel/detail/replica_sync.h"
#include "semitone/weights/file.h"
#include "src/checkpoint/agree.h"
#include "src/core/file.h"
#include "src/core/log.h"
#include "src/core/tensor_memory.h"
#include "src/train/batches.h"
#include "src/train/checkpoints.h"
#include "src/train/checks.h"
#include "src/train/initial_model.h"
#include "src/train/loss_watch.h"
#include "src/train/meter.h"
#include "src/train/nonfinite_steps.h"
#include "src/train/numbers.h"
#include "src/train/run_config.h"
#include "src/train/same_run.h"
#include "src/train/setup.h"
#include "src/train/step_count.h"
#include "src/train/step_decisions.h"

#include <ATen/Parallel.h>
#include <c10/util/ScopeExit.h>
#include <torch/nn/functional/loss.h>
#include <torch/types.h>

#include <fmt/format.h>

#include <chrono>
#include <cmath>
#include <exception>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace semitone::train {
namespace {

constexpr auto kTrainer = "train.trainer";
using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

bool has_fp8(const std::optional<amp::CastPolicy>& policy) {
  return policy.has_value() && policy->fp8_options().has_value();
}

// The policy with fp8, if the options ask for it. None: the level's.
std::optional<amp::CastPolicy> policy_of(const TrainOptions& options) {
  auto policy = options.policy();
  if (!options.fp8() || options.opt_level() == amp::OptLevel::O0 || has_fp8(policy)) return policy;
  if (!policy.has_value())
    policy = amp::CastPolicy::semitone({options.device().type(), training_dtype(options)});
  policy->fp8();
  return policy;
}

amp::Options amp_options(const TrainOptions& options, MemoryFormat format) {
  amp::Options result = precision_of(options).amp_options(format);
  result.loss_scale_options(amp::LossScaleOptions()
                                .growth_interval(options.growth_interval())
                                .max_consecutive_skips(options.max_consecutive_skips()));
  if (options.loss_scale().has_value()) result.loss_scale(*options.loss_scale());
  if (const auto policy = policy_of(options)) result.policy(*policy);
  return result;
}

// One training, from start or resume to its result.
class Run {
 public:
  Run(const ModelFactory& make_model, const DataSet& data, const TrainOptions& options,
      Observer& observer)
      : options_(options),
        observer_(observer),
        kind_(data.kind),
        format_(data.kind.has_memory_format
                    ? resolve(options.memory_format(), options.device().type())
                    : MemoryFormat::nchw),
        train_(*data.train, device_of(options), format_ == MemoryFormat::nhwc, share()),
        test_(*data.test, device_of(options), format_ == MemoryFormat::nhwc, share()),
        count_(count_steps(data, options)),
        config_(checked_config(data)),
        setup_(precision_of(options), make_seeded(make_model, options), options.optimizer(),
               {.lr = options.lr(), .momentum = options.momentum()}, amp_options(options, format_)),
        replicas_(parallel::detail::tensors_of(*setup_.model.module()), options.group(),
                  options.ddp()),
        losses_(options, *setup_.model.module(), setup_.mixed, computes_in_fp8()),
        checkpoints_(
            options,
            {setup_.handle, *setup_.optimizer, setup_.mixed, losses_.guard(), replicas_, position_},
            std::move(config_)),
        decisions_(options.save_every(), options.stop_signal(), options.group(),
                   device_of(options)) {
    reseed(options.group());
    agree_on_fp8();
  }

  TrainResult train() {
    resume();
    require_batches(count_, position_.step, setup_.model.smallest_batch(), options_, kind_);
    if (position_.step < count_.end) checkpoints_.require_writable();
    train_to_end();
    // Among spikes there is no good checkpoint to roll back to: the resumed run repeats these steps.
    const bool keeps_last = stop_signal_ != 0 && losses_.delays_checkpoints();
    checkpoints_.settle();
    if (!keeps_last || !checkpoints_.last_step().has_value()) checkpoints_.save();
    std::vector<std::string> not_saved;
    const auto note = [&](const std::string& error) {
      if (!error.empty()) not_saved.push_back(error);
    };
    note(checkpoints_.wait());
    constexpr double kNone = std::numeric_limits<double>::quiet_NaN();
    const bool is_complete = stop_signal_ == 0;
    // If the test raises an error.
    auto log_it = c10::make_scope_exit([&] {
      for (const std::string& error : not_saved) log()->error("{}", error);
    });
    TrainResult done = result(is_complete ? test() : Tested{kNone, kNone});
    log_it.release();
    if (is_complete) note(save_weights());
    done.not_saved = std::move(not_saved);
    return done;
  }

 private:
  // Before ranks exchange anything else: they could otherwise wait for each other, or complain
  // about a consequence.
  RunConfig checked_config(const DataSet& data) const {
    RunConfig config = run_config_of(options_, format_, data);
    require_same_run(options_, data, config);
    return config;
  }

  bool computes_in_fp8() const {
    return options_.opt_level() != amp::OptLevel::O0 && has_fp8(policy_of(options_));
  }

  // From the second step on, all ranks use the same scales in fp8.
  void agree_on_fp8() {
    if (!computes_in_fp8() || group().size() == 1) return;
    setup_.mixed.fp8_scaling().set_amax_hook(
        [group = group()](at::Tensor& amax) { group.all_reduce(amax, comm::ReduceOp::max); });
  }

  // Returns the error, or "".
  std::string save_weights() {
    if (options_.save_weights().empty() || group().rank() > 0) return {};
    try {
      weights::save(setup_.handle, options_.save_weights());
      return {};
    } catch (const std::exception& error) {
      return checkpoint::message_of(error);
    }
  }

  void resume() {
    const auto path = checkpoints_.resume();
    if (path.has_value()) observer_.on(Resumed{position_.step, *path});
    // A finished training that is started again is only tested.
    if (position_.step < count_.end || options_.resume_auto()) return;
    throw Error(kTrainer, fmt::format("a checkpoint of fewer than {} steps", count_.end),
                std::to_string(position_.step),
                options_.schedule() == Schedule::constant || count_.end < count_.steps
                    ? "raise epochs or max_steps"
                    : "a finished cosine schedule cannot be extended");
  }

  void train_to_end() {
    setup_.model.module()->train();
    NonFiniteSteps nonfinite(options_.check_nonfinite(), *setup_.model.module(), position_.step + 1,
                             group());
    decisions_.restart_clock();
    std::vector<at::Tensor> order;
    observer_.on(TrainingBegins{*setup_.model.module(), *setup_.optimizer, kind_});
    const auto end = c10::make_scope_exit([this] { observer_.on(TrainingEnds{}); });
    const auto begin = Clock::now();
    while (position_.step < count_.end && stop_signal_ == 0) {
      const std::int64_t epoch = position_.step / count_.batches;
      const std::int64_t batch = position_.step % count_.batches;
      if (batch == 0 || order.empty()) {
        order = train_.shuffled(options_.batch_size(), static_cast<std::uint64_t>(options_.seed()),
                                epoch);
        epoch_seconds_ = 0;
      }
      if (batch == 0) {
        position_.loss_sum = 0;
        position_.loss_count = 0;
      }
      const std::int64_t number = position_.step + 1;
      const bool is_done = unless_rolled_back(
          number, nonfinite, [&] { step(order[static_cast<std::size_t>(batch)], nonfinite); });
      if (batch + 1 == count_.batches) {
        observer_.on(EpochDone{epoch + 1, options_.epochs(), train_loss(), loss_scale(),
                               setup_.mixed.skipped_steps(), meter_.items_per_second(),
                               epoch_seconds_});
      }
      const StepDecision decision = decisions_.after(position_.step);
      stop_signal_ = decision.stop_signal;
      must_save_ = is_done && (must_save_ || decision.save);
      if (must_save_ && !losses_.delays_checkpoints()) {
        // DivergedError if weights are inf or NaN.
        unless_rolled_back(number, nonfinite, [this] { checkpoints_.save(); });
        decisions_.restart_clock();
        must_save_ = false;
      }
    }
    train_seconds_ = seconds_since(begin);
  }

  // Runs a part of a step. If it throws DivergedError, which it does on all processes, rolls back
  // and returns false. Throws again if there is no rollback.
  // @param number  of the step, from 1
  template <typename Act>
  bool unless_rolled_back(std::int64_t number, NonFiniteSteps& nonfinite, const Act& act) {
    try {
      act();
      return true;
    } catch (const DivergedError& error) {
      if (options_.on_spike() != OnSpike::rollback || !roll_back(number, error)) throw;
    }
    nonfinite.continue_at(number + 1);
    return false;
  }

  // Loads the newest checkpoint, but continues after this step, since with the same batches the
  // training would diverge again. If that is impossible, logs why, and returns false.
  bool roll_back(std::int64_t number, const DivergedError& error) {
    const auto refuse = [this](const std::string& reason) {
      if (group().rank() == 0) log()->warn("[{}] no rollback: {}", kTrainer, reason);
      return false;
    };
    if (rollbacks_ == options_.divergence_guard().max_rollbacks())
      return refuse(fmt::format("there were {} already", rollbacks_));
    const auto saved = checkpoints_.roll_back();
    if (!saved.has_value())
      return refuse(fmt::format("no checkpoint yet in '{}'", options_.checkpoint_dir().string()));
    ++rollbacks_;
    // The mean loss of an epoch is that of its own steps.
    if (epoch_of(*saved) != epoch_of(number)) {
      position_.loss_sum = 0;
      position_.loss_count = 0;
    }
    position_.step = number;
    observer_.on(RolledBack{number, *saved, error.what()});
    return true;
  }

  // Returns the epoch, from 0, of a step, from 1.
  std::int64_t epoch_of(std::int64_t number) const { return (number - 1) / count_.batches; }

  Batch read(const at::Tensor& indices) const {
    const events::PhaseScope phase(events::Phase::data);
    if (!options_.augment()) return train_.batch(indices);
    return train_.augmented(indices, static_cast<std::uint64_t>(options_.seed()),
                            position_.step / count_.batches);
  }

  at::Tensor loss_of(const Batch& batch) {
    const events::PhaseScope phase(events::Phase::forward);
    replicas_.before_forward();
    const at::Tensor logits =
        replicas_.after_forward(setup_.model.forward(setup_.mixed, batch.inputs));
    return torch::cross_entropy_loss(logits, batch.labels);
  }

  amp::Step optimize(const at::Tensor& loss) {
    setup_.mixed.scale_loss(loss, *setup_.optimizer).backward();
    checkpoints_.wait_for_copy();
    return setup_.mixed.step(*setup_.optimizer);
  }

  void step(const at::Tensor& indices, NonFiniteSteps& nonfinite) {
    const std::int64_t number = position_.step + 1;
    observer_.on(StepBegins{number});
    const auto begin = Clock::now();
    const Batch batch = read(indices);
    const double rate =
        learning_rate(options_.schedule(), options_.lr(), position_.step, count_.steps);
    for (auto& group : setup_.optimizer->param_groups()) group.options().set_lr(rate);
    setup_.optimizer->zero_grad();
    losses_.before_forward();
    const at::Tensor loss = loss_of(batch);
    const bool is_left_out = losses_.leaves_out(loss, number, observer_);
    const amp::Step outcome = is_left_out ? amp::Step::skipped : optimize(loss);
    const bool skipped = outcome == amp::Step::skipped;
    nonfinite.after_step(skipped, observer_);
    if (!is_left_out) losses_.after_step(loss, outcome, number, observer_);
    const double value = loss.item<double>();
    if (!skipped) {
      if (!std::isfinite(value)) {
        throw DivergedError(kTrainer, "a finite training loss",
                            fmt::format("{} at step {}", without_sign_of_nan(value), number),
                            "lower the learning rate, or use a level with a loss scale");
      }
      position_.loss_sum += value;
      ++position_.loss_count;
    }
    position_.step = number;
    const double seconds = seconds_since(begin);
    meter_.add(seconds, batch.labels.size(0) * group().size());
    epoch_seconds_ += seconds;
    observer_.on(
        StepDone{(position_.step - 1) / count_.batches + 1, options_.epochs(),
                 (position_.step - 1) % count_.batches + 1, count_.batches, position_.step, value,
                 skipped, loss_scale(), meter_.items_per_second(),
                 1e-3 * meter_.mean_ms() * static_cast<double>(count_.end - position_.step), rate});
  }

  Tested test() {
    const torch::NoGradGuard no_grad;
    setup_.model.module()->eval();
    // Running statistics are each process's own since its last forward.
    group().broadcast(setup_.model.module()->buffers());
    std::int64_t correct = 0;
    std::int64_t labels = 0;
    double loss = 0;
    for (const at::Tensor& indices : test_.in_order(options_.batch_size())) {
      const Batch batch = test_.batch(indices);
      const at::Tensor logits = setup_.model.forward(setup_.mixed, batch.inputs);
      labels += batch.labels.size(0);
      correct += logits.argmax(1).eq(batch.labels).sum().item<std::int64_t>();
      loss +=
          torch::cross_entropy_loss(logits, batch.labels, {}, at::Reduction::Sum).item<double>();
    }
    const double count = total(static_cast<double>(labels));
    const Tested tested{total(static_cast<double>(correct)) / count, total(loss) / count};
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
    result.kind = kind_;
    result.opt_level = options_.opt_level();
    result.dtype = training_dtype(options_);
    result.fp8 = computes_in_fp8();
    result.memory_format = format_;
    result.epochs = options_.epochs();
    result.steps = position_.step;
    result.test_accuracy = tested.accuracy;
    result.test_loss = tested.loss;
    result.train_loss = train_loss();
    result.items_per_second = meter_.items_per_second();
    result.ms_per_step = meter_.median_ms();
    result.skipped_steps = setup_.mixed.skipped_steps();
    result.loss_spikes = losses_.spikes();
    result.rollbacks = rollbacks_;
    result.final_loss_scale = loss_scale();
    result.train_seconds = train_seconds_;
    result.stop_signal = stop_signal_;
    result.last_checkpoint = checkpoints_.last_step();
    result.seed = static_cast<std::uint64_t>(options_.seed());
    result.processes = group().size();
    result.threads = at::get_num_threads();
    return result;
  }

  const comm::Group& group() const { return options_.group(); }
  Share share() const { return {group().rank(), group().size()}; }

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

  const TrainOptions& options_;
  Observer& observer_;
  DataKind kind_;
  MemoryFormat format_;
  Batches train_;
  Batches test_;
  StepCount count_;
  RunConfig config_;  // until checkpoints_ has it
  Setup setup_;
  parallel::detail::ReplicaSync replicas_;
  Position position_;
  LossWatch losses_;
  Checkpoints checkpoints_;
  StepDecisions decisions_;
  StepMeter meter_;
  double epoch_seconds_ = 0;
  double train_seconds_ = 0;
  bool must_save_ = false;  // a checkpoint is due, and waits while losses are spikes
  std::int64_t rollbacks_ = 0;
  int stop_signal_ = 0;
};

}  // namespace

c10::ScalarType training_dtype(const TrainOptions& options) {
  return precision_of(options).dtype();
}

bool has_dynamic_scale(const TrainOptions& options) {
  if (options.loss_scale().has_value()) return options.loss_scale()->is_dynamic();
  return amp::Properties::defaults(options.opt_level(), precision_of(options).lower_dtype())
      .loss_scale.is_dynamic();
}

TrainResult train_classifier(const ModelFactory& make_model, const DataSet& data,
                             const TrainOptions& options, Observer& observer) {
  check_options(options, data.kind);
  const bool writes = !options.save_weights().empty() && options.group().rank() == 0;
  if (writes) require_writable(options.save_weights(), kTrainer);
  const TensorMemoryMeter memory;
  TrainResult result;
  {
    Run run(make_model, data, options, observer);
    result = run.train();
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

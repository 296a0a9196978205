#include "src/train/tuning.h"

#include "semitone/core/error.h"
#include "src/train/meter.h"
#include "src/train/observer.h"
#include "src/train/step_count.h"
#include "src/train/trainer.h"

#include <torch/utils.h>

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <optional>
#include <vector>

namespace semitone::train {
namespace {

constexpr auto kTuning = "train.tuning";

// The mean loss of the last quarter of a training's steps.
class LastLosses : public Observer {
 public:
  using Observer::on;
  void on(const StepDone& step) override { losses_.push_back(step.loss); }

  double mean() const {
    const auto count = std::max<std::ptrdiff_t>(1, std::ssize(losses_) / 4);
    return std::accumulate(losses_.end() - count, losses_.end(), 0.0) / static_cast<double>(count);
  }

 private:
  std::vector<double> losses_;
};

// One model for all trainings, so that its layers keep their identity, with new weights for each.
class OneModel {
 public:
  explicit OneModel(const ModelFactory& make) : make_(make), model_(make()) {}

  const Classifier& model() const { return model_; }

  Classifier with_new_weights() const {
    const torch::NoGradGuard no_grad;
    const Classifier fresh = make_();
    copy(fresh.module()->parameters(), model_.module()->parameters());
    copy(fresh.module()->buffers(), model_.module()->buffers());
    for (const at::Tensor& parameter : model_.module()->parameters())
      parameter.mutable_grad().reset();
    return model_;
  }

 private:
  static void copy(const std::vector<at::Tensor>& from, const std::vector<at::Tensor>& to) {
    for (std::size_t i = 0; i < to.size(); ++i) to[i].copy_(from[i]);
  }

  const ModelFactory& make_;
  Classifier model_;
};

void check_tuning(const DataSet& data, const TrainOptions& options) {
  // A quarter of fewer steps is less than one.
  constexpr std::int64_t kLeastSteps = 4;
  if (options.max_steps() < kLeastSteps) {
    throw Error(kTuning, fmt::format("at least {} steps", kLeastSteps),
                fmt::format("{}", options.max_steps()), "raise --max-steps");
  }
  require_steps(data, options, kLeastSteps, kTuning);
  if (options.group().size() > 1)
    throw Error(kTuning, "one process", fmt::format("{}", options.group().size()));
  for (const auto& path :
       {options.checkpoint_dir(), options.resume_from(), options.save_weights()}) {
    if (!path.empty())
      throw Error(kTuning, "no checkpoints and no file for weights", "'" + path.string() + "'");
  }
}

}  // namespace

amp::TuneResult tune_classifier(const ModelFactory& make_model, const DataSet& data,
                                const TrainOptions& options, const amp::CastPolicy& policy,
                                const amp::TuneOptions& tune_options) {
  check_tuning(data, options);
  // The trainings' own meters begin after the model: without this one, which knows its memory,
  // LibTorch notes on stderr that they do not.
  const TensorMemoryMeter memory;
  const OneModel one(make_model);
  const DataSet tested = with_one_test_example(data);
  const auto train = [&](const std::optional<amp::CastPolicy>& chosen) {
    TrainOptions its = options;
    its.opt_level(chosen.has_value() ? amp::OptLevel::O1 : amp::OptLevel::O0).policy(chosen);
    LastLosses losses;
    try {
      train_classifier([&] { return one.with_new_weights(); }, tested, its, losses);
    } catch (const DivergedError&) {
      return std::numeric_limits<double>::quiet_NaN();
    }
    return losses.mean();
  };
  return amp::tune(amp::Model(one.model().module()), policy, train, tune_options);
}

}  // namespace semitone::train

#include "src/train/tuning.h"

#include "semitone/core/error.h"
#include "src/train/meter.h"
#include "src/train/observer.h"
#include "src/train/trainer.h"

#include <torch/utils.h>

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <optional>

namespace semitone::train {
namespace {

constexpr auto kTuning = "train.tuning";

// The mean loss of the last quarter of a training's steps.
class LastLosses : public Observer {
 public:
  explicit LastLosses(std::int64_t steps) : first_(steps - std::max<std::int64_t>(1, steps / 4)) {}

  using Observer::on;
  void on(const StepDone& step) override {
    if (step.step <= first_) return;
    sum_ += step.loss;
    ++count_;
  }

  double mean() const { return sum_ / static_cast<double>(count_); }

 private:
  std::int64_t first_;
  double sum_ = 0;
  std::int64_t count_ = 0;
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

// A training's test takes as long as hundreds of steps, and is not needed.
DataSet with_small_test(const DataSet& data) {
  const std::int64_t size = std::min<std::int64_t>(data.test.size(), 1);
  return {data.train, {data.test.images.narrow(0, 0, size), data.test.labels.narrow(0, 0, size)}};
}

void check_tuning(const TrainOptions& options) {
  if (options.max_steps() < 4)
    throw Error(kTuning, "at least 4 steps", fmt::format("{}", options.max_steps()));
  if (options.group().size() > 1)
    throw Error(kTuning, "one process", fmt::format("{}", options.group().size()));
  if (!options.checkpoint_dir().empty() || options.resume_auto() ||
      !options.resume_from().empty() || !options.save_weights().empty())
    throw Error(kTuning, "no checkpoints and no file for weights", "some");
}

}  // namespace

amp::TuneResult tune_classifier(const ModelFactory& make_model, const DataSet& data,
                                const TrainOptions& options, const amp::CastPolicy& policy,
                                const amp::TuneOptions& tune_options) {
  check_tuning(options);
  // The trainings' own meters begin after the model: without this one, which knows its memory,
  // LibTorch notes on stderr that they do not.
  const TensorMemoryMeter memory;
  const OneModel one(make_model);
  const DataSet tested = with_small_test(data);
  const auto train = [&](const std::optional<amp::CastPolicy>& chosen) {
    TrainOptions its = options;
    its.opt_level(chosen.has_value() ? amp::OptLevel::O1 : amp::OptLevel::O0).policy(chosen);
    LastLosses losses(options.max_steps());
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

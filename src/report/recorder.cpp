#include "semitone/report/recorder.h"

#include "semitone/core/error.h"
#include "semitone/core/events.h"
#include "src/core/log.h"
#include "src/core/thread_state.h"
#include "src/report/observation.h"
#include "src/report/operator_trace.h"
#include "src/report/recorded_model.h"
#include "src/report/recorded_optimizer.h"
#include "src/report/run_log_impl.h"
#include "src/report/sample_listener.h"
#include "src/report/sample_state.h"
#include "src/report/tensor_values.h"

#include <nlohmann/json.hpp>

#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace semitone::report {
namespace {

constexpr auto kRecorder = "report.recorder";

// That a thread has one Recorder.
class OnePerThread {
 public:
  OnePerThread() {
    const std::lock_guard lock(mutex());
    if (!threads().insert(thread_).second)
      throw Error(kRecorder, "one Recorder for each thread", "a second one",
                  "destroy the first one before, or give it the model with add_model()");
  }
  ~OnePerThread() {
    const std::lock_guard lock(mutex());
    threads().erase(thread_);
  }
  OnePerThread(const OnePerThread&) = delete;
  OnePerThread& operator=(const OnePerThread&) = delete;

 private:
  static std::mutex& mutex() {
    static std::mutex of_all;
    return of_all;
  }
  static std::set<std::thread::id>& threads() {
    static std::set<std::thread::id> with_recorder;
    return with_recorder;
  }

  const std::thread::id thread_ = std::this_thread::get_id();
};

}  // namespace

// What a Recorder does where its RunLog writes.
class Recorder::Impl : public StepObserver {
 public:
  Impl(std::shared_ptr<RunLog::Impl> log, const torch::nn::Module& model,
       const RecorderOptions& options);
  ~Impl() override;

  void add_model(const torch::nn::Module& model, const std::string& prefix);
  void add_optimizer(const torch::optim::Optimizer& optimizer);

  void before_step(std::int64_t step) override;
  void step_began(std::int64_t step) override;
  void before_close(Outcome outcome) override;

 private:
  // What is installed in a step that is looked at.
  struct Looking {
    explicit Looking(const std::shared_ptr<SampleState>& looks);
    ~Looking();
    Looking(const Looking&) = delete;
    Looking& operator=(const Looking&) = delete;

    std::shared_ptr<SampleState> state;
    OperatorTrace trace;
    ThreadStateGuard in_force;
  };

  bool is_own_thread() const { return std::this_thread::get_id() == thread_; }
  // The line "model".
  nlohmann::ordered_json describe() const;
  void begin_sample();
  // Ends the step in progress. It is written unless it is incomplete.
  void end_sample(bool is_complete);
  // The sample; null, with a warning, if something could not be looked at.
  nlohmann::ordered_json finish(SampleState& state);
  void warn_once(const std::string& why);

  const OnePerThread only_;
  const std::shared_ptr<RunLog::Impl> log_;
  const std::int64_t every_;
  const std::thread::id thread_ = std::this_thread::get_id();
  const int exceptions_;  // in progress when it was constructed
  const std::shared_ptr<RecordedModel> model_;
  const std::shared_ptr<SampleListener> listener_ = std::make_shared<SampleListener>();
  std::vector<RecordedOptimizer> optimizers_;
  std::optional<std::int64_t> first_;  // step
  std::optional<std::int64_t> step_;   // in progress
  bool has_warned_ = false;
  events::Listen listen_;
  std::optional<Looking> looking_;
};

Recorder::Impl::Looking::Looking(const std::shared_ptr<SampleState>& looks)
    : state(looks),
      in_force(kSampleState, [kept = looks](const c10::DebugInfoBase*) { return kept; }) {}

Recorder::Impl::Looking::~Looking() {
  state->stop();
  if (in_force.end() == ThreadStateGuard::End::elsewhere) trace.abandon();
}

Recorder::Impl::Impl(std::shared_ptr<RunLog::Impl> log, const torch::nn::Module& model,
                     const RecorderOptions& options)
    : log_(std::move(log)),
      every_(options.every()),
      exceptions_(std::uncaught_exceptions()),
      model_(std::make_shared<RecordedModel>(model)),
      listen_(listener_) {
  log_->add_observer(*this);
}

Recorder::Impl::~Impl() {
  log_->remove_observer(*this);
  try {
    // Another thread may have closed the log, which then takes no more samples.
    end_sample(std::uncaught_exceptions() == exceptions_ && !log_->is_closed());
  } catch (const std::exception& error) {  // a file that cannot be written
    warn_once(error.what());
  }
}

void Recorder::Impl::add_model(const torch::nn::Module& model, const std::string& prefix) {
  if (first_.has_value())
    throw Error(kRecorder, "models before the first step",
                "add_model() in step " + std::to_string(*step_), "call it before set_step()");
  model_->add(model, prefix);
}

void Recorder::Impl::add_optimizer(const torch::optim::Optimizer& optimizer) {
  optimizers_.emplace_back(optimizer);
}

void Recorder::Impl::before_step(std::int64_t step) {
  if (!is_own_thread())
    throw Error(kRecorder, "set_step() on the thread that constructed the Recorder",
                "a call on another thread", "construct the Recorder on the thread that trains");
  if (step_ != step) end_sample(/*is_complete=*/true);
}

void Recorder::Impl::step_began(std::int64_t step) {
  if (step_ == step) return;
  step_ = step;
  if (!first_.has_value()) {
    first_ = step;
    const auto line = describe();
    log_->add(step,
              [&](RunFiles& files, const Moment& when) { files.add_sample(when, "model", line); });
  }
  if ((step - *first_) % every_ == 0) begin_sample();
}

nlohmann::ordered_json Recorder::Impl::describe() const {
  auto line = model_->describe(log_->world_size());
  auto optimizers = nlohmann::ordered_json::array();
  for (const RecordedOptimizer& optimizer : optimizers_) optimizers.push_back(optimizer.describe());
  line["optimizers"] = std::move(optimizers);
  return line;
}

void Recorder::Impl::before_close(Outcome outcome) {
  end_sample(outcome != Outcome::failed);
}

void Recorder::Impl::begin_sample() {
  try {
    const QuietScope quiet;
    model_->refresh();
    looking_.emplace(std::make_shared<SampleState>(model_, listener_->scales()));
  } catch (const std::exception& error) {
    return warn_once(error.what());
  }
  listener_->show(looking_->state);
}

nlohmann::ordered_json Recorder::Impl::finish(SampleState& state) try {
  if (const auto failure = state.failure()) {
    warn_once(*failure);
    return nullptr;
  }
  const Observation observation(state.observed());
  const QuietScope quiet;
  std::optional<std::int64_t> state_bytes;
  for (RecordedOptimizer& optimizer : optimizers_)
    state_bytes = state_bytes.value_or(0) + optimizer.bytes();
  return state.finish(observation.step_time(), state_bytes);
} catch (const std::exception& error) {
  warn_once(error.what());
  return nullptr;
}

void Recorder::Impl::end_sample(bool is_complete) {
  if (!looking_.has_value()) return;
  const auto state = looking_->state;
  state->stop();
  listener_->show(nullptr);
  // Nothing can be removed from another thread's records.
  if (!is_own_thread()) return state->fail("the RunLog was closed on another thread");
  looking_.reset();
  const nlohmann::ordered_json line = is_complete ? finish(*state) : nullptr;
  state->discard();
  if (line.is_null()) return;
  log_->add(step_,
            [&](RunFiles& files, const Moment& when) { files.add_sample(when, "sample", line); });
}

void Recorder::Impl::warn_once(const std::string& why) {
  if (std::exchange(has_warned_, true)) return;
  log()->warn("{}: step {} is left out of the samples, and others may be: {}", kRecorder,
              step_.value_or(0), why);
}

Recorder::Recorder(RunLog& log, const torch::nn::Module& model, const RecorderOptions& options) {
  if (options.every() < 1)
    throw Error(kRecorder, "an interval of at least 1 step", std::to_string(options.every()));
  if (log.writes()) impl_ = std::make_unique<Impl>(log.impl_, model, options);
}

Recorder::~Recorder() = default;

void Recorder::add_model(const torch::nn::Module& model, const std::string& prefix) {
  if (impl_ != nullptr) impl_->add_model(model, prefix);
}

void Recorder::add_optimizer(torch::optim::Optimizer& optimizer) {
  if (impl_ != nullptr) impl_->add_optimizer(optimizer);
}

}  // namespace semitone::report

#pragma once

#include "semitone/core/events.h"
#include "src/core/thread_state.h"
#include "src/report/forward_memory.h"
#include "src/report/observation.h"
#include "src/report/operator_table.h"
#include "src/report/recorded_model.h"
#include "src/report/sampled_tensors.h"
#include "src/report/step_timer.h"
#include "src/report/weight_tracker.h"

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/core/Storage.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <nlohmann/json_fwd.hpp>

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>

namespace semitone::report {

// The kind of SampleState among the states of a thread, in addition to those of thread_state.h.
inline constexpr std::string_view kSampleStateName = "semitone recorder";
inline constexpr c10::DebugInfoKind kSampleState = thread_state_kind(204, &kSampleStateName);

// What a Recorder knows about loss scales.
struct KnownScales {
  std::optional<double> scale;  // of loss 0, in force
  bool has_other_losses = false;
};

// How a layer of batch norm computes.
struct BatchNormUse {
  bool training = false;  // with the statistics of the batch
  // Of the running statistics; Undefined: it has none.
  c10::ScalarType dtype = c10::ScalarType::Undefined;
};

// One step that is looked at. LibTorch carries it to the threads that work for this one. Its
// functions are called within an Observation and a QuietScope. Times are those of the step's clock.
class SampleState : public c10::DebugInfoBase, public std::enable_shared_from_this<SampleState> {
 public:
  // Looks at the weights, and begins the step.
  SampleState(std::shared_ptr<const RecordedModel> model, const KnownScales& known);

  // The state in force on this thread that looks now, or null.
  static std::shared_ptr<SampleState> looking();
  bool is_looking() const { return is_looking_.load(std::memory_order_relaxed); }
  void stop() { is_looking_ = false; }
  // Keeps the first reason for which the sample is left out, and stops.
  void fail(const std::string& why);
  std::optional<std::string> failure() const;
  // Stops, and lets go of what only a sample needs. A task that outlives the step keeps this object.
  void discard();

  const RecordedModel& model() const { return *model_; }
  // Of all observations in this step.
  ObservedTime& observed() { return observed_; }

  // An operator is about to run on this thread. Returns the pass to which it belongs.
  Pass begin_operator(double now);
  void begin_node(double now);
  void end_node(double now);
  void add_operator(const OperatorKind& kind, const OperatorCost& cost);
  // The result of an operator that has a parameter, in the forward pass.
  void add_output(const OutputKey& key, const at::Tensor& output);
  // Memory that an operator made, in the forward pass.
  void add_memory(const c10::Storage& storage);
  // A batch norm in the forward pass. If it normalises with running statistics, or updates them, they
  // have a dtype.
  void add_batch_norm(const std::string& layer, const BatchNormUse& use);

  void add(const events::LossScaleUpdated& event);
  void add(const events::StepSkipped& event);
  void add(const events::GradientsUnscaled& event);
  void add(const events::GradientsReady& event);
  void begin_phase(events::Phase phase, double now);
  void end_phase(double now);

  // The line "sample" of a step that ends now.
  nlohmann::ordered_json finish(double now, std::optional<std::int64_t> optimizer_state_bytes);

 private:
  bool is_own_thread() const { return std::this_thread::get_id() == thread_; }
  void watch_gradient(const at::Tensor& output, const OutputKey& key);
  void add_remaining_gradients();
  // Whether gradients that no event names are known not to be multiplied by a scale: none has been
  // heard of, and an optimizer has used gradients. Until then they may be those that a scaler
  // accumulates for its first step.
  bool has_unscaled_gradients() const;
  // What the gradients of outputs, as they were counted, are still to be divided by; nothing if
  // that is no power of two, or not known.
  std::optional<double> output_scale() const;

  const std::shared_ptr<const RecordedModel> model_;
  const std::thread::id thread_ = std::this_thread::get_id();
  std::atomic<bool> is_looking_{true};
  ObservedTime observed_;
  // Gradients of outputs are divided by it before they are counted. 1 for powers of two, by which
  // counts can be divided later.
  double early_scale_ = 1;
  mutable std::mutex mutex_;  // of all that follows
  KnownScales scales_;
  bool has_update_ = false;       // of the scale of loss 0
  bool scale_changes_ = false;    // between two updates in this step
  bool has_scaled_step_ = false;  // of an optimizer whose gradients were multiplied by a scale
  bool is_skipped_ = false;
  std::optional<std::string> failure_;
  SampledTensors tensors_;
  // Of GradientsUnscaled, for the next GradientsReady: the program may clip them in between.
  std::map<const RecordedModel::Entry*, SampledValues> unscaled_;
  WeightTracker tracker_;
  OperatorTable operators_;
  ForwardMemory forward_memory_;
  std::map<std::string, BatchNormUse> batch_norms_;  // by layer
  StepTimer timer_;
};

}  // namespace semitone::report

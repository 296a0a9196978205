#pragma once

#include "semitone/amp/captured_step.h"
#include "src/amp/mixed_precision_impl.h"
#include "src/amp/step_graph.h"
#include "src/optim/capturable_step.h"
#include "src/scaling/late_flags.h"
#include "src/scaling/loss_scale_on_device.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace semitone::amp {

inline constexpr auto kCapturedStep = "amp.captured_step";

// A step is in one of three stages. It warms up until options.warmup steps have run operator by
// operator, which also finds the parameters that get gradients. The next step is captured: record()
// runs forward, backward and the update on the device's memory, without changing the host's state.
// All later steps replay: they copy the batch and the numbers to the device and launch the graph.
// The device updates the loss scale itself. The host's state (scales, counters, step counts) follows
// one step later, when found_inf has arrived (end_later()), or at once if the host has to look at
// the gradients of an overflow (end_step()). Until found_inf is known, the rules of the next step
// are sent for either result. If memory, state
// or trained parameters have changed (is_current), the step is dropped, one step runs operator by
// operator, and the next is captured again.
struct CapturedStep::Impl {
  using State = MixedPrecision::Impl;
  using Batch = std::vector<at::Tensor>;

  // The shapes, dtypes and devices of a batch.
  struct Shape {
    std::vector<std::int64_t> sizes;
    at::ScalarType dtype;
    bool operator==(const Shape&) const = default;
  };

  // A parameter or buffer, with its memory and requires_grad at capture.
  struct Place {
    explicit Place(at::Tensor tensor_)
        : tensor(std::move(tensor_)),
          data(tensor.const_data_ptr()),
          requires_grad(tensor.requires_grad()) {}
    bool is_current() const {
      return tensor.const_data_ptr() == data && tensor.requires_grad() == requires_grad;
    }
    at::Tensor tensor;
    const void* data;
    bool requires_grad;
  };

  // While this object exists, these parameters have no gradients; then their own gradients are
  // restored, instead of those of the step. In a graph these would be accumulated in memory that
  // other code may own by then.
  class OthersAside {
   public:
    explicit OthersAside(std::vector<at::Tensor> others) : others_(std::move(others)) {
      for (const at::Tensor& other : others_) {
        grads_.push_back(other.grad());
        other.mutable_grad().reset();
      }
    }
    ~OthersAside() {
      for (std::size_t i = 0; i < others_.size(); ++i) others_[i].mutable_grad() = grads_[i];
    }
    OthersAside(const OthersAside&) = delete;
    OthersAside& operator=(const OthersAside&) = delete;

   private:
    std::vector<at::Tensor> others_;
    std::vector<at::Tensor> grads_;
  };

  // The tensors that a captured step reads and writes.
  struct Captured {
    Captured(optim::FusedOptimizer& optimizer, std::span<const at::Tensor> parameters,
             const LossScaleOptions& rule, c10::Device device)
        : step(optimizer, parameters), scale(rule, device) {}
    Batch batch;
    optim::CapturableStep step;
    LossScaleOnDevice scale;
    // What the device has there: before the last step if `late` is defined, otherwise now. None: it
    // has to be sent.
    std::optional<detail::LossScaleState> scale_there;
    std::shared_ptr<detail::LateFlags>
        late;  // found_inf of the last step, if the host was not to wait
    std::vector<Place> model;
    at::Tensor loss;
    at::Tensor found_inf;                // undefined in plain training
    std::vector<State::SetAside> grads;  // of the optimizer's parameters, for messages
  };

  Impl(MixedPrecision& mixed_, State& state_, optim::FusedOptimizer& optimizer_,
       LossFunction loss_function_, const CapturedStepOptions& options_)
      : mixed(mixed_),
        state(state_),
        record(state_.of(optimizer_, "captured_step")),
        optimizer(optimizer_),
        loss_function(std::move(loss_function_)),
        options(options_),
        device(device_of(optimizer_)),
        graph(make_graph(device)) {}

  // Null if steps on the device run operator by operator.
  static std::unique_ptr<StepGraph> make_graph(c10::Device device);
  Result run(const Batch& batch);
  Result warm_up(const Batch& batch);
  Result run_eagerly(const Batch& batch);
  void capture(const Batch& batch);
  void run_on_device(Captured& into);
  Result replay(const Batch& batch);
  void settle_others();
  bool is_open() const;
  bool may_end_later() const;
  StepResult end_later();
  Step end_step();
  void note_step();

  const LossScaler& scaler() const { return state.scaler(options.loss_id(), "captured_step"); }
  static std::vector<Shape> shapes_of(const Batch& batch);
  Batch moved_to_device(const Batch& batch) const;
  at::Tensor loss_of(const Batch& batch) const;
  void back_propagate(const at::Tensor& loss);
  at::Tensor take_found_inf();
  void send_numbers(Captured& to) const;
  bool is_current();
  std::vector<bool> trained() const;
  std::vector<at::Tensor> find_others() const;
  std::vector<at::Tensor> find_elsewhere() const;
  void show_gradients_of_others();

  MixedPrecision& mixed;
  State& state;
  State::OptimizerRecord& record;
  optim::FusedOptimizer& optimizer;
  LossFunction loss_function;
  CapturedStepOptions options;
  c10::Device device;
  std::unique_ptr<StepGraph> graph;  // null: none on this device

  std::int64_t warm_steps = 0;
  std::vector<Shape> shapes;             // of the batches that they were taken with
  std::vector<bool> trained_in_warm_up;  // what trained() was
  std::vector<at::Tensor> parameters;    // of the optimizer, that had gradients in the last of them
  std::unique_ptr<Captured> captured;
};

}  // namespace semitone::amp

#pragma once

#include "semitone/core/events.h"
#include "tests/support/tensors.h"

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace semitone::test {

// A GradientsReady, or a GradientsUnscaled, without weights. Gradients are copies: the step drops or
// changes the tensors.
struct RecordedGradients {
  std::vector<at::Tensor> parameters;
  std::vector<at::Tensor> gradients;
  std::vector<at::Tensor> weights;
  double scale;
};

// Records the events of this thread during its lifetime.
class RecordedEvents {
 public:
  const std::vector<RecordedGradients>& gradients() const { return recorder_->gradients; }
  const std::vector<RecordedGradients>& unscaled() const { return recorder_->unscaled; }
  const std::vector<events::LossScaleUpdated>& updates() const { return recorder_->updates; }
  const std::vector<events::StepSkipped>& skips() const { return recorder_->skips; }
  const std::vector<events::Cast>& casts() const { return recorder_->casts; }
  // Parts of steps as they began and ended, in the order of events: "backward(unscale() optimizer())".
  std::string phases() const { return recorder_->phases; }
  // Names of operators and of their kernels.
  const std::vector<std::pair<std::string, std::string>>& operators() const {
    return recorder_->operators;
  }

 private:
  struct Recorder : events::Listener {
    using Listener::on;
    bool wants_gradients() const override { return true; }
    void on(const events::Cast& event) override { casts.push_back(event); }
    void on(const events::LossScaleUpdated& event) override { updates.push_back(event); }
    void on(const events::StepSkipped& event) override { skips.push_back(event); }
    void on(const events::PhaseBegan& event) override {
      if (!phases.empty() && phases.back() == ')') phases += ' ';
      phases += std::string(events::name_of(event.phase)) + "(";
    }
    void on(const events::PhaseEnded&) override { phases += ')'; }
    void on(const events::OperatorReplaced& event) override {
      operators.emplace_back(event.op, event.kernel);
    }
    void on(const events::GradientsReady& event) override {
      gradients.push_back({event.parameters.vec(), copies(event.gradients.vec()),
                           event.weights.vec(), event.scale});
    }
    void on(const events::GradientsUnscaled& event) override {
      unscaled.push_back({event.parameters.vec(), copies(event.gradients.vec()), {}, event.scale});
    }
    std::vector<RecordedGradients> gradients;
    std::vector<RecordedGradients> unscaled;
    std::vector<std::pair<std::string, std::string>> operators;
    std::string phases;
    std::vector<events::Cast> casts;
    std::vector<events::LossScaleUpdated> updates;
    std::vector<events::StepSkipped> skips;
  };
  std::shared_ptr<Recorder> recorder_ = std::make_shared<Recorder>();
  events::Listen listen_{recorder_};
};

}  // namespace semitone::test

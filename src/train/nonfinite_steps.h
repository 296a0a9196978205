#pragma once

#include "semitone/comm/group.h"
#include "semitone/report/nonfinite_check.h"
#include "src/train/observer.h"

#include <torch/nn/module.h>

#include <cstdint>
#include <optional>

namespace semitone::train {

// Looks for infs and NaNs in the steps of a training, on all ranks.
class NonFiniteSteps {
 public:
  // @param is_on       equal on all ranks; false: nothing is done
  // @param first_step  the number of the next step
  NonFiniteSteps(bool is_on, const torch::nn::Module& model, std::int64_t first_step,
                 comm::Group group);

  // Every rank calls it after each step. If a rank found something in a step that was skipped, the
  // observer gets the event. If the step was taken, the rank that found it throws a DivergedError,
  // and others throw DivergedElsewhere. Of several ranks the first that can name an operator says
  // it: others may have received its values. If a check itself failed, all ranks throw an Error.
  void after_step(bool was_skipped, Observer& observer);

  // Sets the number of the next step. Every rank may call it between two steps. Findings of a step
  // that was not completed are dropped.
  void continue_at(std::int64_t step);

 private:
  std::optional<report::NonFiniteCheck> check_;
  comm::Group group_;
};

}  // namespace semitone::train

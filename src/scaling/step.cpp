#include "semitone/scaling/step.h"

#include "src/scaling/late_flags.h"

namespace semitone::amp {

Step StepResult::get() const {
  if (flags_ == nullptr) return step_;
  return flags_->any_set() ? Step::skipped : Step::stepped;
}

bool StepResult::is_known() const {
  return flags_ == nullptr || flags_->is_there();
}

}  // namespace semitone::amp

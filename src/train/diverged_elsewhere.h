#pragma once

#include "semitone/core/error.h"

namespace semitone::train {

// Another rank of the training has found the reason for the end, and says it.
class DivergedElsewhere : public DivergedError {
 public:
  using DivergedError::DivergedError;
};

}  // namespace semitone::train

#pragma once

// Internal interface: other rooms include this header.

#include "semitone/scaling/step.h"
#include "src/kernels/read_later.h"

namespace semitone::amp::detail {

// The found_inf flags of a step that the device decides.
class LateFlags : public kernels::ReadLater {
 public:
  using ReadLater::ReadLater;
};

}  // namespace semitone::amp::detail

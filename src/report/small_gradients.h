#pragma once

#include "src/report/verdict_rules.h"

#include <string>

namespace semitone::report {

// What to change if gradients are too small for the run's 16-bit format, which there must be: a
// larger loss scale if the largest gradients leave room for it, or else bfloat16.
std::string remedy_for_small_gradients(const Evidence& evidence);

}  // namespace semitone::report

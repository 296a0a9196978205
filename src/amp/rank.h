#pragma once

#include "semitone/core/env.h"

namespace semitone::amp {

// Whether this process speaks for all that train together: what is alike on every rank is logged
// once.
inline bool is_first_rank() {
  return env::get(env::kRank).value_or("0") == "0";
}

}  // namespace semitone::amp

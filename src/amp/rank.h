#pragma once

#include "src/core/env.h"

namespace semitone::amp {

// Whether this process logs messages that concern all ranks: they are logged once.
inline bool is_first_rank() {
  return env::get(env::kRank).value_or("0") == "0";
}

}  // namespace semitone::amp

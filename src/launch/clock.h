#pragma once

#include "src/net/clock.h"

namespace semitone::launch {

using net::Clock;
using net::Time;

}  // namespace semitone::launch

#pragma once

#include <chrono>

namespace semitone::launch {

using Clock = std::chrono::steady_clock;
using Time = Clock::time_point;

}  // namespace semitone::launch

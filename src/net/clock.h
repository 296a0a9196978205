#pragma once

#include <chrono>

namespace semitone::net {

using Clock = std::chrono::steady_clock;
using Time = Clock::time_point;

}  // namespace semitone::net

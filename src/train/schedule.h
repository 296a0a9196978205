#pragma once

#include <cstdint>
#include <string_view>

namespace semitone::train {

// The schedule of the learning rate over a training.
enum class Schedule {
  constant,
  // Rises linearly over the first quarter of the steps, then falls to 0 along half a cosine. One
  // epoch with it reaches what takes several with a constant rate.
  cosine,
};

std::string_view name_of(Schedule schedule);
// Parses "constant" or "cosine". Error for anything else.
Schedule parse_schedule(std::string_view name);

// Returns the learning rate of one step.
// @param peak   the constant rate, or the maximum of the cosine schedule
// @param step   from 0
// @param steps  of the whole training; above step
double learning_rate(Schedule schedule, double peak, std::int64_t step, std::int64_t steps);

}  // namespace semitone::train

#pragma once

#include <cstdint>
#include <string_view>

namespace semitone::train {

/// How the learning rate moves over a training.
enum class Schedule {
  constant,
  /// Up in a line over the first quarter of the steps, then down to 0 along half a cosine: reaches
  /// in one epoch what a constant rate needs several for.
  cosine,
};

std::string_view name_of(Schedule schedule);
/// "constant" or "cosine". Error for anything else.
Schedule parse_schedule(std::string_view name);

/// The learning rate of one step.
/// @param peak   the rate that a constant schedule has throughout and the cosine reaches
/// @param step   from 0
/// @param steps  of the whole training; above step
double learning_rate(Schedule schedule, double peak, std::int64_t step, std::int64_t steps);

}  // namespace semitone::train

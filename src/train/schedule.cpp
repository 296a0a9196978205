#include "src/train/schedule.h"

#include "semitone/core/error.h"

#include <cmath>
#include <numbers>
#include <string>

namespace semitone::train {

std::string_view name_of(Schedule schedule) {
  return schedule == Schedule::cosine ? "cosine" : "constant";
}

Schedule parse_schedule(std::string_view name) {
  for (const Schedule schedule : {Schedule::constant, Schedule::cosine}) {
    if (name == name_of(schedule)) return schedule;
  }
  throw Error("train.schedule", "constant or cosine", "'" + std::string(name) + "'");
}

double learning_rate(Schedule schedule, double peak, std::int64_t step, std::int64_t steps) {
  if (schedule == Schedule::constant) return peak;
  const double warm_up = std::ceil(0.25 * static_cast<double>(steps));
  const auto done = static_cast<double>(step);
  if (done < warm_up) return peak * (done + 1) / warm_up;
  const double left =
      (static_cast<double>(steps) - done) / (static_cast<double>(steps) - warm_up + 1);
  return peak * 0.5 * (1 - std::cos(std::numbers::pi * left));
}

}  // namespace semitone::train

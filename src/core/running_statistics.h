#pragma once

#include <string_view>

namespace semitone {

// Whether an argument is a running statistic that an operator of ATen writes to in training. The
// schemas of batch_norm, instance_norm and those that they call do not say so.
inline bool is_running_statistic(std::string_view op, std::string_view argument) {
  if (argument != "running_mean" && argument != "running_var") return false;
  const auto has = [&](std::string_view part) { return op.find(part) != std::string_view::npos; };
  return (has("batch_norm") || has("instance_norm")) && !has("backward") && !has("no_training") &&
         !has("no_update");
}

}  // namespace semitone

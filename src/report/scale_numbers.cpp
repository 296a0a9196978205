#include "src/report/scale_numbers.h"

#include <algorithm>

namespace semitone::report {

ScaleNumbers::Number ScaleNumbers::number_of(const events::LossScaleUpdated& event) {
  const auto known = std::find_if(scales_.begin(), scales_.end(), [&](const Scale& scale) {
    return scale.loss_id == event.loss_id && scale.value == event.before;
  });
  if (known != scales_.end()) {
    known->value = event.after;
    return {known->number, /*is_new=*/false};
  }
  std::int64_t number = event.loss_id;
  while (std::any_of(scales_.begin(), scales_.end(),
                     [&](const Scale& scale) { return scale.number == number; })) {
    ++number;
  }
  scales_.push_back({event.loss_id, number, event.after});
  return {number, /*is_new=*/true};
}

}  // namespace semitone::report

#pragma once

#include "semitone/core/events.h"

#include <cstdint>
#include <vector>

namespace semitone::report {

// Numbers the loss scales of a training, whose events have a loss_id only: two GradScalers have 0
// both.
class ScaleNumbers {
 public:
  struct Number {
    std::int64_t value;
    bool is_new;  // its first event
  };

  // Of an event's scale. The first one with a loss_id has that number, another one the next number
  // that is free. One scale's events follow each other: each begins where the last one ended.
  Number number_of(const events::LossScaleUpdated& event);

 private:
  struct Scale {
    std::int64_t loss_id;
    std::int64_t number;
    double value;
  };
  std::vector<Scale> scales_;
};

}  // namespace semitone::report

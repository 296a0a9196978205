#include "tests/support/accelerator/timeline.h"

#include <algorithm>

namespace semitone::test::accelerator {

void join(Clock& clock, const Clock& other) {
  if (clock.size() < other.size()) clock.resize(other.size());
  for (std::size_t i = 0; i < other.size(); ++i) clock[i] = std::max(clock[i], other[i]);
}

bool contains(const Clock& clock, Moment moment) {
  return moment.stream < clock.size() && clock[moment.stream] >= moment.time;
}

std::size_t Timeline::number(c10::Stream stream) {
  const auto [found, is_new] =
      numbers_.emplace(std::pair(stream.device_index(), stream.id()), streams_.size());
  if (is_new) {
    streams_.push_back(stream);
    clocks_.emplace_back();
  }
  return found->second;
}

Moment Timeline::launch(c10::Stream stream) {
  const std::size_t index = number(stream);
  Clock& clock = clocks_[index];
  join(clock, host_);
  if (clock.size() <= index) clock.resize(index + 1);
  return {index, ++clock[index]};
}

const Clock& Timeline::past(c10::Stream stream) {
  Clock& clock = clocks_[number(stream)];
  join(clock, host_);
  return clock;
}

void Timeline::block(c10::Stream stream, const Clock& clock) {
  join(clocks_[number(stream)], clock);
}

Clock Timeline::past(c10::DeviceIndex device) {
  Clock all;
  for (std::size_t i = 0; i < streams_.size(); ++i) {
    if (streams_[i].device_index() == device) join(all, clocks_[i]);
  }
  return all;
}

}  // namespace semitone::test::accelerator

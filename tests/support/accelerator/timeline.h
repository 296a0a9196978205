#pragma once

#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

// Which work is ordered before which, whatever the speed of the streams: vector clocks.
namespace semitone::test::accelerator {

// The last moment of each stream that is in the past.
using Clock = std::vector<std::uint64_t>;

void join(Clock& clock, const Clock& other);

// A piece of work: the n-th on a stream.
struct Moment {
  std::size_t stream = 0;
  std::uint64_t time = 0;
};

bool contains(const Clock& clock, Moment moment);

// The clocks of all streams and of the host. All threads of the host count as one, so that a thread
// that waits is taken to have told the others.
class Timeline {
 public:
  // Begins a piece of work on a stream. It follows the earlier work there, and all that the host
  // has waited for.
  Moment launch(c10::Stream stream);
  // What work on the stream that is launched now would follow.
  const Clock& past(c10::Stream stream);
  // Work on the stream follows what the clock contains.
  void block(c10::Stream stream, const Clock& clock);
  // The host has waited for what the clock contains.
  void wait(const Clock& clock) { join(host_, clock); }
  const Clock& host() const { return host_; }
  // All streams of a device that were used.
  Clock past(c10::DeviceIndex device);
  c10::Stream stream_of(Moment moment) const { return streams_[moment.stream]; }

 private:
  std::size_t number(c10::Stream stream);

  Clock host_;
  std::vector<c10::Stream> streams_;
  std::vector<Clock> clocks_;
  std::map<std::pair<c10::DeviceIndex, c10::StreamId>, std::size_t> numbers_;
};

}  // namespace semitone::test::accelerator

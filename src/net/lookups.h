#pragma once

#include "src/net/clock.h"

#include <chrono>
#include <optional>
#include <string>

// Look-ups of hosts' names.
namespace semitone::net {

// How long a name that cannot be resolved is looked up again.
struct LookupTimeouts {
  std::chrono::milliseconds any{};  // whatever the reason
  // If there is no such name (for any error but EAI_AGAIN). That of a pod appears some time after
  // the pod has started; one that is mistyped never does.
  std::chrono::milliseconds unknown = std::chrono::seconds(60);
};

// When a name is looked up again, and for how long. The time begins with the object.
class LookupRetries {
 public:
  explicit LookupRetries(const LookupTimeouts& timeouts) : timeouts_(timeouts) {}

  // The time of the next look-up, or of the end if that comes first. Nothing if it is over. Warns
  // once after some seconds.
  // @param lookup_error, problem  of the last look-up, as in net::Result
  std::optional<Time> next(int lookup_error, const std::string& problem);

  // The last look-up found the name.
  void resolved() { unknown_since_.reset(); }

  // The limit that the last next() went by.
  std::chrono::milliseconds limit() const { return limit_; }

 private:
  LookupTimeouts timeouts_;
  Time start_ = Clock::now();
  std::chrono::milliseconds limit_{};
  std::optional<Time> unknown_since_;
  bool warned_ = false;
};

}  // namespace semitone::net

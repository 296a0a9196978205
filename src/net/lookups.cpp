#include "src/net/lookups.h"

#include "src/core/log.h"

#include <fmt/format.h>
#include <netdb.h>

#include <algorithm>
#include <utility>

namespace semitone::net {
namespace {

// All ranks of a job ask the same name servers.
constexpr std::chrono::seconds kInterval(1);
constexpr std::chrono::seconds kWarnAfter(5);

}  // namespace

std::optional<Time> LookupRetries::next(int lookup_error, const std::string& problem) {
  const Time now = Clock::now();
  limit_ = timeouts_.any;
  Time end = start_ + limit_;
  if (lookup_error == EAI_AGAIN) {
    unknown_since_.reset();
  } else {
    if (!unknown_since_.has_value()) unknown_since_ = now;
    if (*unknown_since_ + timeouts_.unknown < end) {
      limit_ = timeouts_.unknown;
      end = *unknown_since_ + limit_;
    }
  }
  if (now >= end) return std::nullopt;
  if (now - start_ >= kWarnAfter && !std::exchange(warned_, true)) {
    log()->warn("the master's name cannot be resolved yet: {}; trying again for up to {:.3g} s",
                problem, std::chrono::duration<double>(limit_).count());
  }
  return std::min<Time>(end, now + kInterval);
}

}  // namespace semitone::net

#include "src/comm/network.h"

#include "semitone/core/error.h"
#include "src/comm/ranks.h"
#include "src/core/log.h"
#include "src/net/sockets.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <thread>
#include <utility>

namespace semitone::comm {
namespace {

// All ranks of a job ask the same name servers.
constexpr std::chrono::seconds kLookupInterval(1);
constexpr std::chrono::seconds kWarnAfter(5);

std::string to_text(std::chrono::milliseconds duration) {
  return seconds(std::round(std::chrono::duration<double>(duration).count() * 10) / 10);
}

Descriptor require_listening(net::Result<Descriptor> listener, const std::string& host, int port) {
  listener = resolved(std::move(listener));
  if (listener.ok()) return std::move(listener.value);
  throw CommError(kInitComponent, fmt::format("to listen on {}:{}", host, port), listener.problem,
                  listener.error == EADDRINUSE
                      ? "another job uses the port: choose another with MASTER_PORT or in the URL"
                      : "MASTER_ADDR or the URL must name the machine that runs rank 0",
                  {0});
}

}  // namespace

void throw_unresolved(const std::string& problem) {
  throw Error(kInitComponent, "a master address that can be resolved", problem,
              "check MASTER_ADDR or the host in the URL");
}

void LookupRetries::wait(int lookup_error, const std::string& problem) {
  const net::Time now = net::Clock::now();
  std::chrono::milliseconds limit = timeouts_.any;
  net::Time end = start_ + limit;
  if (lookup_error == EAI_AGAIN) {
    unknown_since_.reset();
  } else {
    if (!unknown_since_.has_value()) unknown_since_ = now;
    if (*unknown_since_ + timeouts_.unknown < end) {
      limit = timeouts_.unknown;
      end = *unknown_since_ + limit;
    }
  }
  if (now >= end) throw_unresolved(fmt::format("{}, for {}", problem, to_text(limit)));
  if (now - start_ >= kWarnAfter && !std::exchange(warned_, true)) {
    log()->warn("the master's name cannot be resolved yet: {}; trying again for up to {}", problem,
                to_text(limit));
  }
  std::this_thread::sleep_for(std::min<net::Clock::duration>(end - now, kLookupInterval));
}

Descriptor listen_on(const std::string& host, int port) {
  return require_listening(net::listen_on({host, port}), host, port);
}

Descriptor listen_on_all(int port) {
  return require_listening(net::listen_on_all(port), "all interfaces", port);
}

std::string address_of_interface(const std::string& name) {
  std::string names;
  for (const net::Interface& interface : net::interfaces()) {
    if (interface.name == name) return interface.address;
    const bool is_v4 = interface.address.find(':') == std::string::npos;
    if (is_v4) names.append(names.empty() ? "" : ", ").append(interface.name);
  }
  throw Error(kInitComponent, "a network interface with an address", fmt::format("'{}'", name),
              "there are: " + names);
}

}  // namespace semitone::comm

#include "src/comm/network.h"

#include "semitone/core/error.h"
#include "src/comm/ranks.h"
#include "src/net/sockets.h"

#include <fmt/format.h>

#include <cerrno>
#include <cmath>
#include <thread>
#include <utility>

namespace semitone::comm {
namespace {

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

void wait_to_look_up(net::LookupRetries& retries, int lookup_error, const std::string& problem) {
  const auto next = retries.next(lookup_error, problem);
  if (!next.has_value())
    throw_unresolved(fmt::format("{}, for {}", problem, to_text(retries.limit())));
  std::this_thread::sleep_until(*next);
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

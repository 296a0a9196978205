#include "src/launch/ports.h"

#include "semitone/core/error.h"

#include <fmt/format.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstdint>
#include <fstream>
#include <random>

namespace semitone::launch {
namespace {

// Stricter than listening: a socket that another program has bound without listening counts,
// and so does a connection that ended a minute ago.
bool is_port_unused(int port, std::string& problem) {
  sockaddr_in any{};
  any.sin_family = AF_INET;
  any.sin_port = htons(static_cast<std::uint16_t>(port));
  const Descriptor socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const auto* const address = reinterpret_cast<const sockaddr*>(&any);
  if (socket.is_open() && ::bind(socket.number(), address, sizeof any) == 0) return true;
  problem = reason_of(errno);
  return false;
}

}  // namespace

net::Result<std::vector<Descriptor>> listen_at(const Endpoint& endpoint) {
  return net::listen_on_own({endpoint.host, endpoint.port});
}

// From 20000 to 32767, without those that the system assigns to connections: usually 32768 to
// 60999, but nearly all on hosts with many connections.
int free_port() {
  constexpr int kFirst = 20000;
  constexpr int kLast = 32767;
  int taken_from = kLast + 1;
  int taken_to = kLast;
  std::ifstream("/proc/sys/net/ipv4/ip_local_port_range") >> taken_from >> taken_to;
  const bool nothing_left = taken_from <= kFirst && taken_to >= kLast;
  std::random_device random;
  std::uniform_int_distribution<int> ports(kFirst, kLast);
  std::string problem = "the system hands all of them out";
  for (int attempt = 0; attempt < 1000; ++attempt) {
    const int port = ports(random);
    if (!nothing_left && taken_from <= port && port <= taken_to) continue;
    if (is_port_unused(port, problem)) return port;
  }
  throw Error("launch.rendezvous", fmt::format("a free port from {} to {}", kFirst, kLast),
              problem);
}

}  // namespace semitone::launch

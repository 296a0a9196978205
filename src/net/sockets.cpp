#include "src/net/sockets.h"

#include "semitone/core/error.h"
#include "src/core/log.h"
#include "src/net/polling.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

namespace semitone::net {
namespace {

// So that new connections do not keep the owner of a listener from its other work.
constexpr int kMostAtOnce = 256;
constexpr auto kPause = std::chrono::milliseconds(100);

Descriptor open_socket(int family) {
  return above_standard_streams(
      Descriptor(::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)));
}

// Binds and listens. Returns the errno, or 0 on success.
int start_listening(const Descriptor& socket, const addrinfo& address) {
  // Otherwise a port whose last user has just ended would be refused for a minute.
  const int yes = 1;
  ::setsockopt(socket.number(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
  // So that [::] includes IPv4. IPv4's sockets refuse it.
  const int no = 0;
  ::setsockopt(socket.number(), IPPROTO_IPV6, IPV6_V6ONLY, &no, sizeof(no));
  const bool is_bound = ::bind(socket.number(), address.ai_addr, address.ai_addrlen) == 0;
  return is_bound && ::listen(socket.number(), SOMAXCONN) == 0 ? 0 : errno;
}

// Whether the socket has connected to itself: TCP allows it if nobody listens at a port, and the
// system chooses the same one for this end.
bool is_own_peer(const Descriptor& socket) {
  sockaddr_storage own{};
  sockaddr_storage peer{};
  auto* const own_pointer = reinterpret_cast<sockaddr*>(&own);
  auto* const peer_pointer = reinterpret_cast<sockaddr*>(&peer);
  socklen_t own_size = sizeof(own);
  socklen_t peer_size = sizeof(peer);
  return ::getsockname(socket.number(), own_pointer, &own_size) == 0 &&
         ::getpeername(socket.number(), peer_pointer, &peer_size) == 0 && own_size == peer_size &&
         std::memcmp(&own, &peer, own_size) == 0;
}

// Connects within the timeout. Returns the errno, or 0 on success.
int start_connection(const Descriptor& socket, const addrinfo& address,
                     std::chrono::milliseconds timeout) {
  if (::connect(socket.number(), address.ai_addr, address.ai_addrlen) == 0) return 0;
  if (errno != EINPROGRESS) return errno;
  const Time deadline = Clock::now() + timeout;
  std::vector<pollfd> events{{socket.number(), POLLOUT, 0}};
  // A signal may interrupt the wait.
  do {
    poll_until(events, deadline);
  } while (events.front().revents == 0 && Clock::now() < deadline);
  if (events.front().revents == 0) return ETIMEDOUT;
  int error = 0;
  socklen_t size = sizeof(error);
  ::getsockopt(socket.number(), SOL_SOCKET, SO_ERROR, &error, &size);
  return error;
}

// A socket for the first address of a host for which start(socket, address) returns 0. Otherwise
// the last errno, or no_socket if the system supports none of the addresses.
template <typename Start>
Result<Descriptor> start_first(const Address& address, int no_socket, Start start) {
  const auto resolved = resolve(address);
  if (!resolved.ok()) return failure_of<Descriptor>(resolved);
  int error = no_socket;
  for (const addrinfo* each = resolved.value.get(); each != nullptr; each = each->ai_next) {
    Descriptor socket = open_socket(each->ai_family);
    if (!socket.is_open()) continue;
    // A refusal says more than that another address cannot be reached, as that of a name for IPv6 on
    // a machine without it.
    const int result = start(socket, *each);
    if (result == 0) return {std::move(socket), 0, 0, ""};
    if (error != ECONNREFUSED) error = result;
  }
  return {Descriptor(), error, 0, reason_of(error)};
}

}  // namespace

Result<Descriptor> listen_on(const Address& address) {
  return start_first(address, EADDRNOTAVAIL, start_listening);
}

Result<std::vector<Descriptor>> listen_on_own(const Address& address) {
  const auto resolved = resolve(address);
  if (!resolved.ok()) return failure_of<std::vector<Descriptor>>(resolved);
  const auto own = interfaces();
  std::vector<Descriptor> listeners;
  int error = EADDRNOTAVAIL;
  for (const addrinfo* each = resolved.value.get(); each != nullptr; each = each->ai_next) {
    const std::string host = to_address(each->ai_addr).host;
    if (kind_of(host, own) == AddressKind::remote) continue;
    // getaddrinfo may return an address twice, for example if /etc/hosts lists it twice.
    const auto has_host = [&](const Descriptor& socket) { return address_of(socket).host == host; };
    if (std::any_of(listeners.begin(), listeners.end(), has_host)) continue;
    Descriptor socket = open_socket(each->ai_family);
    if (!socket.is_open()) continue;
    error = start_listening(socket, *each);
    if (error == EADDRINUSE) return {{}, error, 0, reason_of(error)};
    if (error == 0) listeners.push_back(std::move(socket));
  }
  if (listeners.empty()) return {{}, error, 0, reason_of(error)};
  return {std::move(listeners), 0, 0, ""};
}

std::vector<std::string> addresses_elsewhere(const Address& address) {
  const auto resolved = resolve(address);
  if (!resolved.ok()) return {};
  const auto own = interfaces();
  std::vector<std::string> found;
  for (const addrinfo* each = resolved.value.get(); each != nullptr; each = each->ai_next) {
    const std::string host = to_address(each->ai_addr).host;
    if (kind_of(host, own) == AddressKind::remote &&
        std::find(found.begin(), found.end(), host) == found.end())
      found.push_back(host);
  }
  return found;
}

Result<Descriptor> listen_on_all(int port) {
  auto listener = listen_on({"::", port});
  // On a machine without IPv6.
  if (!listener.ok() && listener.error != EADDRINUSE) listener = listen_on({"0.0.0.0", port});
  return listener;
}

Descriptor accept_from(const Descriptor& listener) {
  Descriptor accepted(::accept4(listener.number(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  try {
    return above_standard_streams(std::move(accepted));
  } catch (const Error&) {
    errno = EMFILE;
    return Descriptor();
  }
}

std::vector<Descriptor> Listener::accept(std::size_t most) {
  std::vector<Descriptor> accepted;
  if (!reserve_.is_open()) take_reserve();
  for (int n = 0; n < kMostAtOnce && descriptor() >= 0; ++n) {
    Descriptor connection = accept_from(socket_);
    if (connection.is_open()) {
      if (accepted.size() < most) accepted.push_back(std::move(connection));
    } else if (errno == EMFILE || errno == ENFILE) {
      refuse_one();
    } else if (errno != EINTR && errno != ECONNABORTED) {
      break;
    }
  }
  return accepted;
}

// Accepts a connection with the reserved descriptor, and closes it. Another thread may have taken the
// descriptor meanwhile: then, or if there is no connection, the next attempt comes later.
void Listener::refuse_one() {
  if (!std::exchange(warned_, true)) {
    log()->warn("connections are refused: this process has no file descriptor left (ulimit -n)");
  }
  reserve_.close();
  if (!accept_from(socket_).is_open()) paused_until_ = Clock::now() + kPause;
  take_reserve();
}

void Listener::take_reserve() {
  reserve_ = Descriptor(::fcntl(socket_.number(), F_DUPFD_CLOEXEC, STDERR_FILENO + 1));
}

Result<Descriptor> connect_to(const Address& address, std::chrono::milliseconds timeout) {
  return start_first(address, EHOSTUNREACH, [&](const Descriptor& socket, const addrinfo& each) {
    const int error = start_connection(socket, each, timeout);
    return error == 0 && is_own_peer(socket) ? ECONNREFUSED : error;
  });
}

}  // namespace semitone::net

#include "src/net/sockets.h"

#include "semitone/core/error.h"
#include "src/net/polling.h"

#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>
#include <utility>

namespace semitone::net {
namespace {

Descriptor open_socket(int family) {
  return above_standard_streams(
      Descriptor(::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)));
}

Result<Descriptor> failed(int error) {
  return {Descriptor(), error, 0, reason_of(error)};
}

// Binds and listens. Returns the errno, or 0 on success.
int start_listening(const Descriptor& socket, const sockaddr* address, socklen_t size) {
  // Otherwise a port whose last user has just ended would be refused for a minute.
  const int yes = 1;
  ::setsockopt(socket.number(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
  // So that [::] includes IPv4. IPv4's sockets refuse it.
  const int no = 0;
  ::setsockopt(socket.number(), IPPROTO_IPV6, IPV6_V6ONLY, &no, sizeof(no));
  if (::bind(socket.number(), address, size) != 0 || ::listen(socket.number(), SOMAXCONN) != 0)
    return errno;
  return 0;
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

}  // namespace

Result<Descriptor> listen_on(const Address& address) {
  const auto resolved = resolve(address);
  if (!resolved.ok()) return failure_of<Descriptor>(resolved);
  int error = EADDRNOTAVAIL;
  for (const addrinfo* each = resolved.value.get(); each != nullptr; each = each->ai_next) {
    Descriptor listener = open_socket(each->ai_family);
    if (!listener.is_open()) continue;
    error = start_listening(listener, each->ai_addr, each->ai_addrlen);
    if (error == 0) return {std::move(listener), 0, 0, ""};
  }
  return failed(error);
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
  } catch (const Error&) {  // no descriptor is left: the other end tries again
    return Descriptor();
  }
}

Result<Descriptor> connect_to(const Address& address, std::chrono::milliseconds timeout) {
  const auto resolved = resolve(address);
  if (!resolved.ok()) return failure_of<Descriptor>(resolved);
  int error = EHOSTUNREACH;
  for (const addrinfo* each = resolved.value.get(); each != nullptr; each = each->ai_next) {
    Descriptor socket = open_socket(each->ai_family);
    if (!socket.is_open()) continue;
    error = start_connection(socket, *each, timeout);
    if (error == 0) return {std::move(socket), 0, 0, ""};
  }
  return failed(error);
}

}  // namespace semitone::net

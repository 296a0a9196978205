#pragma once

#include "src/net/address.h"
#include "src/net/clock.h"

#include <chrono>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

// TCP. All sockets are closed by exec, do not block, and have numbers above those of the standard
// streams.
namespace semitone::net {

// Listens at the first of the host's addresses that the system accepts, and at no other, since
// anything that reaches the socket may write to it. Port 0: any free port.
Result<Descriptor> listen_on(const Address& address);

// Listens at each of the host's addresses that this machine has, with a socket for each, and at no
// other. The error is EADDRNOTAVAIL if it has none of them, and EADDRINUSE if one has another
// listener at this port. An address that the system refuses for another reason is left out if there
// are others.
Result<std::vector<Descriptor>> listen_on_own(const Address& address);

// The host's addresses that no interface of this machine has; none if it cannot be resolved.
std::vector<std::string> addresses_elsewhere(const Address& address);

// Listens on every interface, IPv6 and IPv4.
Result<Descriptor> listen_on_all(int port);

// The next connection, or a closed descriptor, with errno, if there is none or this process has no
// descriptor left.
Descriptor accept_from(const Descriptor& listener);

// A listening socket. Anything that reaches it may connect, as often as it likes.
class Listener {
 public:
  // Never has connections.
  Listener() = default;
  explicit Listener(Descriptor socket) : socket_(std::move(socket)) {}

  // The descriptor to poll for POLLIN; negative without a socket, or for a moment if nothing can be
  // accepted.
  int descriptor() const { return Clock::now() < paused_until_ ? -1 : socket_.number(); }
  // When that moment is over; Time::max() if descriptor() is not negative because of it. To be
  // called before descriptor(), so that a moment that ends between the two calls is not missed.
  Time deadline() const { return Clock::now() < paused_until_ ? paused_until_ : Time::max(); }

  // The new connections, a limited number in each call. Those beyond `most` are closed at once, as
  // are all while this process has no descriptor left (a warning is logged once): left in the queue,
  // they would end every poll. The other ends are expected to try again.
  std::vector<Descriptor> accept(std::size_t most);

 private:
  void refuse_one();
  void take_reserve();

  Descriptor socket_;
  // A second number of the socket, given up for the moment in which a connection is refused.
  Descriptor reserve_;
  Time paused_until_{};
  bool warned_ = false;
};

// Connects to the first of the host's addresses that answers. Each gets the timeout.
Result<Descriptor> connect_to(const Address& address, std::chrono::milliseconds timeout);

}  // namespace semitone::net

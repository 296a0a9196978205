#pragma once

#include "src/net/address.h"

#include <chrono>

// TCP. All sockets are closed by exec, do not block, and have numbers above those of the standard
// streams.
namespace semitone::net {

// Listens at the first of the host's addresses that the system accepts, and at no other, since
// anything that reaches the socket may write to it. Port 0: any free port.
Result<Descriptor> listen_on(const Address& address);

// Listens on every interface, IPv6 and IPv4.
Result<Descriptor> listen_on_all(int port);

// The next connection, or a closed descriptor.
Descriptor accept_from(const Descriptor& listener);

// Connects to the first of the host's addresses that answers. Each gets the timeout.
Result<Descriptor> connect_to(const Address& address, std::chrono::milliseconds timeout);

}  // namespace semitone::net

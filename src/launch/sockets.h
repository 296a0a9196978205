#pragma once

#include "semitone/launch/launch_options.h"
#include "src/launch/descriptor.h"

#include <chrono>
#include <string>
#include <utility>

// TCP, as far as the launchers' rendezvous needs it.
namespace semitone::launch {

// An attempt to listen or to connect.
struct OpenedSocket {
  Descriptor socket;     // closed if it failed
  int error = 0;         // its errno
  bool unknown = false;  // no address belongs to the host's name
  std::string problem;   // in words

  bool is_open() const { return socket.is_open(); }
};

// Listens there, if the host is this machine (otherwise error is EADDRNOTAVAIL). For a name other
// than localhost's it listens on all addresses: other machines may reach this one under another
// address than it resolves itself.
OpenedSocket listen_at(const Endpoint& endpoint);

// One attempt. Non-blocking afterwards.
OpenedSocket connect_to(const Endpoint& endpoint, std::chrono::milliseconds timeout);

// The next connection, or a closed descriptor.
Descriptor accept_from(const Descriptor& listener);

// Two connected ends.
std::pair<Descriptor, Descriptor> socket_pair();

// The port on which a socket listens.
int port_of(const Descriptor& listener);

// A port on which nothing listens, and which the system does not assign to connections.
int free_port();

// Whether a process can listen on this port of all addresses; otherwise the reason.
bool is_port_free(int port, std::string& problem);

}  // namespace semitone::launch

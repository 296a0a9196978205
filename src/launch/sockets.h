#pragma once

#include "semitone/launch/launch_options.h"
#include "src/launch/descriptor.h"

#include <chrono>
#include <string>
#include <utility>

// TCP, as far as launchers that meet need it.
namespace semitone::launch {

// An attempt to listen or to connect.
struct Opened {
  Descriptor socket;     // closed if it failed
  int error = 0;         // its errno
  bool unknown = false;  // no address belongs to the host's name
  std::string problem;   // in words

  bool is_open() const { return socket.is_open(); }
};

// Listens there, if the host is this machine (else error is EADDRNOTAVAIL). A name that is not
// localhost's means all addresses of this machine: other machines may know it by another address
// than it does itself.
Opened listen_at(const Endpoint& endpoint);

// One attempt. Non-blocking afterwards.
Opened connect_to(const Endpoint& endpoint, std::chrono::milliseconds timeout);

// The next connection, or a closed descriptor.
Descriptor accept_from(const Descriptor& listener);

// Two ends that know each other.
std::pair<Descriptor, Descriptor> socket_pair();

// The port that a socket listens at.
int port_of(const Descriptor& listener);

// A port that nobody listens at, and that the system gives to nobody who does not ask for it.
int free_port();

// Whether a process can listen at this port of all addresses; else why not.
bool is_port_free(int port, std::string& problem);

}  // namespace semitone::launch

#pragma once

#include "src/launch/endpoint.h"
#include "src/net/sockets.h"

#include <vector>

// Where launchers and rank 0 listen.
namespace semitone::launch {

// Listens at an endpoint, if its host is this machine (otherwise the error is EADDRNOTAVAIL): at
// each of the addresses that its name has here, and at no other.
net::Result<std::vector<Descriptor>> listen_at(const Endpoint& endpoint);

// A port on which nothing listens, and which the system does not assign to connections.
int free_port();

}  // namespace semitone::launch

#pragma once

#include "src/launch/endpoint.h"
#include "src/net/sockets.h"

// Where launchers and rank 0 listen.
namespace semitone::launch {

// Listens at an endpoint, if its host is this machine (otherwise the error is EADDRNOTAVAIL). For a
// name other than localhost's it listens on all addresses: other machines may reach this one under
// another address than it resolves itself.
net::Result<Descriptor> listen_at(const Endpoint& endpoint);

// A port on which nothing listens, and which the system does not assign to connections.
int free_port();

}  // namespace semitone::launch

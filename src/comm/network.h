#pragma once

#include "src/core/descriptor.h"
#include "src/net/address.h"

#include <chrono>
#include <string>

// The network layer (src/net) with the errors of comm::init. A name that cannot be resolved is an
// Error in all of these functions.
namespace semitone::comm {

// The component in errors.
inline constexpr auto kInitComponent = "comm.init";

// As in src/net/sockets.h. CommError if the port is taken or the address is not this machine's.
Descriptor listen_on(const std::string& host, int port);
Descriptor listen_on_all(int port);
// CommError if there is no answer within the timeout.
Descriptor connect_to(const net::Address& address, std::chrono::milliseconds timeout);

// As in src/net/address.h. CommError without a route to the host.
std::string address_towards(const std::string& host);
net::AddressKind address_kind(const std::string& host);

// The IP address of an interface. For an unknown name, Error with the existing names.
std::string address_of_interface(const std::string& name);

}  // namespace semitone::comm

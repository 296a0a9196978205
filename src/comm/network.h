#pragma once

#include "src/core/descriptor.h"
#include "src/net/address.h"
#include "src/net/lookups.h"

#include <string>

// The network layer (src/net) with the errors of comm::init.
namespace semitone::comm {

// The component in errors.
inline constexpr auto kInitComponent = "comm.init";

[[noreturn]] void throw_unresolved(const std::string& problem);

// Passes a result of the network on. Error if the host's name could not be resolved.
template <typename Value>
net::Result<Value> resolved(net::Result<Value> result) {
  if (result.lookup_error != 0) throw_unresolved(result.problem);
  return result;
}

// Waits until the next look-up. Error if no time is left.
// @param lookup_error, problem  of the last one, as in net::Result
void wait_to_look_up(net::LookupRetries& retries, int lookup_error, const std::string& problem);

// Calls a function of the network again until the host's name is resolved, and passes its result
// on. Error if that takes too long.
template <typename Lookup>
auto resolved_within(const net::LookupTimeouts& timeouts, const Lookup& lookup) {
  net::LookupRetries retries(timeouts);
  for (;;) {
    auto result = lookup();
    if (result.lookup_error == 0) return result;
    wait_to_look_up(retries, result.lookup_error, result.problem);
  }
}

// As in src/net/sockets.h. CommError if the port is taken or the address is not this machine's.
Descriptor listen_on(const std::string& host, int port);
Descriptor listen_on_all(int port);

// The IP address of an interface. For an unknown name, Error with the existing names.
std::string address_of_interface(const std::string& name);

}  // namespace semitone::comm

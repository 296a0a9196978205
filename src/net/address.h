#pragma once

#include "src/core/descriptor.h"

#include <netdb.h>
#include <sys/socket.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

// Hosts, and the addresses of this machine.
namespace semitone::net {

// A host's name or numerical address, and a port.
struct Address {
  std::string host;
  int port = 0;
};

// What the network gave, or why it gave nothing. Callers word their own errors with it.
template <typename Value>
struct Result {
  Value value{};
  int error = 0;         // an errno; 0: there is a value
  int lookup_error = 0;  // of getaddrinfo, as EAI_NONAME; 0: the host's name was resolved
  std::string problem;   // in words

  bool ok() const { return error == 0; }
};

// Passes a failure on.
template <typename Value, typename Other>
Result<Value> failure_of(const Result<Other>& other) {
  return {Value(), other.error, other.lookup_error, other.problem};
}

struct FreeAddresses {
  void operator()(addrinfo* list) const { ::freeaddrinfo(list); }
};
using AddressList = std::unique_ptr<addrinfo, FreeAddresses>;

// The numerical addresses of a host. The error of a name that cannot be resolved is EHOSTUNREACH.
Result<AddressList> resolve(const Address& address);

// The numerical form of an address. The host is empty for families other than IPv4 and IPv6.
Address to_address(const sockaddr* address);

// The numerical address of a socket on this machine.
Address address_of(const Descriptor& socket);

// Whether the host is a numerical address.
bool is_numerical(const std::string& host);

// Whether a numerical address is reachable from this machine only.
bool is_loopback(const std::string& address);

// An address of a network interface.
struct Interface {
  std::string name;
  std::string address;
  bool is_up = false;
  bool is_loopback = false;
};

// All of them, IPv4 before IPv6.
std::vector<Interface> interfaces();

// Whether an address belongs to one of this machine's interfaces. The list of interfaces decides,
// and not an attempt to bind: if net.ipv4.ip_nonlocal_bind is set, as on hosts that take over each
// other's addresses, binding succeeds for foreign addresses too. If there is no list, every address
// counts as local, and the system refuses a foreign one when it is used.
enum class AddressKind { local, loopback, wildcard, remote };

// The kind of a numerical address.
// @param own  from interfaces()
AddressKind kind_of(const std::string& address, const std::vector<Interface>& own);

// The kind of a host's addresses: if they differ, the first that is loopback or wildcard, or else
// local.
Result<AddressKind> address_kind(const std::string& host);

// The local address from which connections to a host leave: that of the interface that leads there.
// Without a route to it, the error is ENETUNREACH.
Result<std::string> address_towards(const std::string& host);

// The local address for connections to other networks: that of the default route, or else of any
// interface that is not the loopback interface.
std::optional<std::string> address_of_default_route();

}  // namespace semitone::net

#pragma once

#include "src/core/descriptor.h"

#include <chrono>
#include <optional>
#include <string>
#include <vector>

// What the system's sockets give, as values: addresses, listening sockets, and connections that
// carry lines of text.
namespace semitone::comm {

// Who speaks in errors.
inline constexpr auto kInit = "comm.init";

// Addresses in numbers.
struct Address {
  std::string host;
  int port = 0;
};

// A socket that listens on this address alone, and not on every interface of the machine: what can
// reach it may write to it. It does not block. Port 0: any that is free. CommError if the port is
// taken or the address is not this machine's.
Descriptor listen_on(const std::string& host, int port);
// The same on every interface, IPv6 and IPv4.
Descriptor listen_on_all(int port);
Address address_of(const Descriptor& listener);

// CommError if nobody answers within the timeout.
Descriptor connect_to(const Address& address, std::chrono::milliseconds timeout);

// The local IP address that connections to a host leave from: that of the interface which leads
// there. Error if the name cannot be resolved.
std::string address_towards(const std::string& host, int port);

// That which connections to the rest of the world leave from: of the default route, or else of any
// interface that is up and not the loopback one.
std::optional<std::string> address_of_default_route();

// Whether a host's address is one of this machine's interfaces. Asks the interfaces: to bind is allowed
// for others' addresses, too, where net.ipv4.ip_nonlocal_bind is set.
enum class Whose { ours, loopback, others };
Whose whose_address(const std::string& host, int port);

// The IP address of an interface. Error if there is none of that name, with the names there are.
std::string address_of_interface(const std::string& name);

// Whether an IP address is reachable from this machine alone.
bool is_loopback(const std::string& address);

// A connection that carries short lines and never blocks.
class LineChannel {
 public:
  explicit LineChannel(Descriptor socket);

  int number() const { return socket_.number(); }
  // The other side has closed it, or is gone.
  bool closed() const { return closed_; }

  // Lines longer than a few hundred bytes are of no use here. What does not go out at once does in
  // the next call of send or receive.
  void send(const std::string& line);
  // What has come since the last call, without line ends.
  std::vector<std::string> receive();
  // No more from this side; the other one still can send.
  void finish();

 private:
  void send_rest();

  Descriptor socket_;
  std::string received_;
  std::string unsent_;
  bool closed_ = false;
};

}  // namespace semitone::comm

#pragma once

#include "src/core/descriptor.h"

#include <chrono>
#include <optional>
#include <string>
#include <vector>

// What the system's sockets give, as values: addresses, listening sockets, and connections that
// carry lines of text.
namespace semitone::comm {

// The component in errors.
inline constexpr auto kInitComponent = "comm.init";

// Numerical addresses.
struct Address {
  std::string host;
  int port = 0;
};

// A socket that listens on this address only, not on every interface of the machine, since anything
// that reaches it may write to it. It does not block. Port 0: any free port. CommError if the port
// is taken or the address is not this machine's.
Descriptor listen_on(const std::string& host, int port);
// The same on every interface, IPv6 and IPv4.
Descriptor listen_on_all(int port);
Address address_of(const Descriptor& listener);

// CommError if there is no answer within the timeout.
Descriptor connect_to(const Address& address, std::chrono::milliseconds timeout);

// The local IP address from which connections to a host leave: that of the interface that leads
// there. Error if the name cannot be resolved.
std::string address_towards(const std::string& host, int port);

// The local IP address for connections to other networks: that of the default route, or else of any
// interface that is up and is not the loopback interface.
std::optional<std::string> address_of_default_route();

// Whether a host's address belongs to one of this machine's interfaces. It reads the list of
// interfaces: if net.ipv4.ip_nonlocal_bind is set, binding succeeds for foreign addresses too.
enum class AddressKind { local, loopback, remote };
AddressKind address_kind(const std::string& host, int port);

// The IP address of an interface. For an unknown name, Error with the existing names.
std::string address_of_interface(const std::string& name);

// Whether an IP address is reachable from this machine only.
bool is_loopback(const std::string& address);

// A connection that carries short lines and never blocks.
class LineChannel {
 public:
  explicit LineChannel(Descriptor socket);

  int number() const { return socket_.number(); }
  // Whether the other side has closed the connection or is lost.
  bool closed() const { return closed_; }

  // Sends a line of at most a few hundred bytes. The part that cannot be sent at once is sent in
  // the next call of send or receive.
  void send(const std::string& line);
  // The lines received since the last call, without line ends.
  std::vector<std::string> receive();
  // Ends sending from this side; the other side can still send.
  void finish();

 private:
  void send_rest();

  Descriptor socket_;
  std::string received_;
  std::string unsent_;
  bool closed_ = false;
};

}  // namespace semitone::comm

#include "src/comm/network.h"

#include "semitone/core/error.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>

namespace semitone::comm {
namespace {

// A longer line is not from a Semitone process.
constexpr std::size_t kMaxLine = 1 << 16;
// Limit of the data kept for a peer that does not read.
constexpr std::size_t kMaxUnsent = 1 << 16;

// The sockets' interface takes pointers to a common base of structures that have none.
template <typename To, typename From>
To* as(From* address) {
  return static_cast<To*>(static_cast<void*>(address));
}
template <typename To, typename From>
const To* as(const From* address) {
  return static_cast<const To*>(static_cast<const void*>(address));
}

Address to_address(const sockaddr* address) {
  std::array<char, INET6_ADDRSTRLEN> text{};
  if (address->sa_family == AF_INET) {
    const auto* inet = as<sockaddr_in>(address);
    inet_ntop(AF_INET, &inet->sin_addr, text.data(), text.size());
    return {text.data(), ntohs(inet->sin_port)};
  }
  if (address->sa_family == AF_INET6) {
    const auto* inet = as<sockaddr_in6>(address);
    inet_ntop(AF_INET6, &inet->sin6_addr, text.data(), text.size());
    return {text.data(), ntohs(inet->sin6_port)};
  }
  return {};
}

Address local_address(int socket) {
  sockaddr_storage local{};
  socklen_t size = sizeof(local);
  if (::getsockname(socket, as<sockaddr>(&local), &size) != 0) return {};
  return to_address(as<const sockaddr>(&local));
}

using AddressList = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

AddressList resolve(const std::string& host, int port, int type) {
  addrinfo hints{};
  hints.ai_socktype = type;
  addrinfo* found = nullptr;
  const int error = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (error != 0) {
    throw Error(kInitComponent, "a master address that can be resolved",
                fmt::format("'{}': {}", host, ::gai_strerror(error)),
                "check MASTER_ADDR or the host in the URL");
  }
  return {found, &freeaddrinfo};
}

Descriptor open_socket(const addrinfo& address) {
  return Descriptor(::socket(address.ai_family, address.ai_socktype | SOCK_CLOEXEC, 0));
}

// Binds and listens. Returns the errno, or 0 on success.
int start_listening(const Descriptor& socket, const sockaddr* address, socklen_t size) {
  // Otherwise a port whose last user has just ended would be refused for a minute.
  const int yes = 1;
  ::setsockopt(socket.number(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
  if (::bind(socket.number(), address, size) != 0 || ::listen(socket.number(), SOMAXCONN) != 0)
    return errno;
  return 0;
}

[[noreturn]] void throw_cannot_listen(const std::string& host, int port, int reason) {
  throw CommError(kInitComponent, fmt::format("to listen on {}:{}", host, port), reason_of(reason),
                  reason == EADDRINUSE
                      ? "another job uses the port: choose another with MASTER_PORT or in the URL"
                      : "MASTER_ADDR or the URL must name the machine that runs rank 0",
                  {0});
}

using InterfaceList = std::unique_ptr<ifaddrs, decltype(&freeifaddrs)>;

InterfaceList list_interfaces() {
  ifaddrs* all = nullptr;
  if (::getifaddrs(&all) != 0)
    throw Error(kInitComponent, "the list of network interfaces", reason_of(errno));
  return {all, &freeifaddrs};
}

// The local address of connections to these addresses.
std::string source_towards(const addrinfo* addresses) {
  for (const addrinfo* address = addresses; address != nullptr; address = address->ai_next) {
    // Connecting a datagram socket sends nothing; it only queries the routing table.
    const Descriptor probe = open_socket(*address);
    if (!probe.is_open()) continue;
    if (::connect(probe.number(), address->ai_addr, address->ai_addrlen) != 0) continue;
    Address local = local_address(probe.number());
    if (!local.host.empty()) return local.host;
  }
  return {};
}

}  // namespace

Descriptor listen_on(const std::string& host, int port) {
  const AddressList addresses = resolve(host, port, SOCK_STREAM);
  int reason = EADDRNOTAVAIL;
  for (const addrinfo* address = addresses.get(); address != nullptr; address = address->ai_next) {
    Descriptor listener = open_socket(*address);
    if (!listener.is_open()) continue;
    reason = start_listening(listener, address->ai_addr, address->ai_addrlen);
    if (reason != 0) continue;
    listener.set_nonblocking();
    return listener;
  }
  throw_cannot_listen(host, port, reason);
}

Descriptor listen_on_all(int port) {
  const auto number = htons(static_cast<std::uint16_t>(port));
  sockaddr_in6 any6{};
  any6.sin6_family = AF_INET6;
  any6.sin6_port = number;
  Descriptor listener(::socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int no = 0;
  int reason = EAFNOSUPPORT;
  if (listener.is_open() &&
      ::setsockopt(listener.number(), IPPROTO_IPV6, IPV6_V6ONLY, &no, sizeof(no)) == 0) {
    reason = start_listening(listener, as<const sockaddr>(&any6), sizeof(any6));
  }
  if (reason != 0 && reason != EADDRINUSE) {  // a machine without IPv6
    sockaddr_in any{};
    any.sin_family = AF_INET;
    any.sin_port = number;
    listener = Descriptor(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    reason = start_listening(listener, as<const sockaddr>(&any), sizeof(any));
  }
  if (reason != 0) throw_cannot_listen("all interfaces", port, reason);
  listener.set_nonblocking();
  return listener;
}

Address address_of(const Descriptor& listener) {
  return local_address(listener.number());
}

Descriptor connect_to(const Address& to, std::chrono::milliseconds timeout) {
  const AddressList addresses = resolve(to.host, to.port, SOCK_STREAM);
  int reason = EADDRNOTAVAIL;
  for (const addrinfo* address = addresses.get(); address != nullptr; address = address->ai_next) {
    Descriptor socket = open_socket(*address);
    if (!socket.is_open()) continue;
    socket.set_nonblocking();
    reason = 0;
    if (::connect(socket.number(), address->ai_addr, address->ai_addrlen) != 0) {
      reason = errno == EINPROGRESS ? finish_connecting(socket, timeout) : errno;
    }
    if (reason == 0) return socket;
  }
  throw CommError(kInitComponent, fmt::format("an answer from {}:{}", to.host, to.port),
                  reason_of(reason), "can this machine reach it?");
}

std::string address_towards(const std::string& host, int port) {
  std::string address = source_towards(resolve(host, port, SOCK_DGRAM).get());
  if (address.empty())
    throw CommError(kInitComponent, fmt::format("a route to {}", host), "none",
                    "is the network up?");
  return address;
}

std::optional<std::string> address_of_default_route() {
  // Addresses for documentation (RFC 5737, RFC 3849), to which only a default route leads.
  for (const char* elsewhere : {"192.0.2.1", "2001:db8::1"}) {
    std::string address = source_towards(resolve(elsewhere, 9, SOCK_DGRAM).get());
    if (!address.empty() && !is_loopback(address)) return address;
  }
  const InterfaceList interfaces = list_interfaces();
  for (const int family : {AF_INET, AF_INET6}) {
    for (const ifaddrs* entry = interfaces.get(); entry != nullptr; entry = entry->ifa_next) {
      if (entry->ifa_addr == nullptr || entry->ifa_addr->sa_family != family) continue;
      if ((entry->ifa_flags & IFF_UP) == 0 || (entry->ifa_flags & IFF_LOOPBACK) != 0) continue;
      std::string number = to_address(entry->ifa_addr).host;
      if (number.substr(0, 4) != "fe80") return number;  // which only a link knows
    }
  }
  return std::nullopt;
}

AddressKind address_kind(const std::string& host, int port) {
  const AddressList addresses = resolve(host, port, SOCK_STREAM);
  const InterfaceList interfaces = list_interfaces();
  AddressKind kind = AddressKind::remote;
  for (const addrinfo* address = addresses.get(); address != nullptr; address = address->ai_next) {
    const std::string number = to_address(address->ai_addr).host;
    if (is_loopback(number)) return AddressKind::loopback;
    for (const ifaddrs* entry = interfaces.get(); entry != nullptr; entry = entry->ifa_next) {
      if (entry->ifa_addr != nullptr && to_address(entry->ifa_addr).host == number)
        kind = AddressKind::local;
    }
  }
  return kind;
}

std::string address_of_interface(const std::string& name) {
  const InterfaceList interfaces = list_interfaces();
  std::string names;
  for (const int family : {AF_INET, AF_INET6}) {
    for (const ifaddrs* entry = interfaces.get(); entry != nullptr; entry = entry->ifa_next) {
      if (entry->ifa_addr == nullptr || entry->ifa_addr->sa_family != family) continue;
      if (entry->ifa_name == name) return to_address(entry->ifa_addr).host;
      if (family == AF_INET) names.append(names.empty() ? "" : ", ").append(entry->ifa_name);
    }
  }
  throw Error(kInitComponent, "a network interface with an address", fmt::format("'{}'", name),
              "there are: " + names);
}

bool is_loopback(const std::string& address) {
  return address.substr(0, 4) == "127." || address == "::1";
}

LineChannel::LineChannel(Descriptor socket) : socket_(std::move(socket)) {
  socket_.set_nonblocking();
  const int yes = 1;
  ::setsockopt(number(), IPPROTO_TCP, TCP_NODELAY, &yes, sizeof(yes));
}

void LineChannel::send(const std::string& line) {
  if (closed_) return;
  unsent_.append(line).append("\n");
  send_rest();
  // The peer has not read for hours, which its silence reveals too.
  if (unsent_.size() > kMaxUnsent) closed_ = true;
}

// Writes as much as the other side's buffers take.
void LineChannel::send_rest() {
  while (!unsent_.empty()) {
    const auto sent = ::send(number(), unsent_.data(), unsent_.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    // receive() closes a broken connection, after the data that arrived before.
    if (sent < 0 && errno != EINTR) return;
    if (sent > 0) unsent_.erase(0, static_cast<std::size_t>(sent));
  }
}

std::vector<std::string> LineChannel::receive() {
  std::array<char, 4096> buffer{};
  if (!closed_) send_rest();
  while (!closed_) {
    const auto count = ::recv(number(), buffer.data(), buffer.size(), MSG_DONTWAIT);
    if (count > 0) {
      received_.append(buffer.data(), static_cast<std::size_t>(count));
    } else if (count == 0 || (errno != EAGAIN && errno != EINTR)) {
      closed_ = true;
    } else if (errno != EINTR) {
      break;
    }
  }
  std::vector<std::string> lines;
  std::size_t start = 0;
  for (std::size_t end = 0; (end = received_.find('\n', start)) != std::string::npos;
       start = end + 1) {
    lines.push_back(received_.substr(start, end - start));
  }
  received_.erase(0, start);
  if (received_.size() > kMaxLine) closed_ = true;
  return lines;
}

void LineChannel::finish() {
  ::shutdown(number(), SHUT_WR);
}

}  // namespace semitone::comm

#include "src/launch/sockets.h"

#include "semitone/core/error.h"

#include <fmt/format.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <memory>
#include <random>
#include <string_view>

namespace semitone::launch {
namespace {

constexpr auto kComponent = "launch.rendezvous";

using Addresses = std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)>;

Addresses resolve(const Endpoint& endpoint, int flags, int& error) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const char* const host = endpoint.host.empty() ? nullptr : endpoint.host.c_str();
  error = ::getaddrinfo(host, std::to_string(endpoint.port).c_str(), &hints, &found);
  return {error == 0 ? found : nullptr, &::freeaddrinfo};
}

Descriptor make_socket(const addrinfo& address) {
  return Descriptor(::socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
}

// Resolves the address, for listening if backlog is above 0.
int bind_to(const Descriptor& socket, const addrinfo& address, int backlog) {
  const int yes = 1;
  ::setsockopt(socket.number(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  // So that 0.0.0.0 can be used on the same port.
  if (address.ai_family == AF_INET6)
    ::setsockopt(socket.number(), IPPROTO_IPV6, IPV6_V6ONLY, &yes, sizeof yes);
  if (::bind(socket.number(), address.ai_addr, address.ai_addrlen) != 0) return errno;
  if (backlog > 0 && ::listen(socket.number(), backlog) != 0) return errno;
  return 0;
}

OpenedSocket failed(int error, std::string problem = {}) {
  return {Descriptor(), error, false, problem.empty() ? reason_of(error) : std::move(problem)};
}

OpenedSocket unknown_host(const Endpoint& endpoint, int error) {
  // A name server that does not answer may do so later.
  return {Descriptor(), EHOSTUNREACH, error == EAI_NONAME,
          fmt::format("'{}': {}", endpoint.host, ::gai_strerror(error))};
}

const in6_addr& v6_of(const sockaddr* address) {
  return reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr;
}

in_addr_t v4_of(const sockaddr* address) {
  return ntohl(reinterpret_cast<const sockaddr_in*>(address)->sin_addr.s_addr);
}

// Whether an address is the wildcard, or a loopback address. The list of interfaces contains a
// single address of 127.0.0.0/8.
bool is_wildcard_or_loopback(const sockaddr* address) {
  if (address->sa_family != AF_INET6)
    return v4_of(address) == INADDR_ANY || v4_of(address) >> 24 == IN_LOOPBACKNET;
  return IN6_IS_ADDR_UNSPECIFIED(&v6_of(address)) || IN6_IS_ADDR_LOOPBACK(&v6_of(address));
}

bool is_same_address(const sockaddr* one, const sockaddr* other) {
  if (one->sa_family != other->sa_family) return false;
  if (one->sa_family != AF_INET6) return v4_of(one) == v4_of(other);
  return IN6_ARE_ADDR_EQUAL(&v6_of(one), &v6_of(other));
}

// bind() cannot tell: with net.ipv4.ip_nonlocal_bind, as on hosts that take over each other's
// addresses, it accepts every address.
bool is_local_address(const sockaddr* address) {
  if (is_wildcard_or_loopback(address)) return true;
  ifaddrs* list = nullptr;
  // Without a list of interfaces, bind() decides.
  if (::getifaddrs(&list) != 0) return true;
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owner(list, &::freeifaddrs);
  for (; list != nullptr; list = list->ifa_next) {
    if (list->ifa_addr != nullptr && is_same_address(list->ifa_addr, address)) return true;
  }
  return false;
}

OpenedSocket listen_on(const addrinfo* addresses) {
  OpenedSocket result = failed(EADDRNOTAVAIL);
  for (const addrinfo* address = addresses; address != nullptr; address = address->ai_next) {
    if (!is_local_address(address->ai_addr)) continue;
    Descriptor socket = make_socket(*address);
    if (!socket.is_open()) continue;
    const int error = bind_to(socket, *address, SOMAXCONN);
    if (error == 0) return {above_standard_streams(std::move(socket)), 0, false, ""};
    result = failed(error);
    if (error == EADDRINUSE) break;
  }
  return result;
}

bool is_local_host(const addrinfo* addresses) {
  for (const addrinfo* address = addresses; address != nullptr; address = address->ai_next) {
    const Descriptor socket = make_socket(*address);
    if (socket.is_open() && bind_to(socket, *address, 0) == 0 && is_local_address(address->ai_addr))
      return true;
  }
  return false;
}

// Stricter than is_port_free(): a socket that another program has bound without listening counts,
// and so does a connection that ended a minute ago.
bool is_port_unused(int port, std::string& problem) {
  int error = 0;
  const Addresses any = resolve({"0.0.0.0", port}, AI_NUMERICHOST, error);
  if (any == nullptr) return is_port_free(port, problem);
  const Descriptor socket = make_socket(*any);
  if (socket.is_open() && ::bind(socket.number(), any->ai_addr, any->ai_addrlen) == 0) return true;
  problem = reason_of(errno);
  return false;
}

}  // namespace

OpenedSocket listen_at(const Endpoint& endpoint) {
  int error = 0;
  const Addresses literal = resolve(endpoint, AI_NUMERICHOST, error);
  if (literal != nullptr) return listen_on(literal.get());
  const Addresses named = resolve({endpoint.host, 0}, 0, error);
  if (named == nullptr) return unknown_host(endpoint, error);
  if (!is_local_host(named.get())) return failed(EADDRNOTAVAIL);
  if (endpoint.host == "localhost") return listen_at({"127.0.0.1", endpoint.port});
  const bool has_v4 = named->ai_family == AF_INET || named->ai_next != nullptr;
  return listen_at({has_v4 ? "0.0.0.0" : "::", endpoint.port});
}

OpenedSocket connect_to(const Endpoint& endpoint, std::chrono::milliseconds timeout) {
  int error = 0;
  const Addresses addresses = resolve(endpoint, 0, error);
  if (addresses == nullptr) return unknown_host(endpoint, error);
  OpenedSocket result = failed(EHOSTUNREACH);
  for (const addrinfo* address = addresses.get(); address != nullptr; address = address->ai_next) {
    Descriptor socket = make_socket(*address);
    if (!socket.is_open()) continue;
    socket.set_nonblocking();
    int problem = 0;
    if (::connect(socket.number(), address->ai_addr, address->ai_addrlen) != 0) {
      problem = errno == EINPROGRESS ? finish_connecting(socket, timeout) : errno;
    }
    if (problem == 0) return {above_standard_streams(std::move(socket)), 0, false, ""};
    result = failed(problem);
  }
  return result;
}

Descriptor accept_from(const Descriptor& listener) {
  return above_standard_streams(
      Descriptor(::accept4(listener.number(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK)));
}

std::pair<Descriptor, Descriptor> socket_pair() {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) != 0)
    throw Error(kComponent, "a pair of sockets from the system", reason_of(errno));
  Descriptor first(ends[0]);
  Descriptor second(ends[1]);
  return {above_standard_streams(std::move(first)), above_standard_streams(std::move(second))};
}

int port_of(const Descriptor& listener) {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  ::getsockname(listener.number(), reinterpret_cast<sockaddr*>(&address), &size);
  return ntohs(address.ss_family == AF_INET6
                   ? reinterpret_cast<const sockaddr_in6*>(&address)->sin6_port
                   : reinterpret_cast<const sockaddr_in*>(&address)->sin_port);
}

// From 20000 to 32767, without those that the system assigns to connections: usually 32768 to
// 60999, but nearly all on hosts with many connections.
int free_port() {
  constexpr int kFirst = 20000;
  constexpr int kLast = 32767;
  int taken_from = kLast + 1;
  int taken_to = kLast;
  std::ifstream("/proc/sys/net/ipv4/ip_local_port_range") >> taken_from >> taken_to;
  const bool nothing_left = taken_from <= kFirst && taken_to >= kLast;
  std::random_device random;
  std::uniform_int_distribution<int> ports(kFirst, kLast);
  std::string problem = "the system hands all of them out";
  for (int attempt = 0; attempt < 1000; ++attempt) {
    const int port = ports(random);
    if (!nothing_left && taken_from <= port && port <= taken_to) continue;
    if (is_port_unused(port, problem)) return port;
  }
  throw Error(kComponent, fmt::format("a free port from {} to {}", kFirst, kLast), problem);
}

bool is_port_free(int port, std::string& problem) {
  const OpenedSocket opened = listen_at({"0.0.0.0", port});
  problem = opened.problem;
  return opened.is_open();
}

}  // namespace semitone::launch

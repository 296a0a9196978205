#include "src/net/address.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

namespace semitone::net {
namespace {

bool is_wildcard(const std::string& address) {
  return address == "0.0.0.0" || address == "::";
}

}  // namespace

Result<AddressList> resolve(const Address& address) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int error =
      ::getaddrinfo(address.host.c_str(), std::to_string(address.port).c_str(), &hints, &found);
  if (error == 0) return {AddressList(found), 0, 0, ""};
  return {nullptr, EHOSTUNREACH, error,
          fmt::format("'{}': {}", address.host, ::gai_strerror(error))};
}

Address to_address(const sockaddr* address) {
  std::array<char, INET6_ADDRSTRLEN> text{};
  if (address->sa_family == AF_INET) {
    const auto* const inet = reinterpret_cast<const sockaddr_in*>(address);
    ::inet_ntop(AF_INET, &inet->sin_addr, text.data(), text.size());
    return {text.data(), ntohs(inet->sin_port)};
  }
  if (address->sa_family == AF_INET6) {
    const auto* const inet = reinterpret_cast<const sockaddr_in6*>(address);
    ::inet_ntop(AF_INET6, &inet->sin6_addr, text.data(), text.size());
    return {text.data(), ntohs(inet->sin6_port)};
  }
  return {};
}

Address address_of(const Descriptor& socket) {
  sockaddr_storage local{};
  socklen_t size = sizeof(local);
  auto* const general = reinterpret_cast<sockaddr*>(&local);
  return ::getsockname(socket.number(), general, &size) == 0 ? to_address(general) : Address();
}

bool is_numerical(const std::string& host) {
  addrinfo hints{};
  hints.ai_flags = AI_NUMERICHOST;
  addrinfo* found = nullptr;
  const int error = ::getaddrinfo(host.c_str(), nullptr, &hints, &found);
  const AddressList owner(error == 0 ? found : nullptr);
  return error == 0;
}

bool is_loopback(const std::string& address) {
  return address.substr(0, 4) == "127." || address == "::1";
}

std::vector<Interface> interfaces() {
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) return {};
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owner(list, &::freeifaddrs);
  std::vector<Interface> found;
  for (const int family : {AF_INET, AF_INET6}) {
    for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
      if (entry->ifa_addr == nullptr || entry->ifa_addr->sa_family != family) continue;
      found.push_back({entry->ifa_name, to_address(entry->ifa_addr).host,
                       (entry->ifa_flags & IFF_UP) != 0, (entry->ifa_flags & IFF_LOOPBACK) != 0});
    }
  }
  return found;
}

AddressKind kind_of(const std::string& address, const std::vector<Interface>& own) {
  if (is_loopback(address)) return AddressKind::loopback;
  if (is_wildcard(address)) return AddressKind::wildcard;
  const auto is_same = [&](const Interface& interface) { return interface.address == address; };
  const bool is_own = own.empty() || std::any_of(own.begin(), own.end(), is_same);
  return is_own ? AddressKind::local : AddressKind::remote;
}

Result<AddressKind> address_kind(const std::string& host) {
  const auto resolved = resolve({host, 0});
  if (!resolved.ok()) return failure_of<AddressKind>(resolved);
  const auto own = interfaces();
  AddressKind kind = AddressKind::remote;
  for (const addrinfo* each = resolved.value.get(); each != nullptr; each = each->ai_next) {
    const AddressKind found = kind_of(to_address(each->ai_addr).host, own);
    if (found == AddressKind::loopback || found == AddressKind::wildcard) return {found, 0, 0, ""};
    if (found == AddressKind::local) kind = found;
  }
  return {kind, 0, 0, ""};
}

Result<std::string> address_towards(const std::string& host) {
  const auto resolved = resolve({host, 9});
  if (!resolved.ok()) return failure_of<std::string>(resolved);
  for (const addrinfo* each = resolved.value.get(); each != nullptr; each = each->ai_next) {
    // Connecting a datagram socket sends nothing; it only queries the routing table.
    const Descriptor probe(::socket(each->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    if (!probe.is_open() || ::connect(probe.number(), each->ai_addr, each->ai_addrlen) != 0)
      continue;
    if (std::string own = address_of(probe).host; !own.empty()) return {std::move(own), 0, 0, ""};
  }
  return {{}, ENETUNREACH, 0, reason_of(ENETUNREACH)};
}

std::optional<std::string> address_of_default_route() {
  // Addresses for documentation (RFC 5737, RFC 3849), to which only a default route leads.
  for (const char* elsewhere : {"192.0.2.1", "2001:db8::1"}) {
    if (auto found = address_towards(elsewhere); found.ok() && !is_loopback(found.value))
      return found.value;
  }
  for (const Interface& interface : interfaces()) {
    // Only a link knows addresses in fe80::/10.
    if (interface.is_up && !interface.is_loopback && interface.address.substr(0, 4) != "fe80")
      return interface.address;
  }
  return std::nullopt;
}

}  // namespace semitone::net

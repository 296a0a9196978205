#include "src/comm/store.h"

#include "semitone/core/error.h"

#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <arpa/inet.h>
#include <fmt/format.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>

namespace semitone::comm {
namespace {

constexpr auto kWhere = "comm.init";

// A file descriptor, closed at the end of its scope.
class Descriptor {
 public:
  explicit Descriptor(int descriptor) : descriptor_(descriptor) {}
  ~Descriptor() {
    if (descriptor_ >= 0) ::close(descriptor_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return descriptor_; }
  int release() { return std::exchange(descriptor_, -1); }

 private:
  int descriptor_;
};

std::string text_of(const sockaddr* address) {
  char text[INET6_ADDRSTRLEN] = {};
  if (address->sa_family == AF_INET) {
    inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in*>(address)->sin_addr, text,
              sizeof(text));
  } else if (address->sa_family == AF_INET6) {
    inet_ntop(AF_INET6, &reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr, text,
              sizeof(text));
  }
  return text;
}

using AddressList = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

AddressList resolve(const std::string& host, int port, int type) {
  addrinfo hints{};
  hints.ai_socktype = type;
  addrinfo* found = nullptr;
  const int error = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (error != 0) {
    throw Error(kWhere, "a master address that can be resolved",
                fmt::format("'{}': {}", host, gai_strerror(error)),
                "check MASTER_ADDR or the host in the URL");
  }
  return {found, &freeaddrinfo};
}

// Listens on one address, not on all: the store has no access control.
int listen_on(const std::string& host, int port) {
  const AddressList addresses = resolve(host, port, SOCK_STREAM);
  std::string problem;
  for (const addrinfo* address = addresses.get(); address != nullptr; address = address->ai_next) {
    Descriptor listener(::socket(address->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (listener.get() < 0) continue;
    const int yes = 1;
    ::setsockopt(listener.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
    if (::bind(listener.get(), address->ai_addr, address->ai_addrlen) == 0 &&
        ::listen(listener.get(), SOMAXCONN) == 0) {
      return listener.release();
    }
    problem = std::strerror(errno);
  }
  throw CommError(kWhere, fmt::format("to listen on {}:{}", host, port), problem,
                  "is another job using the port? Choose another with MASTER_PORT; the host must "
                  "be this machine, which has rank 0",
                  {0});
}

}  // namespace

std::string address_towards(const std::string& host, int port) {
  const AddressList addresses = resolve(host, port, SOCK_DGRAM);
  for (const addrinfo* address = addresses.get(); address != nullptr; address = address->ai_next) {
    // Connecting a datagram socket sends nothing; it only asks the routing table.
    const Descriptor probe(::socket(address->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    if (probe.get() < 0 || ::connect(probe.get(), address->ai_addr, address->ai_addrlen) != 0)
      continue;
    sockaddr_storage local{};
    socklen_t size = sizeof(local);
    if (::getsockname(probe.get(), reinterpret_cast<sockaddr*>(&local), &size) == 0) {
      return text_of(reinterpret_cast<const sockaddr*>(&local));
    }
  }
  throw CommError(kWhere, fmt::format("a route to {}", host), "none", "is the network up?");
}

std::string address_of_interface(const std::string& name) {
  ifaddrs* all = nullptr;
  if (::getifaddrs(&all) != 0)
    throw Error(kWhere, "the list of network interfaces", std::strerror(errno));
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owner(all, &freeifaddrs);
  std::string names;
  for (int family : {AF_INET, AF_INET6}) {
    for (const ifaddrs* entry = all; entry != nullptr; entry = entry->ifa_next) {
      if (entry->ifa_addr == nullptr || entry->ifa_addr->sa_family != family) continue;
      if (entry->ifa_name == name) return text_of(entry->ifa_addr);
      if (family == AF_INET) names.append(names.empty() ? "" : ", ").append(entry->ifa_name);
    }
  }
  throw Error(kWhere, "a network interface with an address", fmt::format("'{}'", name),
              "there are: " + names);
}

c10::intrusive_ptr<c10d::Store> open_store(const Rendezvous& rendezvous,
                                           std::chrono::milliseconds timeout) {
  if (rendezvous.kind == Rendezvous::Kind::file) {
    auto store = c10::make_intrusive<c10d::FileStore>(rendezvous.path, rendezvous.world_size);
    store->setTimeout(timeout);
    return store;
  }
  c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(rendezvous.port);
  options.isServer = rendezvous.rank == 0 && !rendezvous.store_is_hosted;
  options.waitWorkers = false;  // init waits itself, and says who is missing
  options.timeout = timeout;
  if (options.isServer) options.masterListenFd = listen_on(rendezvous.host, rendezvous.port);
  try {
    return c10::make_intrusive<c10d::TCPStore>(rendezvous.host, options);
  } catch (const std::exception&) {
    throw CommError(kWhere,
                    fmt::format("rank 0 to answer at {}:{}", rendezvous.host, rendezvous.port),
                    fmt::format("nothing within {} s",
                                std::chrono::duration_cast<std::chrono::seconds>(timeout).count()),
                    "was rank 0 started? Can this machine reach it? Are MASTER_ADDR and "
                    "MASTER_PORT the same on all ranks?",
                    {0});
  }
}

void put(c10d::Store& store, const std::string& key, std::string_view value) {
  store.set(key, std::vector<std::uint8_t>(value.begin(), value.end()));
}

std::string get(c10d::Store& store, const std::string& key) {
  const auto value = store.get(key);
  return {value.begin(), value.end()};
}

std::optional<std::string> peek(c10d::Store& store, const std::string& key) {
  if (!store.check({key})) return std::nullopt;
  return get(store, key);
}

}  // namespace semitone::comm

#include "src/launch/ports.h"

#include "tests/support/host_names.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>

namespace {

// As on hosts that take over each other's addresses (net.ipv4.ip_nonlocal_bind).
thread_local bool every_address_can_be_bound = false;

}  // namespace

// Replaces the C library's function.
extern "C" int bind(int socket, const sockaddr* address, socklen_t size) noexcept {
  const auto bind_to = [&](const sockaddr* to) {
    return static_cast<int>(::syscall(SYS_bind, socket, to, size));
  };
  const int result = bind_to(address);
  if (result == 0 || errno != EADDRNOTAVAIL || !every_address_can_be_bound) return result;
  if (address->sa_family != AF_INET) return result;
  sockaddr_in any = *reinterpret_cast<const sockaddr_in*>(address);
  any.sin_addr.s_addr = INADDR_ANY;
  return bind_to(reinterpret_cast<const sockaddr*>(&any));
}

namespace semitone::launch {
namespace {

TEST(Ports, ListenAtAddressesOfThisMachineAlone) {
  const test::HostName name("node0", {"192.0.2.1", "127.0.0.2"});
  for (const bool every : {false, true}) {
    every_address_can_be_bound = every;
    const int port = free_port();
    // Of documents, and of no machine.
    EXPECT_EQ(listen_at({"192.0.2.1", port}).error, EADDRNOTAVAIL);
    for (const char* host : {"127.0.0.1", "127.1.2.3", "0.0.0.0", "localhost"})
      EXPECT_TRUE(listen_at({host, port}).ok()) << host;
    const auto listening = listen_at({"node0", port});
    ASSERT_EQ(listening.value.size(), 1U) << listening.problem;
    EXPECT_EQ(net::address_of(listening.value.front()).host, "127.0.0.2");
  }
  every_address_can_be_bound = false;
}

TEST(Ports, AFreePortIsNoneThatTheSystemHandsOut) {
  int first = 0;
  int last = 0;
  ASSERT_TRUE(std::ifstream("/proc/sys/net/ipv4/ip_local_port_range") >> first >> last);
  for (int i = 0; i < 100; ++i) {
    const int port = free_port();
    EXPECT_TRUE(20000 <= port && port <= 32767) << port;
    EXPECT_TRUE(port < first || port > last) << port;
  }
}

}  // namespace
}  // namespace semitone::launch

#include "src/net/sockets.h"

#include "tests/support/host_names.h"
#include "tests/support/processes.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <future>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace semitone::net {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;

// A listener with a queue for one connection: the next one waits until the first is accepted.
struct FullListener {
  FullListener() {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const auto* const pointer = reinterpret_cast<const sockaddr*>(&address);
    EXPECT_EQ(::bind(listener.number(), pointer, sizeof(address)), 0);
    EXPECT_EQ(::listen(listener.number(), 0), 0);
    first = connect_to(address_of(listener), seconds(30));
    EXPECT_TRUE(first.ok()) << first.problem;
  }

  Descriptor listener{::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)};
  Result<Descriptor> first;
};

bool is_reached(const std::string& host, int port) {
  return connect_to({host, port}, seconds(30)).ok();
}

TEST(Listening, OnAllInterfacesIsReachedThroughEach) {
  const auto listener = listen_on_all(0);
  ASSERT_TRUE(listener.ok()) << listener.problem;
  const int port = address_of(listener.value).port;
  EXPECT_TRUE(is_reached("127.0.0.1", port));
  EXPECT_TRUE(is_reached("127.0.1.1", port));
  EXPECT_TRUE(is_reached("localhost", port));
  if (listen_on({"::1", 0}).ok()) {
    EXPECT_TRUE(is_reached("::1", port));
  }
  if (const auto routed = address_of_default_route()) {
    EXPECT_TRUE(is_reached(*routed, port));
  }
  EXPECT_EQ(listen_on_all(port).error, EADDRINUSE);
}

TEST(Listening, OnOneAddressIsReachedThroughNoOther) {
  const auto listener = listen_on({"127.0.0.1", 0});
  ASSERT_TRUE(listener.ok()) << listener.problem;
  const Address here = address_of(listener.value);
  EXPECT_EQ(here.host, "127.0.0.1");
  EXPECT_TRUE(is_reached("127.0.0.1", here.port));
  EXPECT_EQ(connect_to({"127.0.1.1", here.port}, seconds(30)).error, ECONNREFUSED);
  EXPECT_EQ(listen_on(here).error, EADDRINUSE);
}

TEST(Listening, AtAForeignAddressFails) {
  const auto listener = listen_on({"192.0.2.1", 0});
  EXPECT_FALSE(listener.ok());
  EXPECT_EQ(listener.error, EADDRNOTAVAIL);
  EXPECT_EQ(listener.problem, reason_of(EADDRNOTAVAIL));
  EXPECT_THAT(listen_on({"no host", 1}).problem, HasSubstr("'no host': "));
}

TEST(Listening, AtAHostIsAtEachOfItsAddressesHereAndNoOther) {
  std::vector<std::string> addresses{"192.0.2.1", "127.0.0.2", "127.0.0.3", "127.0.0.2"};
  std::vector<std::string> own{"127.0.0.2", "127.0.0.3"};
  if (listen_on({"::1", 0}).ok()) {
    addresses.emplace_back("::1");
    own.emplace_back("::1");
  }
  const test::HostName name("node0", addresses);
  const auto listening = listen_on_own({"node0", 0});
  ASSERT_TRUE(listening.ok()) << listening.problem;
  std::vector<std::string> hosts;
  for (const Descriptor& listener : listening.value) {
    const Address here = address_of(listener);
    hosts.push_back(here.host);
    EXPECT_TRUE(is_reached(here.host, here.port)) << here.host;
    EXPECT_EQ(connect_to({"127.0.0.4", here.port}, seconds(30)).error, ECONNREFUSED);
  }
  EXPECT_EQ(hosts, own);
}

TEST(Listening, AtAHostFailsIfAnotherProgramListensAtOneOfItsAddresses) {
  const test::HostName name("node0", {"127.0.0.2", "127.0.0.3"});
  const auto other = listen_on({"127.0.0.3", 0});
  ASSERT_TRUE(other.ok()) << other.problem;
  const int port = address_of(other.value).port;
  const auto listening = listen_on_own({"node0", port});
  EXPECT_EQ(listening.error, EADDRINUSE);
  EXPECT_EQ(listening.problem, reason_of(EADDRINUSE));
  EXPECT_EQ(connect_to({"127.0.0.2", port}, seconds(30)).error, ECONNREFUSED);
}

TEST(Listening, AtAHostOfAnotherMachineFails) {
  const test::HostName name("node1", {"192.0.2.1", "2001:db8::1"});
  const auto listening = listen_on_own({"node1", 0});
  EXPECT_EQ(listening.error, EADDRNOTAVAIL);
  EXPECT_TRUE(listening.value.empty());
  EXPECT_NE(listen_on_own({"no host", 1}).lookup_error, 0);
}

TEST(Sockets, DoNotBlockAndAreClosedByExec) {
  const auto listener = listen_on({"127.0.0.1", 0});
  ASSERT_TRUE(listener.ok()) << listener.problem;
  EXPECT_FALSE(accept_from(listener.value).is_open());
  const auto connected = connect_to(address_of(listener.value), seconds(30));
  ASSERT_TRUE(connected.ok()) << connected.problem;
  Descriptor accepted;
  ASSERT_TRUE(test::eventually([&] {
    accepted = accept_from(listener.value);
    return accepted.is_open();
  }));
  for (const Descriptor* socket : {&connected.value, &std::as_const(accepted)}) {
    char byte = 0;
    EXPECT_EQ(::recv(socket->number(), &byte, 1, 0), -1);
    EXPECT_EQ(errno, EAGAIN);
  }
  for (const Descriptor* socket : {&listener.value, &connected.value, &std::as_const(accepted)}) {
    EXPECT_EQ(::fcntl(socket->number(), F_GETFD), FD_CLOEXEC);
    EXPECT_GT(socket->number(), STDERR_FILENO);
  }
}

// A listener on loopback, and what connects to it.
class ListenerTest : public ::testing::Test {
 protected:
  ListenerTest() {
    auto opened = listen_on({"127.0.0.1", 0});
    EXPECT_TRUE(opened.ok()) << opened.problem;
    address_ = address_of(opened.value);
    listener_ = Listener(std::move(opened.value));
  }

  Descriptor connect() const {
    auto connected = connect_to(address_, seconds(30));
    EXPECT_TRUE(connected.ok()) << connected.problem;
    return std::move(connected.value);
  }

  static bool is_closed(const Descriptor& socket) {
    char byte = 0;
    const ssize_t got = ::recv(socket.number(), &byte, 1, 0);
    return got == 0 || (got < 0 && errno == ECONNRESET);
  }

  Address address_;
  Listener listener_;
};

TEST_F(ListenerTest, KeepsSoManyConnectionsAndClosesTheRest) {
  const std::array<Descriptor, 3> clients{connect(), connect(), connect()};
  const std::vector<Descriptor> kept = listener_.accept(2);
  EXPECT_EQ(kept.size(), 2U);
  EXPECT_FALSE(is_closed(clients[0]));
  EXPECT_FALSE(is_closed(clients[1]));
  EXPECT_TRUE(test::eventually([&] { return is_closed(clients[2]); }));
  EXPECT_TRUE(listener_.accept(2).empty());
  EXPECT_TRUE(Listener().accept(2).empty());
}

TEST_F(ListenerTest, ClosesConnectionsWhileNoDescriptorIsLeft) {
  EXPECT_TRUE(listener_.accept(10).empty());  // as before every poll
  const std::array<Descriptor, 2> clients{connect(), connect()};
  std::vector<Descriptor> all;
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit few{256, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
  while (all.empty() || all.back().is_open())
    all.emplace_back(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  EXPECT_TRUE(listener_.accept(10).empty());
  for (const Descriptor& client : clients)
    EXPECT_TRUE(test::eventually([&] { return is_closed(client); }));
  all.clear();
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);

  const Descriptor later = connect();
  EXPECT_TRUE(test::eventually([&] { return listener_.accept(10).size() == 1; }));
}

TEST_F(ListenerTest, PausesIfNotEvenOneConnectionCanBeRefused) {
  const Descriptor client = connect();
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit few{256, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
  std::vector<Descriptor> all;
  while (all.empty() || all.back().is_open())
    all.emplace_back(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  EXPECT_TRUE(listener_.accept(10).empty());
  EXPECT_LT(listener_.descriptor(), 0);
  // Otherwise its owner would wait for another event.
  EXPECT_LT(listener_.deadline(), Time::max());
  all.clear();
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  std::vector<Descriptor> kept;
  EXPECT_TRUE(test::eventually([&] {
    kept = listener_.accept(10);
    return kept.size() == 1;
  }));
  EXPECT_FALSE(is_closed(client));
  EXPECT_EQ(listener_.deadline(), Time::max());
}

TEST(Connecting, EndsWithItsTimeout) {
  const FullListener full;
  const auto second = connect_to(address_of(full.listener), milliseconds(20));
  EXPECT_EQ(second.error, ETIMEDOUT);
  EXPECT_EQ(second.problem, reason_of(ETIMEDOUT));
  EXPECT_FALSE(second.value.is_open());
}

// Linux takes even ports for connections, and so soon comes to a given one of them.
TEST(Connecting, ToItselfIsARefusal) {
  Address address = address_of(FullListener().listener);
  address.port -= address.port % 2;
  for (int i = 0; i < 30'000; ++i)
    ASSERT_EQ(connect_to(address, seconds(30)).error, ECONNREFUSED) << "attempt " << i;
}

// A connection to the second address fails on every machine.
TEST(Connecting, TellsARefusalRatherThanWhyAnotherAddressFails) {
  const int port = address_of(FullListener().listener).port;
  const test::HostName name("node0", {"127.0.0.1", "255.255.255.255"});
  EXPECT_EQ(connect_to({"node0", port}, seconds(1)).error, ECONNREFUSED);
}

TEST(Connecting, TellsANameThatIsNone) {
  const auto connected = connect_to({"no host", 1}, seconds(30));
  EXPECT_EQ(connected.error, EHOSTUNREACH);
  EXPECT_NE(connected.lookup_error, 0);
}

TEST(Connecting, OutlastsSignals) {
  // Wakes the thread that receives it, without another effect.
  struct sigaction action{};
  struct sigaction before{};
  action.sa_handler = [](int) {};
  ASSERT_EQ(::sigaction(SIGUSR1, &action, &before), 0);

  const FullListener full;
  std::promise<Result<Descriptor>> second;
  std::thread thread([&] { second.set_value(connect_to(address_of(full.listener), seconds(30))); });
  auto connected = second.get_future();
  for (int i = 0; i < 20; ++i) {
    ::pthread_kill(thread.native_handle(), SIGUSR1);
    EXPECT_NE(connected.wait_for(milliseconds(10)), std::future_status::ready);
  }
  const Descriptor accepted(::accept(full.listener.number(), nullptr, nullptr));
  thread.join();
  ::sigaction(SIGUSR1, &before, nullptr);
  const auto result = connected.get();
  EXPECT_TRUE(result.ok()) << result.problem;
}

}  // namespace
}  // namespace semitone::net

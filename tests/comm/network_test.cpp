#include "src/comm/network.h"

#include "semitone/core/error.h"
#include "src/comm/machine.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <csignal>
#include <future>
#include <thread>

namespace semitone::comm {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

std::pair<LineChannel, LineChannel> connected_channels() {
  int ends[2];
  EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
  const int small = 4096;
  ::setsockopt(ends[0], SOL_SOCKET, SO_SNDBUF, &small, sizeof(small));
  return {LineChannel(Descriptor(ends[0])), LineChannel(Descriptor(ends[1]))};
}

TEST(LineChannel, LosesNoLineToAPeerThatReadsLater) {
  auto [writer, reader] = connected_channels();
  constexpr int kLines = 3000;  // 14 kB, more than the socket holds
  for (int i = 0; i < kLines; ++i) writer.send(std::to_string(i));
  std::vector<std::string> lines;
  // The writer receives nothing, but checks, as a side that waits for lines does.
  for (int round = 0; round < kLines && lines.size() < kLines; ++round) {
    for (std::string& line : reader.receive()) lines.push_back(std::move(line));
    EXPECT_TRUE(writer.receive().empty());
  }
  ASSERT_EQ(lines.size(), static_cast<std::size_t>(kLines));
  for (int i = 0; i < kLines; ++i) ASSERT_EQ(lines[static_cast<std::size_t>(i)], std::to_string(i));
  EXPECT_FALSE(writer.closed());
}

TEST(LineChannel, GivesUpAPeerThatDoesNotRead) {
  auto [writer, reader] = connected_channels();
  for (int i = 0; i < 3000; ++i) writer.send(std::string(100, 'x'));
  EXPECT_TRUE(writer.closed());
  EXPECT_FALSE(reader.receive().empty());
}

TEST(Addresses, AreOursLoopbackOrOthers) {
  EXPECT_EQ(address_kind("127.0.1.1", 1), AddressKind::loopback);
  EXPECT_EQ(address_kind("localhost", 1), AddressKind::loopback);
  EXPECT_EQ(address_kind("192.0.2.1", 1), AddressKind::remote);
  const auto routed = address_of_default_route();
  if (!routed.has_value()) return;  // a machine without a network
  EXPECT_EQ(address_kind(*routed, 1), AddressKind::local);
  EXPECT_FALSE(is_loopback(*routed));
}

TEST(Listening, OnAllInterfacesIsReachedThroughEach) {
  const Descriptor listener = listen_on_all(0);
  const int port = address_of(listener).port;
  EXPECT_TRUE(connect_to({"127.0.0.1", port}, seconds(30)).is_open());
  EXPECT_TRUE(connect_to({"127.0.1.1", port}, seconds(30)).is_open());
  if (const auto routed = address_of_default_route()) {
    EXPECT_TRUE(connect_to({*routed, port}, seconds(30)).is_open());
  }
  EXPECT_THROW(listen_on_all(port), CommError);
}

TEST(Machines, ShareALoopbackInterfaceInOneNetworkOfOneKernel) {
  const Machine here = this_machine();
  EXPECT_TRUE(are_same_machine(here, parse_machine(to_string(here))));
  EXPECT_TRUE(share_loopback(here, parse_machine(to_string(here))));
  const Machine pod{"pod", "kernel", "net:[1]"};
  EXPECT_FALSE(share_loopback(pod, {"pod", "kernel", "net:[2]"}));
  EXPECT_TRUE(share_loopback(pod, {"launcher", "kernel", "net:[1]"}));
  EXPECT_FALSE(share_loopback(pod, {"pod", "another", "net:[1]"}));
  EXPECT_FALSE(are_same_machine(pod, {"pod", "another", "net:[1]"}));
  // Where the kernel tells nothing.
  EXPECT_TRUE(share_loopback({"a", "-", "-"}, {"a", "-", "-"}));
  EXPECT_FALSE(share_loopback({"a", "-", "-"}, {"b", "-", "-"}));
}

TEST(Connecting, OutlastsSignals) {
  // Wakes the thread that receives it, without another effect.
  struct sigaction action{};
  struct sigaction before{};
  action.sa_handler = [](int) {};
  ASSERT_EQ(::sigaction(SIGUSR1, &action, &before), 0);

  // A queue for one connection: the next one waits until the first is accepted.
  const Descriptor listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  void* const pointer = &address;
  ASSERT_EQ(::bind(listener.number(), static_cast<sockaddr*>(pointer), sizeof(address)), 0);
  ASSERT_EQ(::listen(listener.number(), 0), 0);
  const Descriptor first = connect_to(address_of(listener), seconds(30));
  std::promise<Descriptor> second;
  std::thread thread([&] {
    try {
      second.set_value(connect_to(address_of(listener), seconds(30)));
    } catch (...) {
      second.set_exception(std::current_exception());
    }
  });
  auto connected = second.get_future();
  for (int i = 0; i < 20; ++i) {
    ::pthread_kill(thread.native_handle(), SIGUSR1);
    EXPECT_NE(connected.wait_for(milliseconds(10)), std::future_status::ready);
  }
  const Descriptor accepted(::accept(listener.number(), nullptr, nullptr));
  thread.join();
  ::sigaction(SIGUSR1, &before, nullptr);
  try {
    EXPECT_TRUE(connected.get().is_open());
  } catch (const std::exception& error) {
    ADD_FAILURE() << error.what();
  }
}

}  // namespace
}  // namespace semitone::comm

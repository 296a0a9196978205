#include "src/comm/network.h"

#include "semitone/core/error.h"
#include "src/comm/machine.h"
#include "src/comm/store.h"
#include "src/comm/watch.h"
#include "src/net/sockets.h"
#include "tests/support/errors.h"

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <chrono>
#include <future>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace semitone::comm {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(Network, FailsWithErrorsOfInit) {
  const Descriptor listener = listen_on_all(0);
  const int port = net::address_of(listener).port;
  EXPECT_THAT(test::message_of<CommError>([&] { listen_on_all(port); }),
              AllOf(HasSubstr("[comm.init]"), HasSubstr("to listen on all interfaces:"),
                    HasSubstr("Address already in use"), HasSubstr("MASTER_PORT")));
  EXPECT_THROW(listen_on("127.0.0.1", port), CommError);
  EXPECT_THAT(test::message_of<CommError>([&] { listen_on("192.0.2.1", port); }),
              HasSubstr("must name the machine that runs rank 0"));
}

TEST(Network, RefusesNamesOfNoHost) {
  for (const std::string& message :
       {test::error_of([] { listen_on("no host", 1); }),
        test::error_of([] { resolved(net::address_kind("no host")); })}) {
    EXPECT_THAT(message, AllOf(HasSubstr("a master address that can be resolved"),
                               HasSubstr("'no host': "), HasSubstr("MASTER_ADDR")));
  }
  EXPECT_EQ(resolved(net::address_kind("127.0.0.1")).value, net::AddressKind::loopback);
  EXPECT_THAT(test::error_of([] { address_of_interface("none"); }),
              AllOf(HasSubstr("'none'"), HasSubstr("there are: ")));
}

// A name that cannot be resolved in the first so many look-ups.
class LateName {
 public:
  LateName(int failures, int lookup_error) : failures_(failures), lookup_error_(lookup_error) {}

  net::Result<int> look_up() {
    if (++lookups_ > failures_) return {7, 0, 0, ""};
    return {0, EHOSTUNREACH, lookup_error_, "'pod-0': unknown"};
  }
  int lookups() const { return lookups_; }

 private:
  const int failures_;
  const int lookup_error_;
  int lookups_ = 0;
};

TEST(Network, LooksANameUpAgainUntilItIsResolved) {
  for (const int lookup_error : {EAI_AGAIN, EAI_NONAME}) {
    SCOPED_TRACE(lookup_error);
    LateName name(/*failures=*/2, lookup_error);
    const auto found =
        resolved_within({.any = std::chrono::minutes(10)}, [&] { return name.look_up(); });
    EXPECT_EQ(found.value, 7);
    EXPECT_EQ(name.lookups(), 3);
  }
}

TEST(Network, NamesANameThatIsNotResolvedInTime) {
  LateName name(/*failures=*/1000, EAI_AGAIN);
  EXPECT_THAT(test::error_of([&] {
                resolved_within({.any = std::chrono::milliseconds(100)},
                                [&] { return name.look_up(); });
              }),
              AllOf(HasSubstr("[comm.init]"), HasSubstr("a master address that can be resolved"),
                    HasSubstr("'pod-0': unknown, for 0.1 s"), HasSubstr("MASTER_ADDR")));
  EXPECT_EQ(name.lookups(), 2);
}

// Otherwise a mistyped name would be looked up for the whole timeout.
TEST(Network, GivesANameThatNoServerKnowsLessTime) {
  const net::LookupTimeouts timeouts{.any = std::chrono::hours(1),
                                     .unknown = std::chrono::milliseconds(100)};
  LateName mistyped(/*failures=*/1000, EAI_NONAME);
  EXPECT_THAT(
      test::error_of([&] { resolved_within(timeouts, [&] { return mistyped.look_up(); }); }),
      HasSubstr("'pod-0': unknown, for 0.1 s"));
  // Without an answer of a server, nothing is known about the name.
  LateName unanswered(/*failures=*/2, EAI_AGAIN);
  EXPECT_EQ(resolved_within(timeouts, [&] { return unanswered.look_up(); }).value, 7);
}

// A pod that was there, and is started anew elsewhere.
TEST(Network, TheTimeOfAnUnknownNameBeginsAnewAfterItWasKnown) {
  net::LookupRetries retries(
      {.any = std::chrono::hours(1), .unknown = std::chrono::milliseconds(50)});
  EXPECT_TRUE(retries.next(EAI_NONAME, "").has_value());
  retries.resolved();
  std::this_thread::sleep_for(std::chrono::milliseconds(60));
  EXPECT_TRUE(retries.next(EAI_NONAME, "").has_value());
  std::this_thread::sleep_for(std::chrono::milliseconds(60));
  EXPECT_FALSE(retries.next(EAI_NONAME, "").has_value());
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

// Rank 0 keeps only so many connections that have not said what they are. A rank that finds no room
// tries again, and sends again what rank 0 has not received.
TEST(Watching, ARankConnectsOnceStrangersAreGone) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto options_of = [](int rank) {
    WatchOptions options;
    options.rank = rank;
    options.size = 2;
    options.address = "127.0.0.1";
    options.interval = std::chrono::milliseconds(200);
    options.silence = std::chrono::seconds(20);
    options.timeout = std::chrono::seconds(30);
    return options;
  };
  Watch host(store, options_of(0));
  std::istringstream words(get(*store, "watch"));
  std::string token;
  net::Address address;
  words >> token >> address.host >> address.port;
  std::vector<Descriptor> strangers;
  for (int i = 0; i < 200; ++i) {
    auto connected = net::connect_to(address, std::chrono::seconds(30));
    ASSERT_TRUE(connected.ok()) << connected.problem;
    strangers.push_back(std::move(connected.value));
  }
  auto member = std::async(std::launch::async, [&] {
    Watch watch(store, options_of(1));
    return watch.barrier("here", {0, 1}, std::chrono::seconds(20), "barrier");
  });
  std::this_thread::sleep_for(std::chrono::seconds(1));
  strangers.clear();
  EXPECT_TRUE(host.barrier("here", {0, 1}, std::chrono::seconds(20), "barrier").empty());
  EXPECT_TRUE(member.get().empty());
  EXPECT_FALSE(host.loss().has_value());
}

}  // namespace
}  // namespace semitone::comm

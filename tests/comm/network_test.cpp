#include "src/comm/network.h"

#include "semitone/core/error.h"
#include "src/comm/machine.h"
#include "src/net/sockets.h"
#include "tests/support/errors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

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

}  // namespace
}  // namespace semitone::comm

#include "src/net/address.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <functional>

namespace semitone::net {
namespace {

using ::testing::HasSubstr;

TEST(Addresses, AreOursLoopbackOrOthers) {
  EXPECT_EQ(address_kind("127.0.1.1").value, AddressKind::loopback);
  EXPECT_EQ(address_kind("::1").value, AddressKind::loopback);
  EXPECT_EQ(address_kind("localhost").value, AddressKind::loopback);
  EXPECT_EQ(address_kind("0.0.0.0").value, AddressKind::wildcard);
  EXPECT_EQ(address_kind("::").value, AddressKind::wildcard);
  EXPECT_EQ(address_kind("192.0.2.1").value, AddressKind::remote);
  EXPECT_EQ(address_kind("2001:db8::1").value, AddressKind::remote);
  const auto routed = address_of_default_route();
  if (!routed.has_value()) return;  // a machine without a network
  EXPECT_EQ(address_kind(*routed).value, AddressKind::local);
  EXPECT_FALSE(is_loopback(*routed));
}

TEST(Addresses, OfNoHostAreAFailureInWords) {
  const auto kind = address_kind("no host");
  EXPECT_FALSE(kind.ok());
  EXPECT_EQ(kind.error, EHOSTUNREACH);
  EXPECT_NE(kind.lookup_error, 0);
  EXPECT_THAT(kind.problem, HasSubstr("'no host': "));
  EXPECT_EQ(address_towards("no host").problem, kind.problem);
}

TEST(Addresses, AreNumericalOrNames) {
  for (const char* host : {"127.0.0.1", "0.0.0.0", "::", "2001:db8::1"})
    EXPECT_TRUE(is_numerical(host)) << host;
  for (const char* host : {"localhost", "node0", "127.0.0.1:80", ""})
    EXPECT_FALSE(is_numerical(host)) << host;
}

TEST(Addresses, OfInterfacesStartWithIpv4) {
  const auto all = interfaces();
  ASSERT_FALSE(all.empty());
  const auto is_v6 = [](const Interface& each) {
    return each.address.find(':') != std::string::npos;
  };
  EXPECT_TRUE(std::is_partitioned(all.begin(), all.end(), std::not_fn(is_v6)));
  for (const Interface& each : all) EXPECT_EQ(each.is_loopback, is_loopback(each.address));
}

TEST(Addresses, TowardsThisMachineAreItsOwn) {
  EXPECT_EQ(address_towards("127.0.0.1").value, "127.0.0.1");
  if (const auto routed = address_of_default_route()) {
    EXPECT_EQ(address_towards(*routed).value, *routed);
  }
}

}  // namespace
}  // namespace semitone::net

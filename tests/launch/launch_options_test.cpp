#include "semitone/launch/launch_options.h"

#include "semitone/core/error.h"
#include "src/launch/endpoint.h"
#include "src/launch/process_count.h"
#include "tests/support/errors.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <string_view>

namespace semitone::launch {
namespace {

using test::expect_error;

TEST(StreamsByRank, ReadsTorchrunsWords) {
  EXPECT_EQ(StreamsByRank::parse("0").of(0), Streams::none);
  EXPECT_FALSE(StreamsByRank::parse("0").any());
  EXPECT_EQ(StreamsByRank::parse("1").of(5), Streams::out);
  EXPECT_EQ(StreamsByRank::parse("2").of(0), Streams::err);
  EXPECT_EQ(StreamsByRank::parse("3").of(0), Streams::both);
  const StreamsByRank some = StreamsByRank::parse("0:1,12:3");
  EXPECT_EQ(some.of(0), Streams::out);
  EXPECT_EQ(some.of(12), Streams::both);
  EXPECT_EQ(some.of(1), Streams::none);
  EXPECT_TRUE(some.any());
  EXPECT_FALSE(StreamsByRank::parse("3:0").any());
  for (const char* text :
       {"", "4", "-1", "3,", ",", "0:", ":1", "0:4", "a:1", "0:1;1:2", "-1:2", "0x1"})
    expect_error([&] { StreamsByRank::parse(text); }, {"[launch.options]", "0:1,1:3", text});
}

TEST(NodeCount, IsANumberOrTwo) {
  EXPECT_EQ(detail::NodeCount::parse("4").min, 4);
  EXPECT_EQ(detail::NodeCount::parse("4").max, 4);
  EXPECT_EQ(detail::NodeCount::parse("1:4").min, 1);
  EXPECT_EQ(detail::NodeCount::parse("1:4").max, 4);
  for (const char* text : {"", "0", "-1", "4:1", "0:3", "1:", ":1", "one", "1:2:3", "99999999"})
    expect_error([&] { detail::NodeCount::parse(text); }, {"[launch.options]", "1:4", text});
}

TEST(Endpoint, IsAHostWithOrWithoutAPort) {
  EXPECT_EQ(Endpoint::parse("node0:1234").host, "node0");
  EXPECT_EQ(Endpoint::parse("node0:1234").port, 1234);
  EXPECT_EQ(Endpoint::parse("node0").port, 29400);
  EXPECT_EQ(Endpoint::parse("[::1]:5").host, "::1");
  EXPECT_EQ(Endpoint::parse("[::1]:5").port, 5);
  EXPECT_EQ(Endpoint::parse("[fe80::2]").host, "fe80::2");
  for (const char* text : {"node0:1234", "[::1]:5"})
    EXPECT_EQ(Endpoint::parse(text).to_string(), text);
  for (const char* text :
       {"", ":1", "a:", "a:b", "a:1b", "a:65536", "a:-1", "::1", "[::1", "[]:1", "[::1]5"})
    expect_error([&] { Endpoint::parse(text); }, {"an endpoint as in", text});
}

TEST(ProcessCount, IsANumberOrOneForEachCore) {
  EXPECT_EQ(ProcessCount::parse("3").count, 3);
  EXPECT_EQ(ProcessCount::parse("3").reason, "");
  const ProcessCount cores = ProcessCount::parse("cpu");
  EXPECT_GE(cores.count, 1);
  EXPECT_EQ(cores.reason, "one for each of " + std::to_string(cores.count) + " cores");
  EXPECT_GE(ProcessCount::parse("auto").count, 1);
  for (const char* text : {"", "0", "-1", "many", "1.5", "1000000"})
    expect_error([&] { ProcessCount::parse(text); }, {"[launch.options]", "nproc-per-node", text});
}

TEST(LaunchOptions, ThatMakeNoSenseAreErrors) {
  const LaunchOptions good("program");
  good.check();
  const LaunchOptions several = LaunchOptions(good).nnodes({2, 2}).master_addr("node0");
  several.check();
  const auto expect = [](const LaunchOptions& options, std::string_view part) {
    expect_error([&] { options.check(); }, {"[launch.options]", part});
  };
  expect(LaunchOptions(""), "a program");
  expect(LaunchOptions(good).nproc_per_node(0), "nproc-per-node from 1");
  expect(LaunchOptions(good).nnodes({0, 0}), "nnodes from 1");
  expect(LaunchOptions(good).nnodes({3, 2}), "nnodes from 1");
  expect(LaunchOptions(good).node_rank(1), "node-rank from 0 to 0");
  expect(LaunchOptions(several).node_rank(2), "node-rank from 0 to 1");
  expect(LaunchOptions(several).node_rank(-1), "node-rank from 0");
  expect(LaunchOptions(good).max_restarts(-1), "max-restarts");
  expect(LaunchOptions(good).master_port(65536), "master-port from 0 to 65535");
  expect(LaunchOptions(several).master_port(65535), "master-port from 0 to 65534");
  expect(LaunchOptions(good).nnodes({2, 2}), "rdzv-endpoint or master-addr");
  expect(LaunchOptions(several).nnodes({1, 2}), "rdzv-endpoint with a range");
  expect(LaunchOptions(several).rdzv_endpoint("node0"), "got both");
  expect(LaunchOptions(good).nnodes({2, 2}).rdzv_endpoint("node0:0"), "with a port");
  expect(LaunchOptions(good).rdzv_endpoint("node0:x"), "an endpoint as in");
  for (const char* endpoint : {"0.0.0.0", "[::]:29400", "0:29400", "0x0", "[0:0::0]"}) {
    const auto everywhere = LaunchOptions(good).rdzv_endpoint(endpoint);
    everywhere.check();
    expect(LaunchOptions(everywhere).nnodes({2, 2}), "local-addr with the address");
    LaunchOptions(everywhere).nnodes({2, 2}).local_addr("192.0.2.1").check();
  }
  expect(LaunchOptions(several).master_addr("0.0.0.0"), "local-addr with the address 0.0.0.0");
  expect(LaunchOptions(good).rdzv_id("a/b"), "rdzv-id in UTF-8 without '/'");
  expect(LaunchOptions(good).rdzv_id("\xe9tude"), "rdzv-id in UTF-8");
  expect(LaunchOptions(good).rdzv_id(std::string(256, 'a')), "the name of a folder");
  expect(LaunchOptions(good).rdzv_token("a b"), "printable ASCII characters, without spaces, got");
  expect(LaunchOptions(good).rdzv_token(std::string(1025, 'a')), "at most 1024");
  expect(LaunchOptions(good).redirects(Streams::out), "log-dir with redirects");
  expect(LaunchOptions(good).grace(LaunchOptions::Seconds(-1)), "grace from 0");
  expect(LaunchOptions(good).heartbeat_timeout(LaunchOptions::Seconds(0)), "heartbeat-timeout");
  expect(LaunchOptions(good).join_timeout(LaunchOptions::Seconds(NAN)), "join-timeout");
  expect(LaunchOptions(good).last_call(LaunchOptions::Seconds(INFINITY)), "last-call");
}

}  // namespace
}  // namespace semitone::launch

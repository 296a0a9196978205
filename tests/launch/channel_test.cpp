#include "src/launch/channel.h"

#include "src/launch/descriptor.h"
#include "tests/support/processes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <unistd.h>

#include <string>
#include <string_view>
#include <utility>

namespace semitone::launch {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;

struct Ends {
  Channel one;
  Channel other;
};

Ends connected(Clock::duration timeout = 60s) {
  auto [one, other] = socket_pair();
  return {Channel(std::move(one), timeout), Channel(std::move(other), timeout)};
}

template <typename Kind>
Kind received(Channel& channel) {
  channel.update(Clock::now());
  const auto message = channel.receive();
  if (message.has_value() && std::holds_alternative<Kind>(*message))
    return std::get<Kind>(*message);
  ADD_FAILURE() << "another message, or none";
  return {};
}

TEST(Channel, BringsEveryMessageAsItWas) {
  Ends ends = connected();
  Join join;
  join.run_id = "job \"one\"\n";
  join.min_nodes = 2;
  join.max_nodes = 3;
  join.node_rank = 1;
  join.processes = 8;
  join.program = "train";
  join.command = digest_of({"--epochs", "3"});
  join.host = "here";
  ends.one.send(join);
  const Join got = received<Join>(ends.other);
  EXPECT_EQ(got.protocol, kProtocol);
  EXPECT_EQ(got.run_id, join.run_id);
  EXPECT_EQ(got.min_nodes, 2);
  EXPECT_EQ(got.max_nodes, 3);
  EXPECT_EQ(got.node_rank, 1);
  EXPECT_EQ(got.processes, 8);
  EXPECT_EQ(got.program, "train");
  EXPECT_EQ(got.command, join.command);
  EXPECT_EQ(got.host, "here");

  ends.one.send(StandBy{"full"});
  EXPECT_EQ(received<StandBy>(ends.other).reason, "full");

  Assignment assignment;
  assignment.attempt = 1;
  assignment.world_size = 7;
  assignment.master_addr = "there";
  assignment.master_port = 1234;
  ends.one.send(assignment);
  EXPECT_EQ(received<Assignment>(ends.other).master_port, 1234);

  WorkerFailure failure;
  failure.rank = 3;
  failure.status = {0, 11};
  failure.last_lines = "one\ntwo \xff";  // no UTF-8
  ends.one.send(failure);
  const auto got_failure = received<WorkerFailure>(ends.other);
  EXPECT_EQ(got_failure.status.signal, 11);
  EXPECT_THAT(got_failure.last_lines, HasSubstr("one\ntwo "));

  ends.one.send(Outcome{Outcome::Kind::restart, failure, "why"});
  const auto outcome = received<Outcome>(ends.other);
  EXPECT_EQ(outcome.kind, Outcome::Kind::restart);
  EXPECT_EQ(outcome.failure->rank, 3);
  EXPECT_EQ(outcome.reason, "why");
  ends.one.send(Outcome{Outcome::Kind::succeeded, std::nullopt, ""});
  EXPECT_FALSE(received<Outcome>(ends.other).failure.has_value());

  ends.one.send(Leave{"done"});
  EXPECT_EQ(received<Leave>(ends.other).reason, "done");
  ends.one.send(Succeeded());
  received<Succeeded>(ends.other);
}

TEST(Channel, SeesThatTheOtherEndIsOfAnotherVersion) {
  auto [socket, other] = socket_pair();
  Channel channel(std::move(socket), 60s);
  const std::string_view text = "{\"join\":{\"protocol\":17,\"what\":[]}}\n";
  ASSERT_EQ(::write(other.number(), text.data(), text.size()), static_cast<ssize_t>(text.size()));
  EXPECT_EQ(received<Join>(channel).protocol, 17);
  EXPECT_TRUE(channel.is_open());
}

// A launcher shows the failure, and ends with its exit code.
TEST(Messages, AFailureHasAStatusThatIsOne) {
  WorkerFailure failure;
  failure.status = {255, 0};
  EXPECT_TRUE(decode(encode(failure)).has_value());
  EXPECT_TRUE(decode(encode(Outcome{Outcome::Kind::failed, failure, "why"})).has_value());
  EXPECT_FALSE(decode(encode(Outcome{Outcome::Kind::failed, std::nullopt, "why"})).has_value());
  EXPECT_TRUE(decode(encode(Outcome{Outcome::Kind::lost, std::nullopt, "why"})).has_value());
  for (const ExitStatus status : {ExitStatus{0, 0}, {256, 0}, {-1, 0}, {0, 128}, {0, -1}}) {
    failure.status = status;
    EXPECT_FALSE(decode(encode(failure)).has_value()) << status.to_string();
    EXPECT_FALSE(decode(encode(Outcome{Outcome::Kind::restart, failure, ""})).has_value());
  }
}

TEST(Messages, ListsOfWordsAreToldApart) {
  EXPECT_EQ(digest_of({"a", "b"}), digest_of({"a", "b"}));
  EXPECT_NE(digest_of({"a", "b"}), digest_of({"ab"}));
  EXPECT_NE(digest_of({"a", "b"}), digest_of({"b", "a"}));
  EXPECT_NE(digest_of({}), digest_of({""}));
}

TEST(Channel, BringsMoreThanASocketHolds) {
  Ends ends = connected();
  WorkerFailure failure;
  failure.status.code = 1;
  failure.last_lines = std::string(500'000, 'x');
  for (int i = 0; i < 10; ++i) ends.one.send(failure);
  EXPECT_NE(ends.one.events() & POLLOUT, 0);
  int got = 0;
  EXPECT_TRUE(test::eventually([&] {
    ends.one.update(Clock::now());
    ends.other.update(Clock::now());
    while (ends.other.receive().has_value()) ++got;
    return got == 10;
  }));
}

TEST(Channel, BeatsKeepItOpenAndAreNotHeard) {
  Ends ends = connected();
  Time now = Clock::now();
  for (int i = 0; i < 20; ++i) {
    now += 15s;
    ends.one.update(now);
    ends.other.update(now);
    EXPECT_FALSE(ends.other.receive().has_value());
  }
  EXPECT_TRUE(ends.other.is_open());
}

TEST(Channel, SilenceForTooLongClosesIt) {
  Ends ends = connected();
  const Time begin = Clock::now();
  for (const auto later : {20s, 40s, 59s}) {
    ends.one.update(begin + later);
    EXPECT_TRUE(ends.one.is_open());
  }
  EXPECT_LE(ends.one.deadline(), begin + 61s);
  ends.one.update(begin + 61s);
  EXPECT_EQ(ends.one.state(), Channel::State::silent);
  EXPECT_EQ(ends.one.problem(), "no message from it for 60 s");
}

TEST(Channel, SilenceDoesNotCountWhileNobodyListened) {
  Ends ends = connected();
  const Time begin = Clock::now();
  ends.one.update(begin + 1000s);
  EXPECT_TRUE(ends.one.is_open());
  ends.one.update(begin + 1020s);
  ends.one.update(begin + 1040s);
  ends.one.update(begin + 1061s);
  EXPECT_FALSE(ends.one.is_open());
}

TEST(Channel, WhatWasSaidBeforeTheEndIsHeard) {
  auto [socket, other_socket] = socket_pair();
  Channel channel(std::move(socket), 60s);
  {
    Channel other(std::move(other_socket), 60s);
    other.send(Leave{"bye"});
  }
  EXPECT_EQ(received<Leave>(channel).reason, "bye");
  EXPECT_EQ(channel.state(), Channel::State::closed);
  channel.send(Succeeded());
  channel.update(Clock::now());
}

TEST(Channel, AnythingElseClosesIt) {
  for (const std::string& text :
       {std::string("GET / HTTP/1.1\r\n"), std::string("[]\n"), std::string("{}\n"),
        std::string("{\"join\":{}}\n"), std::string("{\"verdict\":{\"kind\":1}}\n"),
        std::string("{\"verdict\":{\"kind\":\"what\",\"reason\":\"\"}}\n"),
        std::string("{\"join\":{\"protocol\":4294967298}}\n"),
        std::string("{\"join\":{\"protocol\":1e300}}\n"),
        "{\"succeeded\":" + std::string(100'000, '[') + std::string(100'000, ']') + "}\n",
        std::string("{\"what\":{}}\n"), std::string(2 << 20, 'x'), std::string("\0\n", 2)}) {
    auto [socket, other] = socket_pair();
    Channel channel(std::move(socket), 60s);
    std::string_view rest = text;
    while (!rest.empty() && channel.is_open()) {
      const auto count = ::write(other.number(), rest.data(), rest.size());
      if (count > 0) rest.remove_prefix(static_cast<std::size_t>(count));
      channel.update(Clock::now());
    }
    EXPECT_EQ(channel.state(), Channel::State::foreign) << text.substr(0, 40);
    EXPECT_FALSE(channel.receive().has_value());
  }
}

// Not a closed connection, after which the launcher would try again.
TEST(Channel, AnythingElseBeforeTheEndIsForeign) {
  auto [socket, other] = socket_pair();
  Channel channel(std::move(socket), 60s);
  const std::string_view text = "HTTP/1.1 400 Bad Request\r\n\r\n";
  ASSERT_EQ(::write(other.number(), text.data(), text.size()), static_cast<ssize_t>(text.size()));
  other.close();
  channel.update(Clock::now());
  EXPECT_EQ(channel.state(), Channel::State::foreign);
  EXPECT_THAT(channel.problem(), HasSubstr("no launcher of Semitone"));
}

}  // namespace
}  // namespace semitone::launch

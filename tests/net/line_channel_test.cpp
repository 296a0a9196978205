#include "src/net/line_channel.h"

#include "src/net/sockets.h"
#include "tests/support/processes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace semitone::net {
namespace {

using namespace std::chrono_literals;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using State = LineChannel::State;

constexpr LineLimits kSmall{.max_line = 100, .max_unsent = 1000};

std::pair<Descriptor, Descriptor> socket_pair() {
  int ends[2];
  EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
  return {Descriptor(ends[0]), Descriptor(ends[1])};
}

// A channel, and the other end as it is.
struct Half {
  LineChannel channel;
  Descriptor other;

  void write(std::string_view text) const {
    ASSERT_EQ(::write(other.number(), text.data(), text.size()), static_cast<ssize_t>(text.size()));
  }
};

Half half(const LineLimits& limits = {}) {
  auto [one, other] = socket_pair();
  return {LineChannel(std::move(one), 60s, limits), std::move(other)};
}

std::vector<std::string> received(LineChannel& channel) {
  channel.update(Clock::now());
  std::vector<std::string> lines;
  while (auto line = channel.receive()) lines.push_back(*std::move(line));
  return lines;
}

std::pair<LineChannel, LineChannel> connected_channels() {
  auto [one, other] = socket_pair();
  const int small = 4096;
  ::setsockopt(one.number(), SOL_SOCKET, SO_SNDBUF, &small, sizeof(small));
  return {LineChannel(std::move(one), 60s), LineChannel(std::move(other), 60s)};
}

TEST(LineChannel, LosesNoLineToAPeerThatReadsLater) {
  auto [writer, reader] = connected_channels();
  constexpr int kLines = 3000;  // 14 kB, more than the socket holds
  for (int i = 0; i < kLines; ++i) writer.send(std::to_string(i));
  EXPECT_NE(writer.events() & POLLOUT, 0);
  std::vector<std::string> lines;
  // The writer receives nothing, but checks, as a side that waits for lines does.
  for (int round = 0; round < kLines && lines.size() < kLines; ++round) {
    for (std::string& line : received(reader)) lines.push_back(std::move(line));
    EXPECT_TRUE(received(writer).empty());
  }
  ASSERT_EQ(lines.size(), static_cast<std::size_t>(kLines));
  for (int i = 0; i < kLines; ++i) ASSERT_EQ(lines[static_cast<std::size_t>(i)], std::to_string(i));
  EXPECT_TRUE(writer.is_open());
  EXPECT_EQ(writer.events(), POLLIN);
}

TEST(LineChannel, GivesUpAPeerThatDoesNotRead) {
  auto [writer, reader] = connected_channels();
  for (int i = 0; i < 3000; ++i) writer.send(std::string(100, 'x'));
  EXPECT_EQ(writer.state(), State::closed);
  EXPECT_EQ(writer.problem(), "it does not read its messages");
  EXPECT_FALSE(received(reader).empty());
}

TEST(LineChannel, WaitsForTheEndOfALine) {
  Half half = net::half();
  half.write("be");
  EXPECT_THAT(received(half.channel), IsEmpty());
  half.write("at 1\nbe");
  EXPECT_THAT(received(half.channel), ElementsAre("beat 1"));
  half.write("at 2\n\nbye\n");
  EXPECT_THAT(received(half.channel), ElementsAre("beat 2", "", "bye"));
  for (const char letter : std::string("slow\n")) {
    EXPECT_THAT(received(half.channel), IsEmpty());
    half.write({&letter, 1});
  }
  EXPECT_THAT(received(half.channel), ElementsAre("slow"));
}

TEST(LineChannel, ClosesWhenALineIsTooLong) {
  Half half = net::half(kSmall);
  half.write(std::string(100, 'x') + "\nshort\n" + std::string(100, 'y'));
  EXPECT_THAT(received(half.channel), ElementsAre(std::string(100, 'x'), "short"));
  EXPECT_TRUE(half.channel.is_open());
  half.write("last\n" + std::string(101, 'z'));
  EXPECT_THAT(received(half.channel), ElementsAre(std::string(100, 'y') + "last"));
  EXPECT_EQ(half.channel.state(), State::foreign);
  EXPECT_EQ(half.channel.problem(), "it sent a line of more than 100 bytes");
  EXPECT_LT(half.channel.descriptor(), 0);
}

// Of a peer that sends faster than this end reads.
TEST(LineChannel, ReadsALimitedAmountAtOnce) {
  auto [one, other] = socket_pair();
  const int large = 1 << 20;
  ::setsockopt(other.number(), SOL_SOCKET, SO_SNDBUF, &large, sizeof(large));
  LineChannel channel(std::move(one), 60s);
  const std::string text(1000, '\n');
  std::size_t sent = 0;
  std::size_t most = 0;
  std::size_t total = 0;
  for (int i = 0; i < 5; ++i) {
    for (ssize_t count = 0; count >= 0;
         sent += static_cast<std::size_t>(std::max<ssize_t>(count, 0)))
      count = ::send(other.number(), text.data(), text.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    const std::size_t lines = received(channel).size();
    most = std::max(most, lines);
    total += lines;
  }
  while (total < sent && channel.is_open()) total += received(channel).size();
  EXPECT_EQ(total, sent);
  EXPECT_LE(most, (std::size_t{1} << 18) + 4096);
}

TEST(LineChannel, ReadsNoMoreAtOnceThanItsLimit) {
  Half half = net::half({.max_read = 1});
  half.write(std::string(10'000, '\n'));
  std::size_t most = 0;
  std::size_t total = 0;
  for (int i = 0; i < 10'000 && total < 10'000; ++i) {
    const std::size_t lines = received(half.channel).size();
    most = std::max(most, lines);
    total += lines;
  }
  EXPECT_EQ(total, 10'000U);
  EXPECT_LE(most, 4096U);
}

TEST(LineChannel, LimitsCanBeReplaced) {
  Half half = net::half(kSmall);
  half.channel.set_limits({.max_line = 200});
  half.write(std::string(150, 'x'));
  EXPECT_THAT(received(half.channel), IsEmpty());
  half.write(std::string(50, 'x') + "\n");
  EXPECT_THAT(received(half.channel), ElementsAre(std::string(200, 'x')));
}

TEST(LineChannel, ReturnsWhatWasSentBeforeTheEnd) {
  Half half = net::half();
  half.write("one\ntwo\npart");
  half.other.close();
  EXPECT_THAT(received(half.channel), ElementsAre("one", "two"));
  EXPECT_EQ(half.channel.state(), State::closed);
  EXPECT_EQ(half.channel.problem(), "it closed the connection");
  half.channel.send("nothing happens");
  EXPECT_THAT(received(half.channel), IsEmpty());
}

TEST(LineChannel, ReturnsWhatWasSentBeforeAFailedWrite) {
  Half half = net::half();
  half.write("one\n");
  half.other.close();
  half.channel.send("to a closed connection");
  half.channel.send("again");
  EXPECT_THAT(received(half.channel), ElementsAre("one"));
  EXPECT_EQ(half.channel.state(), State::closed);
}

TEST(LineChannel, SendsEverythingBeforeItFinishes) {
  auto [one, other] = connected_channels();
  one.send("bye");
  one.finish();
  EXPECT_THAT(received(other), ElementsAre("bye"));
  EXPECT_EQ(other.state(), State::closed);
}

// Closing at once would lose what does not fit into the socket, and reset the connection because of
// the input.
TEST(LineChannel, ClosesAfterTheOtherEndHasEverything) {
  auto [writer, reader] = connected_channels();
  constexpr int kLines = 3000;  // more than the socket holds
  for (int i = 0; i < kLines; ++i) writer.send(std::to_string(i));
  for (int i = 0; i < 10; ++i) reader.send("not read");
  writer.update(Clock::now());
  writer.close_after_sending();
  EXPECT_EQ(writer.events() & POLLIN, 0);
  std::vector<std::string> lines;
  for (int round = 0; round < 2 * kLines && writer.is_open(); ++round) {
    reader.send("not read either");
    for (std::string& line : received(reader)) lines.push_back(std::move(line));
    EXPECT_TRUE(received(writer).empty());
  }
  EXPECT_EQ(writer.state(), State::closed);
  EXPECT_EQ(reader.problem(), "it closed the connection");
  ASSERT_EQ(lines.size(), static_cast<std::size_t>(kLines));
  for (int i = 0; i < kLines; ++i) ASSERT_EQ(lines[static_cast<std::size_t>(i)], std::to_string(i));
}

TEST(LineChannel, ClosesIfTheOtherEndIsGoneBeforeItHasEverything) {
  auto [writer, reader] = connected_channels();
  for (int i = 0; i < 3000; ++i) writer.send(std::to_string(i));
  writer.close_after_sending();
  EXPECT_TRUE(writer.is_open());
  reader.close(State::closed, "it has enough");
  writer.update(Clock::now());
  EXPECT_EQ(writer.state(), State::closed);
}

TEST(LineChannel, DropsLinesWhenItsOwnerClosesIt) {
  Half half = net::half();
  half.write("GET / HTTP/1.1\nHost: here\n");
  half.other.close();
  half.channel.update(Clock::now());
  EXPECT_EQ(half.channel.receive(), "GET / HTTP/1.1");
  half.channel.close(State::foreign, "a browser");
  EXPECT_EQ(half.channel.state(), State::foreign);
  EXPECT_EQ(half.channel.problem(), "a browser");
  EXPECT_FALSE(half.channel.receive().has_value());
}

TEST(LineChannel, NoticesAPeerThatNeverSpeaks) {
  Half half = net::half();
  const Time begin = Clock::now();
  for (const auto later : {20s, 40s, 59s}) {
    half.channel.update(begin + later);
    EXPECT_FALSE(half.channel.is_silent(begin + later));
  }
  EXPECT_LE(half.channel.deadline(), begin + 61s);
  half.channel.update(begin + 61s);
  EXPECT_TRUE(half.channel.is_silent(begin + 61s));
  // Its owner decides what follows.
  EXPECT_TRUE(half.channel.is_open());
}

TEST(LineChannel, NoticesAnyByte) {
  Half half = net::half();
  const Time begin = Clock::now();
  for (const auto later : {20s, 40s, 60s, 80s, 100s}) {
    half.write("x");
    half.channel.update(begin + later);
    EXPECT_FALSE(half.channel.is_silent(begin + later));
  }
}

TEST(LineChannel, GoesOverIpv4AndIpv6) {
  for (const std::string host : {"127.0.0.1", "::1"}) {
    const auto listener = listen_on({host, 0});
    if (host == "::1" && !listener.ok()) continue;  // a machine without IPv6
    ASSERT_TRUE(listener.ok()) << listener.problem;
    auto connected = connect_to(address_of(listener.value), 30s);
    ASSERT_TRUE(connected.ok()) << connected.problem;
    LineChannel one(std::move(connected.value), 60s);
    Descriptor accepted;
    ASSERT_TRUE(test::eventually([&] {
      accepted = accept_from(listener.value);
      return accepted.is_open();
    }));
    LineChannel other(std::move(accepted), 60s);
    one.send("there");
    EXPECT_TRUE(
        test::eventually([&] { return received(other) == std::vector<std::string>{"there"}; }));
    other.send("and back");
    EXPECT_TRUE(
        test::eventually([&] { return received(one) == std::vector<std::string>{"and back"}; }));
  }
}

}  // namespace
}  // namespace semitone::net

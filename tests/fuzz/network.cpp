// Parsers of what comes over sockets, and of the addresses to which they connect.

#include "semitone/launch/launch_options.h"
#include "src/comm/introduction.h"
#include "src/comm/rendezvous.h"
#include "src/comm/watch_messages.h"
#include "src/core/parse_number.h"
#include "src/launch/endpoint.h"
#include "src/launch/messages.h"
#include "src/net/line_channel.h"
#include "tests/fuzz/require.h"
#include "tests/fuzz/targets.h"

#include <sys/socket.h>

#include <chrono>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

namespace semitone::fuzz {

void lines(std::string_view input) {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0)
    throw std::runtime_error("no sockets");
  Descriptor other(ends[0]);
  net::LineChannel channel(Descriptor(ends[1]), std::chrono::seconds(60), {.max_line = 100});
  std::size_t bytes = 0;
  while (!input.empty()) {
    const auto sent = ::send(other.number(), input.data(), std::min<std::size_t>(input.size(), 333),
                             MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent <= 0) break;  // the channel is closed
    input.remove_prefix(static_cast<std::size_t>(sent));
    channel.update(net::Clock::now());
    while (const auto line = channel.receive()) {
      require(line->find('\n') == std::string::npos, "a line");
      bytes += line->size() + 1;
    }
  }
  require(bytes <= 1 << 20, "no more than what was sent");
}

void messages(std::string_view input) {
  const auto message = launch::decode(input);
  if (!message.has_value()) return;
  const std::string line = launch::encode(*message);
  require(line.find('\n') == std::string::npos, "a message to be one line");
  const auto again = launch::decode(line);
  require(again.has_value() && again->index() == message->index() && launch::encode(*again) == line,
          "a message to be the same after it was sent");
}

void rendezvous(std::string_view input) {
  accept_or_refuse([&] { comm::parse_rendezvous(input); });
  accept_or_refuse([&] {
    const auto endpoint = launch::Endpoint::parse(input);
    const auto again = launch::Endpoint::parse(endpoint.to_string());
    require(again.host == endpoint.host && again.port == endpoint.port, "the same endpoint");
  });
  accept_or_refuse([&] { launch::StreamsByRank::parse(input); });
}

void watch(std::string_view input) {
  std::string_view line = input;
  const std::string_view verb = comm::next_word(line);
  require(verb.size() + line.size() <= input.size(), "parts of the line");
  parse_number<std::uint64_t>(line);
  const auto loss = comm::parse_loss(line);
  const auto again = comm::parse_loss(comm::format_loss(loss));
  require(again.ranks == loss.ranks && again.what == loss.what, "the same loss");
  const std::string introduction = comm::to_string(comm::parse_introduction(line));
  require(comm::to_string(comm::parse_introduction(introduction)) == introduction,
          "the same introduction");
}

}  // namespace semitone::fuzz

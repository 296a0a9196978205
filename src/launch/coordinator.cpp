#include "src/launch/coordinator.h"

#include "src/launch/quiet_thread.h"

#include <poll.h>

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace semitone::launch {
namespace {

constexpr auto kStopTimeout = std::chrono::seconds(5);
// How long a stranger has to read its answer.
constexpr auto kAnswerTimeout = std::chrono::seconds(5);

// A join has up to 6 KiB: a token of 1024 bytes, two names of 255 and a host's, of which JSON may
// need six bytes for one. What is unsent is one message: an outcome, with the end of a process's
// output.
constexpr net::LineLimits kStrangerLimits{
    .max_line = 1 << 14, .max_unsent = 1 << 20, .max_read = 1 << 12};

}  // namespace

Coordinator::Coordinator(Job job, std::vector<Descriptor> listeners,
                         Clock::duration heartbeat_timeout, std::size_t most_strangers)
    : heartbeat_timeout_(heartbeat_timeout),
      most_strangers_(most_strangers),
      listeners_(std::make_move_iterator(listeners.begin()),
                 std::make_move_iterator(listeners.end())),
      job_(std::move(job), Clock::now()) {
  auto [ours, theirs] = socket_pair();
  own_end_ = std::move(theirs);
  members_.emplace(next_++, Channel(std::move(ours), kOwnTimeout));
  thread_ = quiet_thread([this] { run(); });
}

Coordinator::~Coordinator() {
  stop_.set();
  thread_.join();
}

void Coordinator::run() {
  while (!stop_at_.has_value() || (Clock::now() < *stop_at_ && has_connections())) {
    wait();
    const Time now = Clock::now();
    accept(now);
    receive_joins(now);
    for (auto& [id, channel] : members_) {
      channel.update(now);
      receive_messages(id, channel, now);
    }
    job_.tick(now);
    send_messages();
    erase_closed(now);
    send_messages();
    // The next job at this address need not wait until this node's processes have ended.
    if (job_.is_over()) listeners_.clear();
  }
}

void Coordinator::wait() {
  std::vector<pollfd> events;
  Time until = job_.deadline();
  if (stop_at_.has_value()) {
    until = std::min(until, *stop_at_);
  } else {
    events.push_back({stop_.descriptor(), POLLIN, 0});
  }
  for (const net::Listener& listener : listeners_) {
    until = std::min(until, listener.deadline());
    events.push_back({listener.descriptor(), POLLIN, 0});
  }
  for (const auto& [id, channel] : members_) {
    events.push_back({channel.descriptor(), channel.events(), 0});
    until = std::min(until, channel.deadline());
  }
  for (const auto& [id, stranger] : strangers_) {
    events.push_back({stranger.lines.descriptor(), stranger.lines.events(), 0});
    until = std::min(until, stranger.close_at);
  }
  net::poll_until(events, until);
  if (!stop_at_.has_value() && events.front().revents != 0) stop_at_ = Clock::now() + kStopTimeout;
}

void Coordinator::accept(Time now) {
  for (net::Listener& listener : listeners_) {
    const std::size_t room = most_strangers_ - std::min(most_strangers_, strangers_.size());
    for (Descriptor& socket : listener.accept(room)) {
      net::LineChannel lines(std::move(socket), heartbeat_timeout_, kStrangerLimits);
      strangers_.emplace(next_++, Stranger{std::move(lines), now + heartbeat_timeout_});
    }
  }
}

void Coordinator::receive_joins(Time now) {
  for (auto next = strangers_.begin(); next != strangers_.end();) {
    const auto current = next++;
    auto& [id, stranger] = *current;
    stranger.lines.update(now);
    receive_join(id, stranger, now);
    const bool joined = job_.has(id);
    // Even if it has closed the connection since: what it sent after the join is received first.
    if (joined) members_.emplace(id, Channel(std::move(stranger.lines), heartbeat_timeout_));
    if (joined || !stranger.lines.is_open() || now >= stranger.close_at) strangers_.erase(current);
  }
}

void Coordinator::receive_join(JobState::Id id, Stranger& stranger, Time now) {
  // After the answer the channel has no more lines.
  const auto line = stranger.lines.receive();
  if (!line.has_value()) return;
  // Without an answer, its launcher tries again, and finds the next job.
  if (job_.is_over())
    return stranger.lines.close(net::LineChannel::State::closed, "the job is over");
  const auto message = decode(*line);
  const auto* const join = message.has_value() ? std::get_if<Join>(&*message) : nullptr;
  if (join == nullptr) {
    return stranger.lines.close(net::LineChannel::State::foreign, "it did not ask to take part");
  }
  stranger.close_at = now + kAnswerTimeout;
  job_.joined(id, *join, now);
}

void Coordinator::receive_messages(JobState::Id id, Channel& channel, Time now) {
  while (const auto message = channel.receive()) {
    if (const auto* join = std::get_if<Join>(&*message)) job_.joined(id, *join, now);
    if (const auto* failure = std::get_if<WorkerFailure>(&*message)) job_.failed(id, *failure, now);
    if (std::holds_alternative<Succeeded>(*message)) job_.succeeded(id);
    if (const auto* leave = std::get_if<Leave>(&*message)) {
      job_.lost(id, leave->reason, now);
      return channel.close();
    }
  }
}

void Coordinator::send_messages() {
  for (const auto& [id, message] : job_.take_messages()) {
    if (const auto member = members_.find(id); member != members_.end()) {
      member->second.send(message);
    } else if (const auto stranger = strangers_.find(id); stranger != strangers_.end()) {
      stranger->second.lines.send(encode(message));
      stranger->second.lines.close_after_sending();
    }
  }
}

void Coordinator::erase_closed(Time now) {
  for (auto next = members_.begin(); next != members_.end();) {
    const auto current = next++;
    if (current->second.is_open()) continue;
    const JobState::Id id = current->first;
    const std::string problem = current->second.problem();
    members_.erase(current);
    job_.lost(id, problem, now);
  }
}

}  // namespace semitone::launch

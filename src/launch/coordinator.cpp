#include "src/launch/coordinator.h"

#include "src/launch/quiet_thread.h"
#include "src/net/polling.h"
#include "src/net/sockets.h"

#include <algorithm>
#include <csignal>
#include <exception>

namespace semitone::launch {
namespace {

constexpr auto kStopTimeout = std::chrono::seconds(5);

}  // namespace

Coordinator::Coordinator(Job job, Descriptor listener, Clock::duration heartbeat_timeout,
                         std::size_t most_strangers)
    : heartbeat_timeout_(heartbeat_timeout),
      most_strangers_(most_strangers),
      listener_(std::move(listener)),
      job_(std::move(job), Clock::now()),
      stop_(make_pipe()) {
  auto [ours, theirs] = socket_pair();
  own_end_ = std::move(theirs);
  connections_.emplace(next_++,
                       Connection{Channel(std::move(ours), heartbeat_timeout), Time::max()});
  thread_ = quiet_thread([this] { run(); });
}

Coordinator::~Coordinator() {
  stop_.write.close();
  thread_.join();
}

void Coordinator::run() {
  while (!stop_at_.has_value() || (Clock::now() < *stop_at_ && !connections_.empty())) {
    wait();
    const Time now = Clock::now();
    accept(now);
    for (auto& [id, connection] : connections_) {
      connection.channel.update(now);
      receive_messages(id, connection.channel, now);
      if (is_stranger(id) && now >= connection.join_by) connection.channel.close();
    }
    job_.tick(now);
    send_messages();
    for (auto next = connections_.begin(); next != connections_.end();) {
      const auto current = next++;
      if (!current->second.channel.is_open()) erase(current->first, now);
    }
    send_messages();
  }
}

void Coordinator::wait() {
  std::vector<pollfd> events;
  Time until = job_.deadline();
  if (stop_at_.has_value()) {
    until = std::min(until, *stop_at_);
  } else {
    events.push_back({stop_.read.number(), POLLIN, 0});
  }
  events.push_back({listener_.descriptor(), POLLIN, 0});
  for (const auto& [id, connection] : connections_) {
    events.push_back({connection.channel.descriptor(), connection.channel.events(), 0});
    until = std::min(until, connection.channel.deadline());
    if (is_stranger(id)) until = std::min(until, connection.join_by);
  }
  net::poll_until(events, until);
  if (!stop_at_.has_value() && events.front().revents != 0) stop_at_ = Clock::now() + kStopTimeout;
}

void Coordinator::accept(Time now) {
  std::size_t strangers = 0;
  for (const auto& [id, connection] : connections_)
    if (is_stranger(id)) ++strangers;
  for (Descriptor& socket :
       listener_.accept(most_strangers_ - std::min(most_strangers_, strangers))) {
    connections_.emplace(next_++, Connection{Channel(std::move(socket), heartbeat_timeout_),
                                             now + heartbeat_timeout_});
  }
}

void Coordinator::receive_messages(JobState::Id id, Channel& channel, Time now) {
  while (const auto message = channel.receive()) {
    if (const auto* join = std::get_if<Join>(&*message)) job_.joined(id, *join, now);
    if (const auto* failure = std::get_if<WorkerFailure>(&*message)) job_.failed(id, *failure, now);
    if (std::holds_alternative<Succeeded>(*message)) job_.succeeded(id);
    if (const auto* leave = std::get_if<Leave>(&*message)) job_.lost(id, leave->reason, now);
  }
}

void Coordinator::send_messages() {
  for (const auto& [id, message] : job_.take_messages()) {
    const auto connection = connections_.find(id);
    if (connection != connections_.end()) connection->second.channel.send(message);
  }
}

void Coordinator::erase(JobState::Id id, Time now) {
  const std::string problem = connections_.at(id).channel.problem();
  connections_.erase(id);
  job_.lost(id, problem, now);
}

}  // namespace semitone::launch

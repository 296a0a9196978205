#include "src/launch/coordinator.h"

#include "src/launch/quiet_thread.h"
#include "src/net/polling.h"
#include "src/net/sockets.h"

#include <csignal>
#include <exception>

namespace semitone::launch {
namespace {

constexpr auto kStopTimeout = std::chrono::seconds(5);

}  // namespace

Coordinator::Coordinator(Job job, Descriptor listener, Clock::duration heartbeat_timeout)
    : heartbeat_timeout_(heartbeat_timeout),
      listener_(std::move(listener)),
      job_(std::move(job), Clock::now()),
      stop_(make_pipe()) {
  auto [ours, theirs] = socket_pair();
  own_end_ = std::move(theirs);
  channels_.emplace(next_++, Channel(std::move(ours), heartbeat_timeout));
  thread_ = quiet_thread([this] { run(); });
}

Coordinator::~Coordinator() {
  stop_.write.close();
  thread_.join();
}

void Coordinator::run() {
  while (!stop_at_.has_value() || (Clock::now() < *stop_at_ && !channels_.empty())) {
    wait();
    const Time now = Clock::now();
    accept();
    for (auto& [id, channel] : channels_) {
      channel.update(now);
      receive_messages(id, channel, now);
    }
    job_.tick(now);
    send_messages();
    for (auto next = channels_.begin(); next != channels_.end();) {
      const auto current = next++;
      if (!current->second.is_open()) erase(current->first, now);
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
  events.push_back({listener_.number(), POLLIN, 0});
  for (const auto& [id, channel] : channels_) {
    events.push_back({channel.descriptor(), channel.events(), 0});
    until = std::min(until, channel.deadline());
  }
  net::poll_until(events, until);
  if (!stop_at_.has_value() && events.front().revents != 0) stop_at_ = Clock::now() + kStopTimeout;
}

void Coordinator::accept() {
  if (!listener_.is_open()) return;
  for (Descriptor socket = net::accept_from(listener_); socket.is_open();
       socket = net::accept_from(listener_)) {
    channels_.emplace(next_++, Channel(std::move(socket), heartbeat_timeout_));
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
    const auto channel = channels_.find(id);
    if (channel != channels_.end()) channel->second.send(message);
  }
}

void Coordinator::erase(JobState::Id id, Time now) {
  const std::string problem = channels_.at(id).problem();
  channels_.erase(id);
  job_.lost(id, problem, now);
}

}  // namespace semitone::launch

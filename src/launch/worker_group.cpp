#include "src/launch/worker_group.h"

#include "semitone/core/error.h"
#include "src/core/host_name.h"
#include "src/core/log.h"
#include "src/launch/child.h"
#include "src/launch/log_files.h"
#include "src/launch/posix_process_group.h"
#include "src/launch/worker_environment.h"
#include "src/net/polling.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>

namespace semitone::launch {
namespace {

// How often to check if no event arrives.
constexpr auto kPollInterval = std::chrono::milliseconds(20);
// How often to check whether the groups of processes that have ended are empty, which reads /proc.
constexpr auto kGroupInterval = std::chrono::seconds(1);
// How long SIGKILL may take: a process that waits for a disk or a driver does not react to it.
constexpr auto kKillTimeout = std::chrono::seconds(30);

bool has(Streams streams, Streams one) {
  return (static_cast<int>(streams) & static_cast<int>(one)) != 0;
}

// Readable when the process has ended. Closed if the system does not support it (before Linux 5.3).
Descriptor handle_of(pid_t id) {
  return above_standard_streams(Descriptor(static_cast<int>(::syscall(SYS_pidfd_open, id, 0))));
}

}  // namespace

WorkerGroup::WorkerGroup(const LaunchOptions& options, const Assignment& assignment,
                         OutputRelay& relay, WorkerReaper& reaper)
    : options_(options), assignment_(assignment), relay_(relay), reaper_(reaper) {
  try {
    for (int i = 0; i < options.nproc_per_node(); ++i) start(i);
  } catch (...) {
    kill_and_wait();
    throw;
  }
}

WorkerGroup::~WorkerGroup() {
  kill_and_wait();
}

void WorkerGroup::start(int local_rank) {
  Worker worker;
  worker.local_rank = local_rank;
  const Descriptor in = open_null(O_RDONLY);
  Descriptor out;
  Descriptor err;
  worker.out = make_stream(local_rank, Streams::out, out);
  worker.err = make_stream(local_rank, Streams::err, err);
  ChildOptions child;
  child.argv = {options_.program().string()};
  for (const std::string& argument : options_.arguments())
    child.argv.push_back(with_local_rank(argument, local_rank));
  child.environment = worker_environment(assignment_, options_, local_rank);
  child.in = in.number();
  child.out = out.number();
  child.err = err.number();
  child.own_group = true;
  child.death_signal = SIGKILL;
  child.registry = reaper_.registry();
  worker.id = start_child(child);
  worker.handle = handle_of(worker.id);
  workers_.push_back(std::move(worker));
}

WorkerGroup::Stream WorkerGroup::make_stream(int local_rank, Streams which, Descriptor& theirs) {
  const bool tee = has(teed(options_, local_rank), which);
  if (!tee && !has(redirected(options_, local_rank), which)) return {};
  const int rank = assignment_.first_rank + local_rank;
  Stream result;
  Descriptor file;
  if (!options_.log_dir().empty()) {
    const char* const name = which == Streams::out ? "stdout.log" : "stderr.log";
    const auto path = log_folder(options_.log_dir(), assignment_) / std::to_string(rank) / name;
    LogFile log = open_log(path);
    file = std::move(log.descriptor);
    result.file = path.string();
    result.file_begin = log.size;
  }
  if (!tee) {
    theirs = std::move(file);
    return result;
  }
  Pipe pipe = make_pipe();
  theirs = std::move(pipe.write);
  const int console = which == Streams::out ? STDOUT_FILENO : STDERR_FILENO;
  result.relayed =
      relay_.add({std::move(pipe.read), console, fmt::format("[rank{}]: ", rank), std::move(file)});
  return result;
}

void WorkerGroup::watch(std::vector<pollfd>& events) const {
  for (const Worker& worker : workers_) {
    if (!worker.status.has_value() && worker.handle.is_open())
      events.push_back({worker.handle.number(), POLLIN, 0});
  }
}

Time WorkerGroup::deadline(Time now) const {
  Time next = std::min(kill_at_, abandon_at_);
  for (const Worker& worker : workers_) {
    if (!worker.status.has_value()) {
      if (!worker.handle.is_open()) next = std::min(next, now + kPollInterval);
    } else if (!worker.group_ended) {
      next = std::min(next, stopping_ ? now + kPollInterval : check_groups_at_);
    }
  }
  return next;
}

void WorkerGroup::update(Time now) {
  std::optional<std::size_t> first;
  const bool check_groups = stopping_ || now >= check_groups_at_;
  if (check_groups) check_groups_at_ = now + kGroupInterval;
  for (std::size_t i = 0; i < workers_.size(); ++i) {
    Worker& worker = workers_[i];
    const bool ended = reap(worker);
    // Soon: without a process in it, the group's number may be reused, and signal_all() would reach
    // others.
    if (ended || check_groups) check_group(worker);
    if (!ended || stopping_ || worker.status->success()) continue;
    // Of the processes that ended since the last check, one that a signal ended is the cause: the
    // others notice the loss and return an exit code.
    if (!first.has_value() || (worker.status->signal != 0 && workers_[*first].status->signal == 0))
      first = i;
  }
  if (!failed_.has_value()) failed_ = first;
  if (all_succeeded()) stop(SIGTERM, now);  // what they have left behind
  if (now >= kill_at_) {
    signal_all(SIGKILL);
    killed_ = true;
    kill_at_ = Time::max();
    abandon_at_ = now + kKillTimeout;
  }
  if (now >= abandon_at_) abandon();
}

// Whether the process has ended since the last check.
bool WorkerGroup::reap(Worker& worker) {
  if (worker.status.has_value()) return false;
  int status = 0;
  const pid_t ended = ::waitpid(worker.id, &status, WNOHANG);
  if (ended == 0 || (ended < 0 && errno != ECHILD)) return false;
  // If this program ignores SIGCHLD, the exit status of a process is lost.
  worker.status = ended > 0 ? exit_status(status) : ExitStatus{255, 0};
  worker.stopped = stopping_;
  worker.handle.close();
  return true;
}

// A stopped process does not fail itself: others that wait for it fail.
void WorkerGroup::report_stopped() const {
  for (const Worker& worker : workers_) {
    siginfo_t info{};
    if (worker.status.has_value() ||
        ::waitid(P_PID, static_cast<id_t>(worker.id), &info, WSTOPPED | WNOHANG | WNOWAIT) != 0 ||
        info.si_pid != worker.id)
      continue;
    log()->warn(
        "rank {} (process {}) was stopped by {}: other processes may have failed because of it",
        assignment_.first_rank + worker.local_rank, worker.id,
        ExitStatus{0, info.si_status}.to_string());
  }
}

void WorkerGroup::check_group(Worker& worker) {
  if (!worker.status.has_value() || worker.group_ended || is_group_alive(worker.id)) return;
  worker.group_ended = true;
  reaper_.remove(worker.id);
}

void WorkerGroup::signal_all(int signal) {
  for (const Worker& worker : workers_) {
    if (!worker.group_ended) ::kill(-worker.id, signal);
  }
}

void WorkerGroup::forward(int signal) {
  for (const Worker& worker : workers_) {
    if (!worker.status.has_value()) ::kill(worker.id, signal);
  }
}

void WorkerGroup::stop(int signal, Time now) {
  if (stopping_ && signal != SIGKILL) return;
  // Otherwise a process that SIGKILL does not end would never be abandoned.
  if (killed_) return;
  if (signal == SIGKILL) {
    kill_at_ = now;
  } else {
    report_stopped();
    signal_all(signal);
    kill_at_ = now + std::chrono::duration_cast<Clock::duration>(options_.grace());
  }
  stopping_ = true;
}

void WorkerGroup::abandon() {
  for (Worker& worker : workers_) {
    if (worker.group_ended) continue;
    log()->warn("process {} does not end, even after SIGKILL: abandoned", worker.id);
    if (!worker.status.has_value()) {
      worker.status = ExitStatus{0, SIGKILL};
      worker.stopped = true;
    }
    worker.group_ended = true;
    reaper_.remove(worker.id);
  }
  abandon_at_ = Time::max();
}

void WorkerGroup::kill_and_wait() {
  stop(SIGKILL, Clock::now());
  for (update(Clock::now()); !has_ended(); update(Clock::now())) {
    std::vector<pollfd> nothing;
    net::poll_until(nothing, Clock::now() + kPollInterval);
  }
  for (const Worker& worker : workers_) {
    if (worker.out.relayed.has_value()) relay_.retire(*worker.out.relayed);
    if (worker.err.relayed.has_value()) relay_.retire(*worker.err.relayed);
  }
}

bool WorkerGroup::all_succeeded() const {
  return std::all_of(workers_.begin(), workers_.end(), [](const Worker& worker) {
    return worker.status.has_value() && worker.status->success();
  });
}

bool WorkerGroup::has_ended() const {
  return std::all_of(workers_.begin(), workers_.end(), [](const Worker& worker) {
    return worker.status.has_value() && worker.group_ended;
  });
}

std::optional<WorkerFailure> WorkerGroup::first_failure() const {
  if (!failed_.has_value()) return std::nullopt;
  const Worker& worker = workers_[*failed_];
  WorkerFailure failure;
  failure.rank = assignment_.first_rank + worker.local_rank;
  failure.local_rank = worker.local_rank;
  failure.node = assignment_.node;
  failure.host = host_name();
  failure.pid = worker.id;
  failure.status = *worker.status;
  for (const Stream* stream : {&worker.err, &worker.out}) {
    failure.log = stream->file;
    failure.last_lines = last_lines(*stream);
    if (!failure.last_lines.empty()) break;
  }
  return failure;
}

std::string WorkerGroup::last_lines(const Stream& stream) const {
  if (stream.relayed.has_value()) return relay_.last_lines(*stream.relayed);
  return stream.file.empty() ? std::string()
                             : last_lines_of(end_of_file(stream.file, stream.file_begin));
}

std::vector<WorkerStatus> WorkerGroup::statuses() const {
  std::vector<WorkerStatus> result;
  result.reserve(workers_.size());
  for (const Worker& worker : workers_) {
    result.push_back({assignment_.first_rank + worker.local_rank, worker.local_rank, worker.id,
                      worker.status.value_or(ExitStatus()), worker.stopped});
  }
  return result;
}

}  // namespace semitone::launch

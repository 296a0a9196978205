#pragma once

#include "semitone/launch/launch_options.h"
#include "semitone/launch/launch_result.h"
#include "src/launch/clock.h"
#include "src/launch/messages.h"
#include "src/launch/output_relay.h"
#include "src/launch/worker_reaper.h"

#include <poll.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace semitone::launch {

// This node's processes in one attempt. Never blocks.
class WorkerGroup {
 public:
  // Starts the processes. If one cannot be started: Error, and none is left.
  WorkerGroup(const LaunchOptions& options, const Assignment& assignment, OutputRelay& relay,
              WorkerReaper& reaper);
  // Kills the remaining processes.
  ~WorkerGroup();
  WorkerGroup(const WorkerGroup&) = delete;
  WorkerGroup& operator=(const WorkerGroup&) = delete;

  // Adds the events to poll for.
  void watch(std::vector<pollfd>& events) const;
  // When to call update() even without an event.
  Time deadline(Time now) const;
  // Detects processes that have ended, and kills those whose grace period is over.
  void update(Time now);

  // Sends the signal to the processes only, not to those that they have started.
  void forward(int signal);
  // Sends the signal to all remaining processes, and SIGKILL after the grace period. Call it once;
  // SIGKILL may be sent at any time.
  void stop(int signal, Time now);

  // Whether every process has returned 0.
  bool all_succeeded() const;
  // The first process that failed before stop().
  std::optional<WorkerFailure> first_failure() const;
  // Whether all processes have ended, including those that they have started.
  bool has_ended() const;

  std::vector<WorkerStatus> statuses() const;

 private:
  // One stream of one process.
  struct Stream {
    std::optional<OutputRelay::Id> relayed;
    std::string file;             // or empty
    std::int64_t file_begin = 0;  // where this process's output begins in the file
  };
  struct Worker {
    int local_rank = 0;
    pid_t id = -1;      // and its group's
    Descriptor handle;  // readable when it has ended
    std::optional<ExitStatus> status;
    bool stopped = false;
    bool group_ended = false;
    Stream out;
    Stream err;
  };

  void start(int local_rank);
  Stream make_stream(int local_rank, Streams which, Descriptor& theirs);
  bool reap(Worker& worker);
  void report_stopped() const;
  void check_group(Worker& worker);
  void signal_all(int signal);
  void abandon();
  void kill_and_wait();
  std::string last_lines(const Stream& stream) const;

  const LaunchOptions& options_;
  Assignment assignment_;
  OutputRelay& relay_;
  WorkerReaper& reaper_;
  std::vector<Worker> workers_;
  std::optional<std::size_t> failed_;  // index of the first
  bool stopping_ = false;
  bool killed_ = false;     // SIGKILL was sent to all
  Time check_groups_at_{};  // those of processes that have ended
  Time kill_at_ = Time::max();
  Time abandon_at_ = Time::max();
};

}  // namespace semitone::launch

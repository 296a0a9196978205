#pragma once

#include "semitone/launch/launcher.h"
#include "src/launch/channel.h"
#include "src/launch/guardian.h"
#include "src/launch/messages.h"
#include "src/launch/output_relay.h"

#include <poll.h>

#include <optional>
#include <string>
#include <vector>

namespace semitone::launch {

// This node's processes of one attempt. Never waits.
class WorkerGroup {
 public:
  // Starts them. Error if one cannot be; none is left then.
  WorkerGroup(const LaunchOptions& options, const Assignment& assignment, OutputRelay& relay,
              Guardian& guardian);
  // Kills what is left.
  ~WorkerGroup();
  WorkerGroup(const WorkerGroup&) = delete;
  WorkerGroup& operator=(const WorkerGroup&) = delete;

  // Adds what to poll.
  void watch(std::vector<pollfd>& events) const;
  // When to call update() although poll() tells nothing.
  Time deadline(Time now) const;
  // Sees who has ended, and kills those who take too long to.
  void update(Time now);

  // Sends the signal to the processes themselves, not to what they have started, and no more.
  void forward(int signal);
  // Sends the signal to all that is left, and SIGKILL after the grace. Once; but SIGKILL at any
  // time.
  void stop(int signal, Time now);

  // Every process has returned 0.
  bool all_succeeded() const;
  // The first that failed by itself, before stop().
  std::optional<WorkerFailure> first_failure() const;
  // Nothing is left, of what they have started neither.
  bool is_gone() const;

  std::vector<WorkerStatus> statuses() const;

 private:
  // One stream of one process.
  struct Stream {
    std::optional<OutputRelay::Id> relayed;
    std::string file;  // or empty
  };
  struct Worker {
    int local_rank = 0;
    pid_t id = -1;      // and its group's
    Descriptor handle;  // readable when it has ended
    std::optional<ExitStatus> status;
    bool stopped = false;
    bool group_gone = false;
    Stream out;
    Stream err;
  };

  void start(int local_rank);
  Stream make_stream(int local_rank, Streams which, Descriptor& theirs);
  bool reap(Worker& worker);
  void report_stopped() const;
  void look_for_leftovers(Worker& worker);
  void signal_all(int signal);
  void give_up();
  void kill_and_wait();
  std::string last_lines(const Stream& stream) const;

  const LaunchOptions& options_;
  Assignment assignment_;
  OutputRelay& relay_;
  Guardian& guardian_;
  std::vector<Worker> workers_;
  std::optional<std::size_t> failed_;  // index of the first
  bool stopping_ = false;
  bool killed_ = false;  // SIGKILL was sent to all
  Time kill_at_ = Time::max();
  Time give_up_at_ = Time::max();
};

}  // namespace semitone::launch

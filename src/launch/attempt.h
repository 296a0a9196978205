#pragma once

#include "semitone/launch/launch_options.h"
#include "semitone/launch/launch_result.h"
#include "src/launch/channel.h"
#include "src/launch/clock.h"
#include "src/launch/interrupt.h"
#include "src/launch/messages.h"
#include "src/launch/output_relay.h"
#include "src/launch/worker_group.h"
#include "src/launch/worker_reaper.h"

#include <optional>
#include <vector>

namespace semitone::launch {

// One attempt on this node: from the start of its processes until all have ended.
class Attempt {
 public:
  // Starts the processes. Error if one cannot be started.
  // @param channel  to node 0, which receives their results and decides what follows
  Attempt(const LaunchOptions& options, const Assignment& assignment, Interrupt& interrupt,
          Channel& channel, OutputRelay& relay, WorkerReaper& reaper);

  // Waits for the end, and stops the remaining processes.
  Outcome run();

  std::vector<WorkerStatus> statuses() const { return group_.statuses(); }

 private:
  void wait();
  void report_result(Time now);
  void apply_outcome(Time now);
  void check_interrupt(Time now);
  void end(const Outcome& outcome, int signal, Time now);
  // The outcome is final. A restart may still turn into the end of the job.
  bool is_final() const;

  Interrupt& interrupt_;
  Channel& channel_;
  WorkerGroup group_;
  bool reported_ = false;
  std::optional<Outcome> outcome_;
};

}  // namespace semitone::launch

#pragma once

#include "src/launch/channel.h"
#include "src/launch/guardian.h"
#include "src/launch/interrupt.h"
#include "src/launch/messages.h"
#include "src/launch/output_relay.h"
#include "src/launch/worker_group.h"

#include <optional>
#include <vector>

namespace semitone::launch {

// One attempt on this node: from the start of its processes until none is left.
class Attempt {
 public:
  // Starts them. Error if one cannot be.
  // @param channel  to node 0, which hears how they end and decides what follows
  Attempt(const LaunchOptions& options, const Assignment& assignment, Interrupt& interrupt,
          Channel& channel, OutputRelay& relay, Guardian& guardian);

  // Waits for the end; stops what is left.
  Verdict run();

  std::vector<WorkerStatus> statuses() const { return group_.statuses(); }

 private:
  void wait();
  void report(Time now);
  void obey(Time now);
  void look_at_interrupt(Time now);
  void end(const Verdict& verdict, int signal, Time now);
  // Nothing can follow. A restart may still turn into the end.
  bool is_final() const;

  Interrupt& interrupt_;
  Channel& channel_;
  WorkerGroup group_;
  bool reported_ = false;
  std::optional<Verdict> verdict_;
};

}  // namespace semitone::launch

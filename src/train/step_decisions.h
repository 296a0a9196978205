#pragma once

#include "semitone/comm/group.h"
#include "src/train/save_interval.h"

#include <c10/core/Device.h>

#include <chrono>
#include <cstdint>
#include <functional>

namespace semitone::train {

// What a training does after a step.
struct StepDecision {
  bool save = false;    // a checkpoint of this step
  int stop_signal = 0;  // the signal that ends the training here; 0: it continues
};

// Decides after each step, equally on all processes of a group.
//
// A number of steps needs no communication. Signals and times do: process 0 reads the clock, a
// signal may reach any process, and the processes may be at different steps when it arrives. They
// therefore combine what they know in one all-reduce of three numbers, some 0.1 ms between processes
// of a machine, after certain steps. Process 0 chooses the next of these steps from the duration of
// the last ones, so that about 50 ms pass between two all-reduces. A signal or a time thus takes
// effect after at most about 0.1 s, or after the step in progress if that takes longer. A process
// without a group decides after every step.
class StepDecisions {
 public:
  // Returns a signal that has arrived, or 0.
  using StopSignal = std::function<int()>;

  // @param stop_signal  empty on all processes, or on none
  // @param device       of the group's tensors
  StepDecisions(const SaveInterval& interval, StopSignal stop_signal, comm::Group group,
                c10::Device device);

  // Every process calls it after each step.
  // @param step  steps done
  StepDecision after(std::int64_t step);

  // The time until the next save starts now.
  void restart_clock() { last_save_ = Clock::now(); }

 private:
  using Clock = std::chrono::steady_clock;

  bool is_time_over() const;
  StepDecision ask_all(std::int64_t step);
  std::int64_t steps_to_next_question(std::int64_t step);

  SaveInterval interval_;
  StopSignal stop_signal_;
  comm::Group group_;
  c10::Device device_;
  Clock::time_point last_save_ = Clock::now();
  std::int64_t next_question_ = 0;  // the step after which the processes communicate
  // Of the last question, on process 0.
  std::int64_t question_step_ = 0;
  Clock::time_point question_time_ = Clock::now();
};

}  // namespace semitone::train

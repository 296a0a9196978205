#pragma once

#include "semitone/core/events.h"
#include "semitone/report/run_log.h"
#include "src/report/run_files.h"
#include "src/report/scale_numbers.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <functional>
#include <mutex>
#include <optional>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

namespace semitone::report {

// Learns of the steps of a RunLog. The RunLog calls it on the thread of set_step(). Of close() it
// learns on the thread that added it only: on another one, its step may be in progress.
class StepObserver {
 public:
  StepObserver() = default;
  StepObserver(const StepObserver&) = delete;
  StepObserver& operator=(const StepObserver&) = delete;
  virtual ~StepObserver() = default;

  // Before anything else of set_step(). An Error that it throws is the caller's. After a FileError,
  // the step begins all the same.
  virtual void before_step(std::int64_t step) = 0;
  // At the end of set_step().
  virtual void step_began(std::int64_t step) = 0;
  // At the beginning of close().
  virtual void before_close(Outcome outcome) = 0;
};

// What a RunLog and its listener share. The listener may outlive the RunLog, in a task of
// at::launch for example: events after close() are ignored.
class RunLog::Impl {
 public:
  // Adds to the files at a moment.
  using Add = std::function<void(RunFiles& files, const Moment& when)>;

  Impl(const std::filesystem::path& directory, const RunLogOptions& options);

  bool writes() const { return writes_; }
  // Whether the last write failed, which the caller or the log knows.
  bool has_failed() const { return failed_; }

  // The number of processes that train together.
  std::int64_t world_size() const { return world_size_; }

  bool is_closed();

  // Makes an observer the only one, or removes it, on one thread. Error if there is another one.
  void add_observer(StepObserver& observer);
  void remove_observer(const StepObserver& observer);

  void set_step(std::int64_t step);
  void add(std::optional<std::int64_t> step, const Add& add);
  void flush();
  void close(Outcome outcome, std::string_view reason);

  void on(const events::LossScaleUpdated& event);
  void on(const events::StepSkipped& event);

 private:
  using Clock = std::chrono::steady_clock;

  // Writes what is left and the end, and keeps the first FileError.
  void end(Outcome outcome, std::string_view reason, std::exception_ptr& first);

  // These are called with the lock.
  void require_open() const;
  void begin_step(std::int64_t step);
  void record_event(Add add);
  // At the first step that a continued run names: readers drop what the earlier starts have from there.
  void mark_continuation(std::int64_t step);
  void record_waiting_events(std::int64_t step);
  void flush_if_due();
  // Calls a function that writes, and applies ignore_write_errors to its FileError.
  void write(const std::function<void()>& function);

  const RunLogOptions options_;
  const bool writes_;
  const std::int64_t world_size_;
  // Not read with the lock: it adds to the files itself.
  std::atomic<StepObserver*> observer_ = nullptr;
  std::atomic<std::thread::id> observer_thread_;
  std::mutex mutex_;
  std::optional<RunFiles> files_;  // until close, if this process writes
  bool closed_ = false;
  bool failed_ = false;
  std::optional<std::int64_t> step_;    // of set_step
  std::optional<std::int64_t> marked_;  // where a continued run was marked last
  std::int64_t last_step_ = 0;          // of the last value
  // Events before the first step is known, and their times.
  std::vector<std::pair<double, Add>> waiting_events_;
  ScaleNumbers scale_numbers_;
  Clock::time_point last_flush_ = Clock::now();
};

}  // namespace semitone::report

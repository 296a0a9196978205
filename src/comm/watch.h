#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

// Who is still there. c10d's own errors name sockets ("Connection closed by peer
// [10.0.0.3]:41871"), and a rank that hears of a failure first tears others down with it. So every
// rank shows signs of life in the store, and the first to see a failure writes down whom it misses,
// for all to report the same.
namespace semitone::comm {

class Watch {
 public:
  // Starts the signs of life, over a connection to the store of its own.
  Watch(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, std::string host_of_store,
        std::chrono::milliseconds interval);
  // Says goodbye and stops.
  ~Watch();
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  // Throws the CommError that a failed collective amounts to: who is lost, or late, or what else
  // went wrong. Takes up to about four intervals, in which the others are listened for.
  [[noreturn]] void explain(const std::string& collective, const std::string& problem);

  // The error that explain() throws.
  std::exception_ptr explanation(const std::string& collective, const std::string& problem);

  // Ranks that show no sign of life for three intervals.
  std::vector<int> silent_ranks();

 private:
  void show_life();

  c10::intrusive_ptr<c10d::Store> store_;  // for questions
  c10::intrusive_ptr<c10d::Store> own_;    // for the thread
  int rank_;
  int size_;
  std::string host_of_store_;
  std::chrono::milliseconds interval_;
  std::mutex mutex_;
  std::condition_variable stop_;
  bool stopping_ = false;
  std::mutex explaining_;
  std::exception_ptr explained_;
  std::thread thread_;
};

}  // namespace semitone::comm

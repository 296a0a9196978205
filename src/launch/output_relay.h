#pragma once

#include "src/launch/descriptor.h"
#include "src/launch/interrupt.h"
#include "src/net/polling.h"

#include <atomic>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace semitone::launch {

// The last lines of a text, up to 20.
std::string last_lines_of(std::string_view text);

// Relays what processes write, line by line without mixing lines, to this process's streams and to
// files. It runs in its own thread: if nothing reads the output (a pager that waits), only the
// writing processes wait, not their launcher.
class OutputRelay {
 public:
  using Id = int;

  // One stream of one process.
  struct Source {
    Descriptor pipe;     // the end to read from
    int console = -1;    // this process's stream
    std::string prefix;  // of each line there
    Descriptor file;     // or closed
  };

  OutputRelay();
  // Drops the remaining output.
  ~OutputRelay();
  OutputRelay(const OutputRelay&) = delete;
  OutputRelay& operator=(const OutputRelay&) = delete;

  Id add(Source source);

  // Up to 20 of its last lines. Call it after its process has ended; it waits up to a second for
  // the remaining output.
  std::string last_lines(Id id);

  // Removes the source as soon as its available output is relayed, even if another process still
  // has the other end, and continues to write.
  void retire(Id id);

  // Retires all sources, and waits until everything is relayed. Drops the remaining output at this
  // time, or if the interrupt becomes urgent.
  void finish(const Interrupt& interrupt, net::Time until = net::Time::max());

 private:
  struct Stream;

  void run();
  std::vector<std::shared_ptr<Stream>> active();
  void read(Stream& stream);
  bool is_retired(const Stream& stream);
  void relay(Stream& stream, bool all);
  void write_console(int console, std::string_view text);
  void retire_all();
  void drop();
  void wake() const;

  net::WakeEvent wake_;
  net::WakeEvent abort_;
  std::atomic<bool> aborted_{false};
  bool console_is_gone_[3] = {};     // by descriptor; of the thread
  bool console_has_failed_[3] = {};  // likewise

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<Id, std::shared_ptr<Stream>> streams_;
  Id next_ = 0;
  bool stop_ = false;  // when no stream is left
  bool stopped_ = false;
  std::thread thread_;
};

}  // namespace semitone::launch

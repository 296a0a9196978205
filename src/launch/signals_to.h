#pragma once

// Internal interface: the program semitone includes this header.

#include <csignal>
#include <utility>
#include <vector>

namespace semitone::launch {

class Launcher;

// Forwards this process's signals to a launcher while this object exists; then the previous
// handlers are restored. SIGINT, SIGTERM, SIGHUP and SIGQUIT stop the job. SIGUSR1 and SIGUSR2 go to
// its processes: batch systems send these before a time limit, for a checkpoint. Signals that the
// program handles itself, or was started to ignore (SIGHUP under nohup), stay as they are. One at a
// time.
class SignalsTo {
 public:
  explicit SignalsTo(Launcher& launcher);
  ~SignalsTo();
  SignalsTo(const SignalsTo&) = delete;
  SignalsTo& operator=(const SignalsTo&) = delete;

 private:
  void replace(int signal, void (*from)(int), void (*handler)(int));

  std::vector<std::pair<int, struct sigaction>> before_;
};

}  // namespace semitone::launch

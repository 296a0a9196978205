#include "tests/support/accelerator/machine.h"

#include <execinfo.h>
#include <signal.h>
#include <unistd.h>

#include <string_view>

// Says why a program ended that used memory of the pretend accelerator from the host.
namespace semitone::test::accelerator {
namespace {

void on_fault(int signal, siginfo_t* info, void* /*context*/) {
  if (Machine::instance().memory().owns(info->si_addr)) {
    constexpr std::string_view kMessage =
        "host code touched memory of the pretend accelerator; called from:\n";
    [[maybe_unused]] const auto written = ::write(2, kMessage.data(), kMessage.size());
    void* frames[48];
    ::backtrace_symbols_fd(frames, ::backtrace(frames, 48), 2);
  }
  ::signal(signal, SIG_DFL);  // the access is repeated, and ends the process
}

const bool installed = [] {
  void* frame[1];
  ::backtrace(frame, 1);  // loads what it needs while memory may still be allocated
  struct sigaction action = {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO;
  ::sigaction(SIGSEGV, &action, nullptr);
  return true;
}();

}  // namespace
}  // namespace semitone::test::accelerator

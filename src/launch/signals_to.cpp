#include "src/launch/signals_to.h"

#include "semitone/launch/launcher.h"

#include <atomic>

namespace semitone::launch {
namespace {

std::atomic<Launcher*> receiver = nullptr;

void stop(int signal) {
  if (Launcher* const launcher = receiver.load()) launcher->stop(signal);
}

void forward(int signal) {
  if (Launcher* const launcher = receiver.load()) launcher->forward(signal);
}

}  // namespace

SignalsTo::SignalsTo(Launcher& launcher) {
  receiver = &launcher;
  // If it were ignored, exit statuses would be lost.
  replace(SIGCHLD, SIG_IGN, SIG_DFL);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGQUIT}) replace(signal, SIG_DFL, stop);
  for (const int signal : {SIGUSR1, SIGUSR2}) replace(signal, SIG_DFL, forward);
}

SignalsTo::~SignalsTo() {
  for (const auto& [signal, before] : before_) ::sigaction(signal, &before, nullptr);
  receiver = nullptr;
}

void SignalsTo::replace(int signal, void (*from)(int), void (*handler)(int)) {
  struct sigaction before{};
  ::sigaction(signal, nullptr, &before);
  if ((before.sa_flags & SA_SIGINFO) != 0 || before.sa_handler != from) return;
  before_.emplace_back(signal, before);
  struct sigaction action{};
  action.sa_handler = handler;
  action.sa_flags = SA_RESTART;
  ::sigaction(signal, &action, nullptr);
}

}  // namespace semitone::launch

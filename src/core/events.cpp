#include "semitone/core/events.h"

#include "src/core/thread_state.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace semitone::events {
namespace {

struct Listeners : c10::DebugInfoBase {
  std::vector<std::shared_ptr<Listener>> all;
};

const Listeners* current() {
  return static_cast<const Listeners*>(c10::ThreadLocalDebugInfo::get(kEventsState));
}

template <typename Event>
void tell(const Event& event) {
  const Listeners* listeners = current();
  if (listeners == nullptr) return;
  for (const auto& listener : listeners->all) listener->on(event);
}

std::shared_ptr<Listeners> with(const std::shared_ptr<Listener>& listener,
                                const c10::DebugInfoBase* outer) {
  auto listeners = std::make_shared<Listeners>();
  if (outer != nullptr) listeners->all = static_cast<const Listeners*>(outer)->all;
  listeners->all.push_back(listener);
  return listeners;
}

}  // namespace

struct Listen::Guard {
  explicit Guard(std::shared_ptr<Listener> listener)
      : info(kEventsState, [listener = std::move(listener)](const c10::DebugInfoBase* outer) {
          return with(listener, outer);
        }) {}
  ThreadStateGuard info;
};

Listen::Listen(std::shared_ptr<Listener> listener)
    : guard_(std::make_unique<Guard>(std::move(listener))) {}

Listen::~Listen() = default;

bool listening() {
  return current() != nullptr;
}

bool wants_gradients() {
  const Listeners* const listeners = current();
  return listeners != nullptr &&
         std::any_of(listeners->all.begin(), listeners->all.end(),
                     [](const auto& listener) { return listener->wants_gradients(); });
}

void emit(const Cast& event) {
  tell(event);
}
void emit(const LossScaleUpdated& event) {
  tell(event);
}
void emit(const StepSkipped& event) {
  tell(event);
}
void emit(const OperatorReplaced& event) {
  tell(event);
}
void emit(const GradientsUnscaled& event) {
  tell(event);
}
void emit(const GradientsReady& event) {
  tell(event);
}
void emit(const PhaseBegan& event) {
  tell(event);
}
void emit(const PhaseEnded& event) {
  tell(event);
}

std::string_view name_of(Phase phase) {
  switch (phase) {
    case Phase::data:
      return "data";
    case Phase::forward:
      return "forward";
    case Phase::backward:
      return "backward";
    case Phase::communication:
      return "communication";
    case Phase::unscale:
      return "unscale";
    case Phase::optimizer:
      break;
  }
  return "optimizer";
}

}  // namespace semitone::events

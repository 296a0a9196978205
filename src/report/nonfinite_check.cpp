#include "semitone/report/nonfinite_check.h"

#include "semitone/core/error.h"
#include "src/report/check_state.h"
#include "src/report/watch.h"

#include <utility>

namespace semitone::report {

struct NonFiniteCheck::Impl {
  explicit Impl(const NonFiniteCheckOptions& options)
      : state(std::make_shared<CheckState>(options)),
        in_force(kCheckState, [kept = state](const c10::DebugInfoBase*) { return kept; }) {}
  ~Impl() {
    state->stop();
    if (in_force.end() == ThreadStateGuard::End::elsewhere) watch.abandon();
  }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  std::shared_ptr<CheckState> state;
  Watch watch;
  ThreadStateGuard in_force;
};

NonFiniteCheck::NonFiniteCheck(const NonFiniteCheckOptions& options)
    : impl_(std::make_unique<Impl>(options)) {}

NonFiniteCheck::NonFiniteCheck(const torch::nn::Module& model, const NonFiniteCheckOptions& options)
    : NonFiniteCheck(options) {
  add_model(model);
}

NonFiniteCheck::~NonFiniteCheck() = default;

void NonFiniteCheck::add_model(const torch::nn::Module& model, const std::string& prefix) {
  impl_->state->add_model(model, prefix);
}

std::optional<NonFiniteFinding> NonFiniteCheck::finding() const {
  return impl_->state->finding();
}

void NonFiniteCheck::throw_if_found() const {
  auto found = impl_->state->finding();
  if (found.has_value()) throw NonFiniteError(*std::move(found));
  const auto failure = impl_->state->failure();
  if (failure.has_value())
    throw Error("report.nonfinite_check", "to look at every result", *failure);
}

void NonFiniteCheck::next_step() {
  impl_->state->next_step();
}

std::int64_t NonFiniteCheck::step() const {
  return impl_->state->step();
}

}  // namespace semitone::report

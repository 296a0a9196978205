#include "src/report/run_log_impl.h"

#include "semitone/core/error.h"
#include "src/core/env.h"
#include "src/core/log.h"
#include "src/core/parse_number.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <exception>
#include <string>
#include <utility>

namespace semitone::report {
namespace {

// A rank or a number of ranks: the option, or what a launcher has set, or that of a process alone.
std::int64_t count_of(const std::optional<std::int64_t>& option, const env::Variable& variable,
                      std::int64_t least) {
  const std::string text =
      option.has_value() ? std::to_string(*option) : env::get(variable).value_or("");
  if (text.empty()) return least;
  const auto count = parse_number<std::int64_t>(text);
  if (!count.has_value() || *count < least) {
    throw Error(kRunLog, fmt::format("{} from {}", variable.name, least), "'" + text + "'",
                "set RunLogOptions::rank and world_size");
  }
  return *count;
}

void check_step(std::int64_t step) {
  if (step < 0) throw Error(kRunLog, "a step from 0", std::to_string(step));
}

std::string describe(const events::StepSkipped& event) {
  std::string what = "a gradient is not finite on another rank";
  if (!event.parameter.empty())
    what = fmt::format("the gradient of '{}' is not finite", event.parameter);
  if (event.non_finite > 1)
    what = fmt::format("the gradients of '{}' and of {} other parameters are not finite",
                       event.parameter, event.non_finite - 1);
  return fmt::format("{}; loss scale {:g}, {} skipped in a row", what, event.loss_scale,
                     event.consecutive);
}

}  // namespace

RunLog::Impl::Impl(const std::filesystem::path& directory, const RunLogOptions& options)
    : options_(options),
      writes_(options.every_rank() || count_of(options.rank(), env::kRank, 0) == 0),
      world_size_(count_of(options.world_size(), env::kWorldSize, 1)) {
  const std::int64_t rank = count_of(options.rank(), env::kRank, 0);
  if (!writes_) return;
  files_.emplace(rank == 0 ? directory : directory / fmt::format("rank-{}", rank), options, rank,
                 world_size_);
}

void RunLog::Impl::require_open() const {
  if (closed_) throw Error(kRunLog, "no call after close()", "one");
}

void RunLog::Impl::add_observer(StepObserver& observer) {
  StepObserver* none = nullptr;
  if (observer_.compare_exchange_strong(none, &observer)) {
    observer_thread_ = std::this_thread::get_id();
    return;
  }
  throw Error(kRunLog, "one Recorder for each RunLog", "a second one",
              "destroy the first one before");
}

void RunLog::Impl::remove_observer(const StepObserver& observer) {
  if (observer_ == &observer) observer_ = nullptr;
}

void RunLog::Impl::set_step(std::int64_t step) {
  check_step(step);
  StepObserver* const observer = observer_;
  std::exception_ptr first;
  try {
    if (observer != nullptr) observer->before_step(step);
  } catch (const FileError&) {
    first = std::current_exception();
  }
  begin_step(step);
  if (observer != nullptr) observer->step_began(step);
  if (first) std::rethrow_exception(first);
}

bool RunLog::Impl::is_closed() {
  const std::lock_guard lock(mutex_);
  return closed_;
}

void RunLog::Impl::begin_step(std::int64_t step) {
  const std::lock_guard lock(mutex_);
  require_open();
  if (!files_.has_value()) return;
  if (step_.has_value() && step < *step_) files_->add_restart({wall_time(), step});
  // The step decides where a continued run begins, also if values were added before it.
  if (!step_.has_value()) mark_continuation(step);
  step_ = step;
  record_waiting_events(step);
  flush_if_due();
}

void RunLog::Impl::mark_continuation(std::int64_t step) {
  if (files_->continues() && std::exchange(marked_, step) != step)
    files_->add_restart({wall_time(), step});
}

void RunLog::Impl::add(std::optional<std::int64_t> step, const Add& add) {
  if (step.has_value()) check_step(*step);
  const std::lock_guard lock(mutex_);
  require_open();
  if (!files_.has_value()) return;
  last_step_ = step.value_or(step_.value_or(0));
  if (step.has_value() && !step_.has_value() && !marked_.has_value()) mark_continuation(*step);
  if (step.has_value()) record_waiting_events(*step);
  add(*files_, {wall_time(), last_step_});
  flush_if_due();
}

void RunLog::Impl::flush() {
  const std::lock_guard lock(mutex_);
  require_open();
  if (files_.has_value()) write([&] { files_->flush(); });
}

void RunLog::Impl::flush_if_due() {
  constexpr std::size_t kLargest = std::size_t{1} << 20;
  if (Clock::now() - last_flush_ < options_.flush_interval() && files_->waiting() < kLargest)
    return;
  write([&] { files_->flush(); });
}

void RunLog::Impl::write(const std::function<void()>& function) {
  const bool failed_before = failed_;
  last_flush_ = Clock::now();
  try {
    failed_ = true;
    function();
    failed_ = false;
  } catch (const FileError& error) {
    if (!options_.ignore_write_errors()) throw;
    if (!failed_before) log()->warn("{}; the training continues, and this is lost", error.what());
  }
}

void RunLog::Impl::close(Outcome outcome, std::string_view reason) {
  std::exception_ptr first;
  try {
    if (observer_thread_.load() == std::this_thread::get_id()) {
      if (StepObserver* const observer = observer_.exchange(nullptr))
        observer->before_close(outcome);
    }
  } catch (const FileError&) {
    first = std::current_exception();
  }
  end(outcome, reason, first);
  if (first) std::rethrow_exception(first);
}

void RunLog::Impl::end(Outcome outcome, std::string_view reason, std::exception_ptr& first) {
  const std::lock_guard lock(mutex_);
  if (closed_) return;
  closed_ = true;
  if (!files_.has_value()) return;
  record_waiting_events(last_step_);
  try {
    write([&] { files_->flush(); });
  } catch (const FileError&) {
    if (!first) first = std::current_exception();
  }
  // After a failure too: a full disk often has room for this.
  try {
    write([&] { files_->end(outcome, reason); });
  } catch (const FileError&) {
    if (!first) first = std::current_exception();
  }
  files_.reset();
}

void RunLog::Impl::record_event(Add add) {
  if (!step_.has_value()) {
    waiting_events_.emplace_back(wall_time(), std::move(add));
  } else {
    add(*files_, {wall_time(), *step_});
  }
}

void RunLog::Impl::record_waiting_events(std::int64_t step) {
  for (const auto& [time, add] : std::exchange(waiting_events_, {}))
    add(*files_, {time, step, /*is_exact=*/false});
}

void RunLog::Impl::on(const events::LossScaleUpdated& event) {
  const std::lock_guard lock(mutex_);
  if (!files_.has_value()) return;
  const auto [number, is_new] = scale_numbers_.number_of(event);
  if (!is_new && event.after == event.before) return;
  const std::string name =
      number == 0 ? "amp/loss_scale" : fmt::format("amp/loss_scale_{}", number);
  // A scale that was loaded from a checkpoint has had no other value in this training: that of its
  // constructor was in force in no step.
  const double before = is_new && !event.found_inf ? event.after : event.before;
  record_event([name, before, number = number, event](RunFiles& files, const Moment& when) {
    files.add_scalar(when, name, event.after);
    files.add_sample(when, "loss_scale",
                     {{"loss_id", number},
                      {"before", before},
                      {"after", event.after},
                      {"found_inf", event.found_inf}});
  });
}

void RunLog::Impl::on(const events::StepSkipped& event) {
  const std::lock_guard lock(mutex_);
  if (!files_.has_value()) return;
  record_event([event](RunFiles& files, const Moment& when) {
    files.add_scalar(when, "amp/skipped_steps", static_cast<double>(event.total));
    files.add_text(when, "amp/skipped_step", describe(event));
    nlohmann::ordered_json fields = {{"parameter", event.parameter},
                                     {"non_finite", event.non_finite},
                                     {"consecutive", event.consecutive},
                                     {"total", event.total},
                                     {"loss_scale", event.loss_scale}};
    if (!when.is_exact) fields["exact"] = false;
    files.add_sample(when, "skipped", fields);
  });
}

}  // namespace semitone::report

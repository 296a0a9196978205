#include "semitone/report/run_log.h"

#include "semitone/core/error.h"
#include "src/core/log.h"
#include "src/core/utf8.h"
#include "src/report/histogram.h"
#include "src/report/run_log_impl.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <exception>
#include <utility>

namespace semitone::report {
namespace {

void check_name(const std::string& name) {
  const auto is_control = [](unsigned char letter) { return letter < ' ' || letter == 0x7f; };
  const bool is_good = !name.empty() && name.front() != ' ' && name.back() != ' ' &&
                       std::none_of(name.begin(), name.end(), is_control) && is_utf8(name);
  if (is_good) return;
  throw Error(kRunLog, "a name of visible characters in UTF-8",
              nlohmann::json(name).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
}

}  // namespace

std::string_view name_of(Outcome outcome) {
  switch (outcome) {
    case Outcome::finished:
      return "finished";
    case Outcome::stopped:
      return "stopped";
    case Outcome::failed:
      break;
  }
  return "failed";
}

class RunLog::EventRecorder : public events::Listener {
 public:
  explicit EventRecorder(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

  using Listener::on;
  void on(const events::LossScaleUpdated& event) override { impl_->on(event); }
  void on(const events::StepSkipped& event) override { impl_->on(event); }

 private:
  std::shared_ptr<Impl> impl_;
};

RunLog::RunLog(const std::filesystem::path& directory, const RunLogOptions& options)
    : impl_(std::make_shared<Impl>(directory, options)), exceptions_(std::uncaught_exceptions()) {
  if (options.record_events() && impl_->writes())
    listen_.emplace(std::make_shared<EventRecorder>(impl_));
}

RunLog::~RunLog() {
  const bool was_told = impl_->has_failed();
  const bool is_failure = std::uncaught_exceptions() > exceptions_;
  try {
    if (is_failure) {
      close(Outcome::failed, "an exception");
    } else {
      close();
    }
  } catch (const std::exception& error) {
    if (!was_told) log()->warn("{}", error.what());
  }
}

void RunLog::set_step(std::int64_t step) {
  impl_->set_step(step);
}

void RunLog::add_scalar(const std::string& name, double value, std::optional<std::int64_t> step) {
  check_name(name);
  impl_->add(step,
             [&](RunFiles& files, const Moment& when) { files.add_scalar(when, name, value); });
}

void RunLog::add_text(const std::string& name, const std::string& text,
                      std::optional<std::int64_t> step) {
  check_name(name);
  impl_->add(step, [&](RunFiles& files, const Moment& when) { files.add_text(when, name, text); });
}

void RunLog::add_histogram(const std::string& name, const at::Tensor& values,
                           std::optional<std::int64_t> step) {
  check_name(name);
  // Not with the lock: other threads may go on.
  const Histogram histogram = impl_->writes() ? histogram_of(values) : Histogram();
  impl_->add(step, [&](RunFiles& files, const Moment& when) {
    files.add_histogram(when, name, histogram);
  });
}

void RunLog::add_histograms(const torch::nn::Module& model, std::optional<std::int64_t> step) {
  for (const auto& item : model.named_parameters()) {
    const at::Tensor& parameter = item.value();
    if (parameter.numel() > 0) add_histogram("parameters/" + item.key(), parameter, step);
    const at::Tensor& gradient = parameter.grad();
    if (gradient.defined() && gradient.numel() > 0)
      add_histogram("gradients/" + item.key(), gradient, step);
  }
}

void RunLog::flush() {
  impl_->flush();
}

void RunLog::close(Outcome outcome, std::string_view reason) {
  impl_->close(outcome, reason);
}

bool RunLog::writes() const {
  return impl_->writes();
}

}  // namespace semitone::report

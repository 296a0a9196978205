#include "semitone/report/precision_report.h"

#include "src/core/file.h"
#include "src/report/page.h"
#include "src/report/record_file.h"
#include "src/report/report_json.h"
#include "src/report/report_text.h"
#include "src/report/verdicts.h"

#include <nlohmann/json.hpp>

#include <utility>

namespace semitone::report {
namespace {

ReportedRun reported(const std::filesystem::path& directory) {
  RunData run = read_run(directory);
  Summary summary = summarize(run);
  auto verdicts = verdicts_of(run, summary);
  return {std::move(run), std::move(summary), std::move(verdicts)};
}

}  // namespace

class PrecisionReport::Impl {
 public:
  explicit Impl(const std::filesystem::path& directory) : run(reported(directory)) {}

  static const ReportedRun* run_of(const std::shared_ptr<const Impl>& impl) {
    return impl == nullptr ? nullptr : &impl->run;
  }

  const ReportedRun run;
};

PrecisionReport::PrecisionReport(const std::filesystem::path& directory)
    : impl_(std::make_shared<const Impl>(directory)) {}

void PrecisionReport::compare_with(const PrecisionReport& other) {
  other_ = other.impl_;
}

const std::vector<Verdict>& PrecisionReport::verdicts() const {
  return impl_->run.verdicts;
}

std::string PrecisionReport::to_text() const {
  return report_text(impl_->run, Impl::run_of(other_));
}

std::string PrecisionReport::to_json() const {
  constexpr int kIndent = 1;
  // Names come from files, which may have bytes that are not UTF-8.
  return report_json(impl_->run, Impl::run_of(other_))
      .dump(kIndent, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

std::string PrecisionReport::to_html() const {
  return page_of(report_json(impl_->run, Impl::run_of(other_))
                     .dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace));
}

void PrecisionReport::write_html(const std::filesystem::path& path) const {
  write_file(path, to_html(), kPrecisionReport);
}

}  // namespace semitone::report

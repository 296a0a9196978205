#include "apps/semitone/commands.h"
#include "apps/semitone/exit_code.h"
#include "apps/semitone/flags.h"
#include "apps/semitone/output.h"
#include "semitone/report/precision_report.h"
#include "src/core/file.h"
#include "src/report/run_json.h"

#include <filesystem>
#include <memory>
#include <ostream>
#include <string>

namespace semitone::cli {
namespace {

constexpr auto kReport = "cli.report";
// --html without a file. A file of this name is written as ./-.
constexpr auto kInDirectory = "-";

struct ReportFlags {
  std::string directory;
  std::string compare;
  std::string html;
  std::string json;
};

std::filesystem::path page_path(const ReportFlags& flags) {
  return flags.html == kInDirectory ? std::filesystem::path(flags.directory) / "report.html"
                                    : std::filesystem::path(flags.html);
}

// A report does not replace a file of the record.
void require_no_record(const FlagOfFile& output) {
  if (!report::is_record_file(output.path)) return;
  throw UsageError(kReport, fmt::format("another file for {} than one of the record", output.flag),
                   "'" + output.path.string() + "'");
}

int run(const ReportFlags& flags) {
  if (!flags.html.empty()) require_no_record({"--html", page_path(flags)});
  require_no_record({"--json", flags.json});
  report::PrecisionReport report(flags.directory);
  if (!flags.compare.empty()) report.compare_with(report::PrecisionReport(flags.compare));
  if (!flags.html.empty())
    require_two_files(kReport, {"--html", page_path(flags)}, {"--json", flags.json});
  require_json_writable(flags.json);
  if (!flags.html.empty()) require_writable(page_path(flags), kReport);
  human_output(flags.json) << report.to_text();
  if (!flags.html.empty()) {
    report.write_html(page_path(flags));
    human_output(flags.json) << "\nThe page is " << page_path(flags).string() << '\n';
  }
  write_json(flags.json, flags.json.empty() ? "" : report.to_json());
  return kSuccess;
}

constexpr auto kReportFooter =
    R"(DIR is the directory of a report::RunLog, or of --log-dir of semitone train. Values, operators and times are those
that a report::Recorder sampled; docs/report.md describes the verdicts.

Examples:
  semitone report runs/7
  semitone report runs/7 --html
  semitone report runs/O2 --compare runs/O0 --html comparison.html
  semitone report runs/7 --json report.json

)";

}  // namespace

void add_report_command(CLI::App& app, Action& action) {
  CLI::App& command = *app.add_subcommand(
      "report",
      "Explain a recorded training: skipped steps, gradients that vanish, where the time goes, and "
      "what to change");
  const auto flags = std::make_shared<ReportFlags>();
  command.add_option("DIR", flags->directory, "Directory of the run")->required();
  Flags add(command, kReport);
  add.text("--compare", flags->compare, "DIR", "Directory of a second run to compare with");
  add.optional_file("--html", flags->html, kInDirectory,
                    "Write an HTML page to FILE; default DIR/report.html");
  add.json(flags->json);
  command.footer(std::string(kReportFooter) + kExitCodesHelp);
  command.callback([&action, flags] { action = [flags] { return run(*flags); }; });
}

}  // namespace semitone::cli

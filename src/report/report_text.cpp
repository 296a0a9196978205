#include "src/report/report_text.h"

#include "src/core/counted.h"
#include "src/core/printable.h"
#include "src/report/skips.h"
#include "src/report/verdict_rules.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <string_view>
#include <vector>

namespace semitone::report {
namespace {

constexpr std::size_t kMostRows = 10;  // of a table
constexpr double kMega = 1e6;
constexpr double kMilli = 1e-3;

std::string or_unknown(const std::string& text) {
  return text.empty() ? "unknown" : text;
}

std::string first_line(const std::string& text) {
  return text.substr(0, text.find_first_of("\r\n"));
}

// Whether a character of UTF-8 goes on here.
bool is_continuation(const std::string& text, std::size_t at) {
  constexpr unsigned kMask = 0xC0;
  constexpr unsigned kContinuation = 0x80;
  return at < text.size() && (static_cast<unsigned char>(text[at]) & kMask) == kContinuation;
}

// Names of many layers share their end: the middle is left out, in whole characters.
std::string shortened(const std::string& name, std::size_t width) {
  if (name.size() <= width) return printable(name);
  std::size_t begin = width - width / 2 - 2;
  while (begin > 0 && is_continuation(name, begin)) --begin;
  std::size_t end = name.size() - width / 2;
  while (is_continuation(name, end)) ++end;
  return printable(name.substr(0, begin) + ".." + name.substr(end));
}

std::string dtype_of(const RunInfo& info) {
  return or_unknown(info.dtype) + (info.has_float8 ? " and float8" : "");
}

std::string header(const RunData& run) {
  const RunInfo& info = run.info;
  std::string text = fmt::format("{}: ", info.directory.string());
  if (!info.opt_level.empty()) text += info.opt_level + ", ";
  text += fmt::format("{}, {}", dtype_of(info), info.outcome);
  if (!info.reason.empty()) text += fmt::format(" ({})", first_line(info.reason));
  text += fmt::format("; {}, {}, {}", fmt::format("last step {}", run.last_step),
                      counted(static_cast<std::int64_t>(run.samples.size()), "sample"),
                      counted(info.starts, "start"));
  if (info.world_size > 1) text += fmt::format("; rank {} of {}", info.rank, info.world_size);
  text = printable(text) + '\n';
  if (run.samples_left_out > 0)
    text += fmt::format("without {} of starts at another level or in another dtype\n",
                        counted(run.samples_left_out, "sample"));
  if (!info.processor.empty())
    text += printable(fmt::format("{}, {}, semitone {}", info.processor,
                                  counted(info.threads, "thread"), info.semitone)) +
            '\n';
  return text;
}

// A line of text, continued with an indent.
void append_wrapped(std::string& text, const std::string& sentence, std::size_t indent) {
  constexpr std::size_t kColumns = 100;
  const std::string line = printable(sentence);
  std::string_view words = line;
  std::size_t column = indent;
  while (!words.empty()) {
    const std::size_t end = std::min(words.find(' '), words.size());
    if (column > indent && column + 1 + end > kColumns) {
      text += '\n' + std::string(indent, ' ');
      column = indent;
    } else if (column > indent) {
      text += ' ';
      ++column;
    }
    text += words.substr(0, end);
    column += end;
    words.remove_prefix(std::min(end + 1, words.size()));
  }
  text += '\n';
}

void append_verdicts(std::string& text, const std::vector<Verdict>& verdicts) {
  constexpr std::size_t kIndent = 9;
  for (const Verdict& verdict : verdicts) {
    text += fmt::format("\n{:<{}}", fmt::format("{}:", name_of(verdict.severity)), kIndent);
    append_wrapped(text, verdict.title, kIndent);
    for (const auto& [label, words] :
         {std::pair{"why: ", &verdict.detail}, std::pair{"change: ", &verdict.remedy}}) {
      if (words->empty()) continue;
      text += std::string(kIndent, ' ');
      append_wrapped(text, label + *words, kIndent);
    }
    if (verdict.where.size() < 2) continue;
    std::string names = "in: ";
    for (const std::string& name : verdict.where)
      names += (&name == &verdict.where.front() ? "" : ", ") + name;
    text += std::string(kIndent, ' ');
    append_wrapped(text, names, kIndent);
  }
}

void append_skips(std::string& text, const RunData& run) {
  const auto skips = explain_skips(run);
  if (skips.empty()) return;
  text += "\nskipped steps\n";
  const std::size_t first = skips.size() > kMostRows ? skips.size() - kMostRows : 0;
  if (first > 0) text += fmt::format("  … {} earlier ones\n", first);
  for (std::size_t i = first; i < skips.size(); ++i) {
    text += "  ";
    append_wrapped(text, skips[i].to_string(), 2);
  }
}

// The parameters whose gradients the run's format, or float16, serves worst.
void append_gradients(std::string& text, const ReportedRun& reported) {
  const std::size_t format = reported.run.info.dtype == "bfloat16" ? kBFloat16 : kFloat16;
  std::vector<const ParameterSummary*> rows;
  bool leaves_out = false;
  for (const ParameterSummary& parameter : reported.summary.parameters) {
    if (!parameter.gradient.has_value()) continue;
    const bool is_counted =
        parameter.scaled_gradient[format].total > 0 || parameter.gradient->non_zero() == 0;
    if (is_counted) rows.push_back(&parameter);
    leaves_out = leaves_out || !is_counted;
  }
  if (leaves_out)
    text +=
        "\ngradients with several loss scales are left out: which one they had is not recorded\n";
  if (rows.empty()) return;
  const auto lost = [&](const ParameterSummary* row) {
    const FormatCounts& counts = row->scaled_gradient[format];
    return counts.zero_share() + counts.overflow_share() + counts.subnormal_share() * kMilli;
  };
  std::sort(rows.begin(), rows.end(), [&](const auto* left, const auto* right) {
    return lost(left) > lost(right) ||
           (lost(left) == lost(right) && left->info.name < right->info.name);
  });
  constexpr auto kRow = "  {:<36} {:>16} {:>16} {:>16} {:>11}\n";
  text += fmt::format("\ngradients in {}, times the loss scale\n", kNumberFormats[format].name);
  text += fmt::format(kRow, "parameter", "to zero", "subnormal", "overflow", "update");
  for (std::size_t i = 0; i < std::min(rows.size(), kMostRows); ++i) {
    const FormatCounts& counts = rows[i]->scaled_gradient[format];
    const auto ratio = rows[i]->update_ratio;
    text += fmt::format(kRow, shortened(rows[i]->info.name, 36), percent(counts.zero_share()),
                        percent(counts.subnormal_share()), percent(counts.overflow_share()),
                        ratio.has_value() ? fmt::format("{:.1e}", *ratio) : "");
  }
  if (rows.size() > kMostRows) text += fmt::format("  … {} more\n", rows.size() - kMostRows);
}

void append_operators(std::string& text, const RunData& run, const Summary& summary) {
  if (summary.operators.empty()) return;
  constexpr auto kRow = "  {:<36} {:<9} {:<9} {:<9} {:>8} {:>9} {:>8}\n";
  text += run.has_device_times() ? "\nslowest operators\n"
                                 : "\nslowest operators, by the time of the host's calls\n";
  text += fmt::format(kRow, "operator", "pass", "dtype", "kernel", "calls", "ms", "share");
  for (std::size_t i = 0; i < std::min(summary.operators.size(), kMostRows); ++i) {
    const RunOperator& op = summary.operators[i];
    const double share = summary.operator_seconds > 0 ? op.seconds / summary.operator_seconds : 0;
    text += fmt::format(kRow, shortened(op.name, 36), printable(op.pass), printable(op.dtype),
                        printable(op.kernel), op.calls, fmt::format("{:.3g}", op.seconds / kMilli),
                        percent(share));
  }
  if (summary.operators.size() > kMostRows)
    text += fmt::format("  … {} more\n", summary.operators.size() - kMostRows);
}

template <typename Names>
void append_amounts(std::string& text, std::string_view title, const Names& names,
                    const Amounts& amounts, double unit, std::string_view unit_name) {
  std::string list;
  for (const char* const name : names) {
    const auto found = amounts.find(name);
    if (found == amounts.end() || found->second <= 0) continue;
    std::string words = name;
    std::replace(words.begin(), words.end(), '_', ' ');
    list += fmt::format("{}{} {:.3g}", list.empty() ? "" : ", ", words, found->second / unit);
  }
  if (list.empty()) return;
  text += fmt::format("\n{}, {}: ", title, unit_name);
  append_wrapped(text, list, 2);
}

std::string last_loss(const RunData& run) {
  return run.losses.empty() ? "" : fmt::format("{:.4g}", run.losses.rbegin()->second);
}

std::string milliseconds(const Summary& summary) {
  return summary.step_seconds.has_value() ? fmt::format("{:.3g}", *summary.step_seconds / kMilli)
                                          : "";
}

std::string megabytes_of(const Summary& summary, const char* part) {
  const auto found = summary.memory.find(part);
  return found == summary.memory.end() ? "" : fmt::format("{:.3g}", found->second / kMega);
}

// "2 problems, 1 warning".
std::string verdict_counts(const std::vector<Verdict>& verdicts) {
  const auto number = [&](Severity severity) {
    return std::count_if(verdicts.begin(), verdicts.end(),
                         [&](const Verdict& verdict) { return verdict.severity == severity; });
  };
  return fmt::format("{}, {}", counted(number(Severity::problem), "problem"),
                     counted(number(Severity::warning), "warning"));
}

void append_comparison(std::string& text, const ReportedRun& run, const ReportedRun& other) {
  constexpr auto kRow = "  {:<16} {:>28} {:>28}\n";
  const auto row = [&](std::string_view name, const auto& value_of) {
    text += fmt::format(kRow, name, value_of(run), value_of(other));
  };
  text += '\n' + fmt::format(kRow, "compared", shortened(run.run.info.directory.string(), 28),
                             shortened(other.run.info.directory.string(), 28));
  row("opt level", [](const ReportedRun& one) { return printable(one.run.info.opt_level); });
  row("dtype", [](const ReportedRun& one) { return dtype_of(one.run.info); });
  row("last step", [](const ReportedRun& one) { return fmt::format("{}", one.run.last_step); });
  row("last loss", [](const ReportedRun& one) { return last_loss(one.run); });
  row("skipped steps",
      [](const ReportedRun& one) { return fmt::format("{}", one.run.skipped.size()); });
  row("ms/step", [](const ReportedRun& one) { return milliseconds(one.summary); });
  row("activations MB",
      [](const ReportedRun& one) { return megabytes_of(one.summary, "activations"); });
  row("verdicts", [](const ReportedRun& one) { return verdict_counts(one.verdicts); });
}

}  // namespace

std::string report_text(const ReportedRun& run, const ReportedRun* other) {
  std::string text = header(run.run);
  append_verdicts(text, run.verdicts);
  if (other != nullptr) append_comparison(text, run, *other);
  append_skips(text, run.run);
  append_gradients(text, run);
  append_operators(text, run.run, run.summary);
  append_amounts(text, "mean step", kPhases, run.summary.phases, kMilli, "ms");
  append_amounts(text, "most memory of tensors", kMemoryParts, run.summary.memory, kMega, "MB");
  return text;
}

}  // namespace semitone::report

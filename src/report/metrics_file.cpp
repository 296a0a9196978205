#include "src/report/metrics_file.h"

#include "src/core/parse_number.h"
#include "src/report/record_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <map>
#include <string>
#include <utility>

namespace semitone::report {
namespace {

constexpr std::string_view kMetricColumns = "step,wall_time,name,value";

// A line of metrics.csv.
struct Metric {
  std::int64_t step = 0;
  double wall_time = 0;
  std::string name;
  double value = 0;
};

template <typename Number>
Number parsed(std::string_view text, const FilePlace& place) {
  const auto number = parse_number<Number>(text);
  if (!number.has_value()) place.refuse("a number", "'" + std::string(text) + "'");
  return *number;
}

// Removes the field up to the next comma.
std::string_view take_field(std::string_view& line, const FilePlace& place) {
  const auto comma = line.find(',');
  if (comma == line.npos) place.refuse("the columns " + std::string(kMetricColumns), "fewer");
  const auto field = line.substr(0, comma);
  line.remove_prefix(comma + 1);
  return field;
}

// Removes a field that may be in quotes, as RFC 4180 has it.
std::string take_name(std::string_view& line, const FilePlace& place) {
  if (!line.starts_with('"')) return std::string(take_field(line, place));
  std::string name;
  for (std::size_t i = 1; i < line.size(); ++i) {
    if (line[i] == '"') {
      ++i;
      if (i < line.size() && line[i] == ',') {
        line.remove_prefix(i + 1);
        return name;
      }
    }
    if (i < line.size()) name += line[i];
  }
  place.refuse("a name that ends with a quote", "none");
}

Metric parse_metric(std::string_view line, const FilePlace& place) {
  Metric metric;
  metric.step = parsed<std::int64_t>(take_field(line, place), place);
  if (metric.step < 0 || metric.step > kLargestStep)
    place.refuse(fmt::format("an integer from 0 to {} for 'step'", kLargestStep),
                 fmt::format("{}", metric.step));
  metric.wall_time = parsed<double>(take_field(line, place), place);
  metric.name = take_name(line, place);
  metric.value = parsed<double>(line, place);
  return metric;
}

// Whether a line was written before a restart. Old records tell it by the time only, which a clock
// that is set makes wrong; times in metrics.csv are in milliseconds.
bool is_before(const Metric& metric, std::int64_t offset, const Restart& restart) {
  constexpr double kMilliseconds = 1e3;
  if (restart.metrics_bytes.has_value()) return offset < *restart.metrics_bytes;
  return metric.wall_time * kMilliseconds < std::round(restart.wall_time * kMilliseconds) - 0.5;
}

// Whether the training went back behind this step after the line was written.
bool is_void(const Metric& metric, std::int64_t offset, const std::vector<Restart>& restarts) {
  return std::any_of(restarts.begin(), restarts.end(), [&](const Restart& restart) {
    return metric.step >= restart.step && is_before(metric, offset, restart);
  });
}

// The metrics that a report shows. The first name is the one that `semitone train` and the examples
// give the loss.
constexpr auto kLossNames = std::to_array<std::string_view>({"train/loss", "loss"});
constexpr std::string_view kScaleName = "amp/loss_scale";

bool is_shown(std::string_view name) {
  return name == kScaleName ||
         std::find(kLossNames.begin(), kLossNames.end(), name) != kLossNames.end();
}

// Adds where a scale differs from the one before.
void add_scales(const std::map<std::int64_t, double>& scales, RunData& run) {
  std::optional<double> before;
  for (const auto& [step, scale] : scales) {
    if (before != scale) run.scale_changes[{step, 0}] = {0, before, scale};
    before = scale;
  }
}

}  // namespace

void read_metrics(const std::filesystem::path& path, const std::vector<Restart>& restarts,
                  RunData& run) {
  const auto content = read_record(path);
  if (!content.has_value()) return;
  std::map<std::string, std::map<std::int64_t, double>, std::less<>> values;
  bool is_first = true;
  for_each_line(path, *content, [&](std::string_view line, const FilePlace& place) {
    if (std::exchange(is_first, false)) {
      if (line != kMetricColumns)
        place.refuse("the columns " + std::string(kMetricColumns), "another line");
      return;
    }
    const Metric metric = parse_metric(line, place);
    if (is_void(metric, line.data() - content->data(), restarts)) return;
    run.see(metric.step);
    if (is_shown(metric.name)) values[metric.name].insert_or_assign(metric.step, metric.value);
  });
  for (const std::string_view name : kLossNames) {
    if (const auto found = values.find(name); found != values.end() && run.losses.empty())
      run.losses = found->second;
  }
  const auto scales = values.find(kScaleName);
  if (run.scale_changes.empty() && scales != values.end()) add_scales(scales->second, run);
}

}  // namespace semitone::report

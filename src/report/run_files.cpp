#include "src/report/run_files.h"

#include "semitone/core/error.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <array>
#include <chrono>
#include <cmath>
#include <exception>
#include <sstream>
#include <string>
#include <system_error>

namespace semitone::report {
namespace {

constexpr std::string_view kHeader = "step,wall_time,name,value\n";
constexpr auto kHeaderSize = static_cast<std::int64_t>(kHeader.size());

using Json = nlohmann::ordered_json;

std::filesystem::path created(const std::filesystem::path& directory) {
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  if (error)
    throw FileError(kRunLog, "to create the directory '" + directory.string() + "'",
                    error.message());
  return directory;
}

[[noreturn]] void refuse(const std::filesystem::path& path) {
  throw FileError(kRunLog, "a directory without a run", "'" + path.string() + "'",
                  "name another directory, or let RunLogOptions::append continue the run");
}

// Opens metrics.csv, which tells whether the directory has a run, and belongs to one process.
AppendFile open_metrics(const std::filesystem::path& directory, bool append) {
  const auto path = created(directory) / "metrics.csv";
  AppendFile file(path);
  file.lock();
  // A start that failed has left no values.
  if (!append && file.size() > kHeaderSize) refuse(path);
  // Checked before anything is removed. A shorter file may be what a start left that was killed.
  const std::string beginning = file.beginning(kHeader.size());
  if (!kHeader.starts_with(beginning))
    throw FileError(kRunLog, "the columns step,wall_time,name,value in '" + path.string() + "'",
                    "another first line", "name another directory");
  file.remove_incomplete_line();
  return file;
}

// Refuses files of others, before anything is removed.
AppendFile open_lines(const std::filesystem::path& path) {
  constexpr std::string_view kBegin = "{\"step\":";
  AppendFile file(path);
  const std::string beginning = file.beginning(kBegin.size());
  if (!kBegin.starts_with(beginning))
    throw FileError(kRunLog, fmt::format("lines of a run, {}…, in '{}'", kBegin, path.string()),
                    "another first line", "name another directory");
  return file;
}

AppendFile open_texts(const std::filesystem::path& path) {
  AppendFile file = open_lines(path);
  file.remove_incomplete_line();
  return file;
}

// Whether a start has left more than the description of its model. An incomplete line does not count.
bool has_samples(const AppendFile& file) {
  constexpr std::size_t kMost = std::size_t{1} << 20;
  std::istringstream lines(file.beginning(kMost));
  for (std::string line; std::getline(lines, line) && !lines.eof();)
    if (line.find(R"("kind":"model")") == std::string::npos) return true;
  return static_cast<std::size_t>(file.size()) > kMost;
}

// A run of which only samples are recorded is a run, too.
AppendFile open_samples(const std::filesystem::path& path, bool append) {
  AppendFile file = open_lines(path);
  if (!append && has_samples(file)) refuse(path);
  file.remove_incomplete_line();
  return file;
}

// A field of a line of RFC 4180.
std::string csv_field(std::string_view text) {
  if (text.find_first_of(",\"") == std::string_view::npos) return std::string(text);
  std::string quoted = "\"";
  for (const char letter : text) quoted.append(letter == '"' ? 2 : 1, letter);
  return quoted + '"';
}

// Some compilers print the sign of NaN.
std::string csv_number(double value) {
  return std::isnan(value) ? "nan" : fmt::format("{}", value);
}

std::string markdown_field(std::string_view text) {
  std::string field;
  for (const char letter : text) {
    if (letter == '|') field += '\\';
    field += letter == '\n' ? ' ' : letter;
  }
  return field;
}

std::string markdown_of(const RunLogOptions::Config& config) {
  std::string table = "| setting | value |\n|---|---|\n";
  for (const auto& [key, value] : config)
    table += fmt::format("| {} | {} |\n", markdown_field(key), markdown_field(value));
  return config.empty() ? "" : table;
}

// The level and the dtype, by which the report judges samples. A later start may have others.
RunLogOptions::Config settings_of(const RunLogOptions::Config& config) {
  RunLogOptions::Config settings;
  for (const auto& [key, value] : config) {
    for (const std::string_view wanted : {"opt-level", "opt_level", "dtype", "amp_dtype"})
      if (key == wanted) settings.insert(settings.end(), {key, value});
  }
  return settings;
}

}  // namespace

bool has_values(const std::filesystem::path& directory) {
  std::error_code error;
  const auto size = std::filesystem::file_size(directory / "metrics.csv", error);
  return !error && size > static_cast<std::uintmax_t>(kHeaderSize);
}

double wall_time() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

RunFiles::RunFiles(const std::filesystem::path& directory, const RunLogOptions& options,
                   std::int64_t rank, std::int64_t world_size)
    : metrics_(open_metrics(directory, options.append())),
      texts_(open_texts(directory / "texts.jsonl")),
      samples_(open_samples(directory / "samples.jsonl", options.append())),
      continues_(metrics_.size() > kHeaderSize || samples_.size() > 0),
      events_(directory / events_file_name(wall_time())),
      json_(directory, options, rank, world_size),
      config_(markdown_of(options.config())),
      settings_(settings_of(options.config())) {
  if (metrics_.size() == 0) metrics_.add(kHeader);
  const Moment start{wall_time(), 0};
  events_.add(file_version_record(start.time));
  if (!continues_ && !config_.empty()) events_.add(text_record(start, "config", config_));
  flush();
}

void RunFiles::add_scalar(const Moment& when, std::string_view name, double value) {
  metrics_.add(
      fmt::format("{},{:.3f},{},{}\n", when.step, when.time, csv_field(name), csv_number(value)));
  events_.add(scalar_record(when, name, value));
}

void RunFiles::add_text(const Moment& when, std::string_view name, std::string_view text) {
  const Json line{{"step", when.step}, {"wall_time", when.time}, {"name", name}, {"text", text}};
  // Bytes that are not UTF-8 are replaced, in TensorBoard's file too.
  const std::string replaced = line.dump(-1, ' ', false, Json::error_handler_t::replace);
  texts_.add(replaced + '\n');
  events_.add(text_record(when, name, Json::parse(replaced).at("text").get<std::string>()));
}

void RunFiles::add_histogram(const Moment& when, std::string_view name, const Histogram& values) {
  if (values.non_finite > 0)
    add_scalar(when, fmt::format("{}/non_finite", name), static_cast<double>(values.non_finite));
  if (values.num > 0) events_.add(histogram_record(when, name, values));
}

void RunFiles::add_sample(const Moment& when, std::string_view kind, const Json& fields) {
  Json line{{"step", when.step}, {"wall_time", when.time}, {"kind", kind}};
  line.update(fields);
  if (kind == "model" && !settings_.empty()) {
    for (const auto& [key, value] : settings_) line["settings"][key] = value;
  }
  samples_.add(line.dump(-1, ' ', false, Json::error_handler_t::replace) + '\n');
}

void RunFiles::add_restart(const Moment& when) {
  events_.add(restart_record(when));
  add_sample(when, "restart",
             {{"metrics_bytes", metrics_.size() + static_cast<std::int64_t>(metrics_.waiting())}});
  if (!config_.empty()) events_.add(text_record(when, "config", config_));
}

std::size_t RunFiles::waiting() const {
  return metrics_.waiting() + texts_.waiting() + samples_.waiting() + events_.waiting();
}

void RunFiles::flush() {
  std::exception_ptr first;
  for (AppendFile* const file : std::array{&metrics_, &texts_, &samples_, &events_}) {
    try {
      file->flush();
    } catch (const FileError&) {
      if (!first) first = std::current_exception();
    }
  }
  if (first) std::rethrow_exception(first);
}

}  // namespace semitone::report

#include "src/report/run_json.h"

#include "semitone/core/device.h"
#include "semitone/core/version.h"
#include "src/core/env.h"
#include "src/core/file.h"
#include "src/core/host_name.h"
#include "src/core/parse_number.h"
#include "src/core/usable_cores.h"
#include "src/report/append_file.h"
#include "src/report/record_file.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>

#include <fmt/chrono.h>
#include <nlohmann/json.hpp>
#include <unistd.h>

#include <ctime>
#include <fstream>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>

namespace semitone::report {
namespace {

using Json = nlohmann::ordered_json;

std::string utc_now() {
  return fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(std::time(nullptr)));
}

// The name that the processor gives itself, or "".
std::string processor_name() {
  std::ifstream cpuinfo("/proc/cpuinfo");
  for (std::string line; std::getline(cpuinfo, line);) {
    const auto colon = line.find(": ");
    if (line.starts_with("model name") && colon != std::string::npos) return line.substr(colon + 2);
  }
  return {};
}

// As the launcher says: a number, or nothing.
std::optional<int> local_world_size() {
  const std::string text = env::get(env::kLocalWorldSize).value_or("");
  const auto number = parse_number<int>(text);
  return number.has_value() && *number >= 1 ? number : std::nullopt;
}

Json environment(std::int64_t rank, std::int64_t world_size) {
  Json json{{"semitone", version()},
            {"libtorch", libtorch_version()},
            {"compiler", compiler()},
            {"processor", processor_name()},
            {"instruction_set", at::get_cpu_capability()},
            {"cpu", describe_device(c10::DeviceType::CPU)},
            {"cuda_devices", at::hasCUDA() ? at::detail::getCUDAHooks().deviceCount() : 0},
            {"threads", at::get_num_threads()},
            {"cores", usable_cores()},
            {"physical_cores", physical_cores()},
            {"all_cores", all_cores()},
            {"host", host_name()},
            {"pid", ::getpid()},
            {"rank", rank},
            {"world_size", world_size}};
  if (const auto quota = cpu_quota()) json["cpu_quota"] = *quota;
  if (const auto processes = local_world_size()) json["local_world_size"] = *processes;
  if (const auto job = env::get(env::kRunId)) json["job"] = *job;
  return json;
}

}  // namespace

int starts_in(const std::filesystem::path& directory) {
  std::error_code ignored;
  int starts = 0;
  while (std::filesystem::exists(run_json_path(directory, starts + 1), ignored)) ++starts;
  return starts;
}

bool is_record_file(const std::filesystem::path& path) {
  std::error_code error;
  const auto real =
      std::filesystem::weakly_canonical(std::filesystem::absolute(path, error), error);
  return !error && starts_in(real.parent_path()) > 0 && has_name_of_record(real);
}

bool has_name_of_record(const std::filesystem::path& path) {
  const std::string name = path.filename().string();
  constexpr std::string_view kStart = "run-";
  constexpr std::string_view kEnd = ".json";
  const bool is_start =
      name.starts_with(kStart) && name.ends_with(kEnd) &&
      parse_number<int>(name.substr(kStart.size(), name.size() - kStart.size() - kEnd.size()))
          .has_value();
  return is_start || name == "run.json" || name == "metrics.csv" || name == "samples.jsonl" ||
         name == "texts.jsonl" || name.starts_with("events.out.tfevents.");
}

std::string job_of_last_start(const std::filesystem::path& directory) {
  const int starts = starts_in(directory);
  if (starts == 0) return {};
  std::ifstream file(run_json_path(directory, starts));
  const auto json = nlohmann::json::parse(file, nullptr, /*allow_exceptions=*/false);
  const nlohmann::json::json_pointer job("/environment/job");
  return json.contains(job) && json[job].is_string() ? json[job].get<std::string>() : "";
}

RunJson::RunJson(const std::filesystem::path& directory, const RunLogOptions& options,
                 std::int64_t rank, std::int64_t world_size)
    : path_(run_json_path(directory, starts_in(directory) + 1)),
      content_(std::make_unique<Json>()) {
  Json& json = *content_;
  json["start_time"] = utc_now();
  json["end_time"] = nullptr;
  json["outcome"] = "running";
  json["config"] = options.config();
  json["environment"] = environment(rank, world_size);
  write();
}

RunJson::~RunJson() = default;

void RunJson::end(Outcome outcome, std::string_view reason) {
  (*content_)["end_time"] = utc_now();
  (*content_)["outcome"] = name_of(outcome);
  if (!reason.empty()) (*content_)["reason"] = reason;
  write();
}

void RunJson::write() const {
  constexpr int kIndent = 2;
  // Bytes of an error's text that are not UTF-8 are replaced.
  write_file(path_, content_->dump(kIndent, ' ', false, Json::error_handler_t::replace) + '\n',
             kRunLog);
}

}  // namespace semitone::report

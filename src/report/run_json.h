#pragma once

#include "semitone/report/run_log.h"

#include <nlohmann/json_fwd.hpp>

#include <filesystem>
#include <memory>
#include <string>
#include <string_view>

// Internal interface: other rooms include this header.
namespace semitone::report {

// How often a run was started in a directory: 0 if there is none.
int starts_in(const std::filesystem::path& directory);

// Whether a path is that of a file of a run's record.
bool is_record_file(const std::filesystem::path& path);
// Whether a record has files of this name.
bool has_name_of_record(const std::filesystem::path& path);

// The launcher's job (TORCHELASTIC_RUN_ID) that made the last start in a directory. Empty without a
// launcher, and if there is no run, or its file cannot be read.
std::string job_of_last_start(const std::filesystem::path& directory);

// The file that describes one start of a run: run.json, and for later starts run-2.json …
class RunJson {
 public:
  // Writes the file of the next start, with all but the end. FileError if it cannot be written.
  RunJson(const std::filesystem::path& directory, const RunLogOptions& options, std::int64_t rank,
          std::int64_t world_size);
  ~RunJson();
  RunJson(const RunJson&) = delete;
  RunJson& operator=(const RunJson&) = delete;

  // Adds the end.
  void end(Outcome outcome, std::string_view reason);

 private:
  void write() const;

  std::filesystem::path path_;
  std::unique_ptr<nlohmann::ordered_json> content_;
};

}  // namespace semitone::report

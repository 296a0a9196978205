#include "src/launch/log_files.h"

#include "semitone/core/error.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <system_error>

namespace semitone::launch {
namespace {

constexpr auto kLogFiles = "launch.logs";
constexpr std::streamoff kMaxBytes = 1 << 16;

void make_folder(const std::filesystem::path& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error)
    throw FileError(kLogFiles, fmt::format("to make the folder '{}'", folder.string()),
                    error.message(), "choose another --log-dir");
}

}  // namespace

void require_log_dir(const std::filesystem::path& folder) {
  make_folder(folder);
  if (::access(folder.c_str(), W_OK | X_OK) != 0)
    throw FileError(kLogFiles, fmt::format("to write in the folder '{}'", folder.string()),
                    reason_of(errno), "choose another --log-dir");
}

bool names_a_folder(std::string_view name) {
  constexpr std::size_t kLongest = 255;  // of file systems
  const auto is_bad = [](unsigned char letter) { return letter < ' ' || letter == '/'; };
  return !name.empty() && name.size() <= kLongest && name != "." && name != ".." &&
         std::none_of(name.begin(), name.end(), is_bad);
}

std::filesystem::path log_folder(const std::filesystem::path& folder,
                                 const Assignment& assignment) {
  return folder / assignment.run_id / fmt::format("attempt_{}", assignment.attempt);
}

LogFile open_log(const std::filesystem::path& file) {
  make_folder(file.parent_path());
  Descriptor result(::open(file.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666));
  struct stat status{};
  if (!result.is_open() || ::fstat(result.number(), &status) != 0)
    throw FileError(kLogFiles, fmt::format("to write '{}'", file.string()), reason_of(errno));
  return {above_standard_streams(std::move(result)), status.st_size};
}

std::string end_of_file(const std::filesystem::path& file, std::int64_t size) {
  std::ifstream stream(file, std::ios::binary | std::ios::ate);
  const std::streamoff end = stream.tellg();
  if (!stream || end <= 0) return {};
  // A shorter file was truncated since, so that nothing earlier is left in it.
  const std::streamoff begin = end < size ? 0 : size;
  const auto count = std::min(end - begin, kMaxBytes);
  std::string text(static_cast<std::size_t>(count), '\0');
  stream.seekg(end - count);
  stream.read(text.data(), count);
  text.resize(static_cast<std::size_t>(stream.gcount()));
  return text;
}

Streams teed(const LaunchOptions& options, int local_rank) {
  // A folder without other options selects all streams.
  const bool folder_alone = !options.log_dir().empty() && !options.redirects().any();
  if (folder_alone && !options.tee().any()) return Streams::both;
  return options.tee().of(local_rank);
}

Streams redirected(const LaunchOptions& options, int local_rank) {
  return options.redirects().of(local_rank);
}

}  // namespace semitone::launch

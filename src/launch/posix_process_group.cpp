#include "src/launch/posix_process_group.h"

#include <cctype>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <system_error>

namespace semitone::launch {
namespace {

// Reads the state, the group and the number of threads, the 3rd, 5th and 20th value, from
// /proc/<id>/stat: "17 (name) S <parent> <group> …", where a name may contain any character. A
// process whose first thread has ended is called a zombie even if others of its threads continue.
bool is_living_member(const std::filesystem::path& process, pid_t group) {
  std::ifstream file(process / "stat");
  std::string line;
  if (!std::getline(file, line)) return false;
  const auto name_end = line.rfind(')');
  if (name_end == std::string::npos) return false;
  std::istringstream rest(line.substr(name_end + 1));
  char state = 0;
  pid_t parent = 0;
  pid_t its_group = 0;
  rest >> state >> parent >> its_group;
  std::string skipped;
  for (int value = 6; value < 20; ++value) rest >> skipped;
  int threads = 0;
  rest >> threads;
  return its_group == group && (threads > 1 || (state != 'Z' && state != 'X'));
}

}  // namespace

bool is_group_alive(pid_t group) {
  if (::kill(-group, 0) != 0) return false;
  std::error_code error;
  std::filesystem::directory_iterator processes("/proc", error);
  if (error) return true;
  for (; processes != std::filesystem::directory_iterator(); processes.increment(error)) {
    const auto& path = processes->path();
    if (std::isdigit(static_cast<unsigned char>(path.filename().string().front())) == 0) continue;
    if (is_living_member(path, group)) return true;
    if (error) return true;
  }
  return false;
}

}  // namespace semitone::launch

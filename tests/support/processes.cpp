#include "tests/support/processes.h"

#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <fstream>
#include <sstream>
#include <system_error>
#include <thread>

namespace semitone::test {
namespace {

// Whether this process has no children, once those that have ended are gone.
bool have_all_children_ended() {
  pid_t ended = 0;
  do {
    ended = ::waitpid(-1, nullptr, WNOHANG);
  } while (ended > 0);
  return ended < 0 && errno == ECHILD;
}

// "17 (name), 18 (name)".
std::string describe_children() {
  std::string text;
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    std::ifstream stat(entry.path() / "stat");
    std::string line;
    if (!std::getline(stat, line)) continue;
    // "17 (name) S 1 …", and a name may have anything in it.
    const std::size_t name_end = line.rfind(')') + 1;
    std::istringstream rest(line.substr(name_end));
    char state = 0;
    pid_t parent = 0;
    if (rest >> state >> parent && parent == ::getpid())
      text += (text.empty() ? "" : ", ") + line.substr(0, name_end);
  }
  return text;
}

}  // namespace

bool is_running(pid_t id) {
  std::ifstream stat("/proc/" + std::to_string(id) + "/stat");
  std::string line;
  if (!std::getline(stat, line)) return false;
  // "17 (name) S …", and a name may have anything in it.
  const auto state = line.rfind(')') + 2;
  return state < line.size() && line[state] != 'Z' && line[state] != 'X';
}

bool eventually(const std::function<bool()>& condition) {
  const auto limit = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > limit) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return true;
}

std::vector<std::string> read_words(const std::filesystem::path& file) {
  std::ifstream stream(file);
  std::vector<std::string> words;
  for (std::string word; stream >> word;) words.push_back(word);
  return words;
}

std::vector<pid_t> ids_in(const std::filesystem::path& file) {
  std::vector<pid_t> ids;
  for (const std::string& word : read_words(file)) ids.push_back(std::stoi(word));
  return ids;
}

void adopt_orphans() {
  if (::prctl(PR_SET_CHILD_SUBREAPER, 1) != 0)
    throw std::system_error(errno, std::generic_category(), "PR_SET_CHILD_SUBREAPER");
}

testing::AssertionResult no_process_is_left() {
  if (eventually(have_all_children_ended)) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "left: " << describe_children();
}

}  // namespace semitone::test

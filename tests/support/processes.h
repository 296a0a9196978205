#pragma once

#include <sys/types.h>

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

// Watches processes that a test does not own.
namespace semitone::test {

// Whether a process exists and is not a zombie.
bool is_running(pid_t id);

// Checks a condition every 10 ms for at most a minute. The limit prevents hanging; it is not a
// measurement.
bool eventually(const std::function<bool()>& condition);

// The words of a file; none if it does not exist.
std::vector<std::string> read_words(const std::filesystem::path& file);

// The numbers in a file that processes write their ids to.
std::vector<pid_t> ids_in(const std::filesystem::path& file);

}  // namespace semitone::test

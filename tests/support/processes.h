#pragma once

#include <sys/types.h>

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

// Watching processes that a test does not own.
namespace semitone::test {

// Whether it is there and no zombie.
bool is_running(pid_t id);

// Looks every 10 ms whether it is so, for a minute at most: a limit against hanging, not a
// measurement.
bool eventually(const std::function<bool()>& condition);

// The words of a file; none if it is not there.
std::vector<std::string> words_of(const std::filesystem::path& file);

// The numbers in a file that processes write their ids to.
std::vector<pid_t> ids_in(const std::filesystem::path& file);

}  // namespace semitone::test

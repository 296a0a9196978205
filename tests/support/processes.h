#pragma once

#include <gtest/gtest.h>
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

// Makes this process the parent of all its descendants whose own parent ends, so that
// no_process_is_left() sees them.
void adopt_orphans();

// Waits until this process has no children, and after adopt_orphans() no other descendants either.
// The failure lists those that are still there after a minute. Call wait() on every launch::Process
// first, since this function takes the status of every child that has ended.
testing::AssertionResult no_process_is_left();

}  // namespace semitone::test

// Writes the run that tests/report/tensorboard_files.py reads.

#include "semitone/report/run_log.h"
#include "tests/report/run_directory.h"

#include <torch/types.h>

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <string>

namespace semitone::report {
namespace {

void write_steps(const std::filesystem::path& directory, std::int64_t from, std::int64_t to) {
  RunLog log(directory, RunLogOptions().config({{"lr", "0.1"}}));
  for (std::int64_t step = from; step <= to; ++step) {
    log.set_step(step);
    log.add_scalar("train/loss", 1.0 / static_cast<double>(step));
    log.add_scalar("train/nan", std::nan(""));
    log.add_histogram("values", torch::arange(-50, 50, torch::kDouble) / 10);
    log.add_text("note", "step **" + std::to_string(step) + "**");
  }
}

TEST(RunForPython, IsWritten) {
  const semitone::test::TemporaryFolder folder;
  const char* const given = std::getenv("SEMITONE_TEST_FOLDER");
  const std::filesystem::path directory = given == nullptr ? folder.path() : given;
  write_steps(directory, 1, 5);
  write_steps(directory, 4, 6);  // continues from a checkpoint of step 3
  EXPECT_EQ(test::events_files(directory).size(), 2U);
}

}  // namespace
}  // namespace semitone::report

#pragma once

#include "tests/apps/semitone_command.h"
#include "tests/support/image_files.h"
#include "tests/support/temporary_folder.h"

#include <gtest/gtest.h>

namespace semitone::test {

// A folder with a small data set, and short trainings on it.
class CliTest : public ::testing::Test {
 protected:
  CliTest() { write_data_set(data_.path(), 400, 100); }

  Words train(const Words& more = {}) const {
    Words words{"train", "--data", data_.path().string(), "--batch-size", "20", "--threads", "1"};
    words.insert(words.end(), more.begin(), more.end());
    return words;
  }

  TemporaryFolder data_;
  TemporaryFolder folder_;
};

}  // namespace semitone::test

// Damaged checkpoints: resume() recognises them, and takes the previous one.

#include "semitone/checkpoint.h"
#include "src/core/checksum.h"
#include "tests/checkpoint/training.h"
#include "tests/support/captured_log.h"
#include "tests/support/errors.h"
#include "tests/support/temporary_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace semitone::checkpoint::test {
namespace damage {
namespace {

namespace fs = std::filesystem;
using semitone::test::CapturedLog;
using semitone::test::message_of;
using semitone::test::read_text;
using semitone::test::TemporaryFolder;
using semitone::test::write_text;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// What may happen to a file, by a description.
using Damages = std::vector<std::pair<std::string, std::string>>;

Damages damages_to(const std::string& bytes) {
  Damages damages{{"empty", ""},
                  {"half", bytes.substr(0, bytes.size() / 2)},
                  {"a byte less", bytes.substr(0, bytes.size() - 1)},
                  {"a byte more", bytes + "\n"}};
  constexpr std::size_t kPlaces = 12;
  for (std::size_t i = 0; i < kPlaces; ++i) {
    const std::size_t at = i * (bytes.size() - 1) / (kPlaces - 1);
    std::string flipped = bytes;
    flipped[at] = static_cast<char>(flipped[at] ^ (1 << (i % 8)));
    damages.emplace_back("a flipped bit in byte " + std::to_string(at), flipped);
  }
  return damages;
}

class DamagedCheckpoint : public testing::Test {
 protected:
  // Two checkpoints, of the steps 2 and 3.
  DamagedCheckpoint() : run_({}), checkpoint_(run_.checkpoint(folder_ / "run")) {
    for (const std::int64_t step : {2, 3}) {
      run_.train_to(step);
      checkpoint_.save(step);
      states_.push_back(run_.state());
    }
    run_.train_to(4);
  }

  void expect_fallback(const std::string& file) {
    const CapturedLog log;
    EXPECT_EQ(checkpoint_.resume(), 2);
    EXPECT_TRUE(same_bits(run_.state(), states_[0]));
    EXPECT_THAT(log.text(), AllOf(HasSubstr("step 3"), HasSubstr(file)));
  }

  std::vector<fs::path> files(std::int64_t step) const {
    std::vector<fs::path> files;
    for (const auto& entry : fs::directory_iterator(checkpoint_.path_of(step)))
      files.push_back(entry.path());
    std::sort(files.begin(), files.end());
    return files;
  }

  TemporaryFolder folder_;
  Training run_;
  Checkpoint checkpoint_;
  std::vector<std::vector<at::Tensor>> states_;
};

TEST_F(DamagedCheckpoint, IsReplacedByThePreviousOneWhateverTheDamage) {
  const auto all = files(3);
  EXPECT_EQ(all.size(), 7U);  // six entries and the manifest
  for (const fs::path& file : all) {
    const std::string bytes = read_text(file);
    for (const auto& [name, damaged] : damages_to(bytes)) {
      SCOPED_TRACE(file.filename().string() + ": " + name);
      write_text(file, damaged);
      expect_fallback(file.filename().string());
    }
    SCOPED_TRACE(file.filename().string() + ": removed");
    fs::remove(file);
    expect_fallback(file.filename().string());
    fs::create_directory(file);
    expect_fallback(file.filename().string());
    fs::remove(file);
    write_text(file, bytes);
    EXPECT_EQ(checkpoint_.resume(), 3);
    EXPECT_TRUE(same_bits(run_.state(), states_[1]));
  }
}

TEST_F(DamagedCheckpoint, IsAnErrorIfNoOtherIsLeftAndChangesNothing) {
  for (const std::int64_t step : {2, 3}) write_text(checkpoint_.path_of(step) / "model.pt", "");
  const auto before = run_.state();
  const CapturedLog log;
  EXPECT_THAT(message_of<FileError>([&] { checkpoint_.resume(); }),
              AllOf(HasSubstr("[checkpoint.resume]"), HasSubstr("2 damaged"),
                    HasSubstr("step-00000003/model.pt")));
  EXPECT_TRUE(same_bits(run_.state(), before));
}

TEST_F(DamagedCheckpoint, IsRemovedWhenARunThatRejectedItSavesAgain) {
  fs::remove(checkpoint_.path_of(3) / "model.pt");
  const CapturedLog log;
  EXPECT_EQ(checkpoint_.resume(), 2);
  EXPECT_TRUE(fs::exists(checkpoint_.path_of(3)));
  // As a run with other steps between its checkpoints.
  run_.step = 2;
  auto more = run_.checkpoint(folder_ / "other");
  fs::rename(checkpoint_.path_of(3), checkpoint_.path_of(5));
  EXPECT_EQ(checkpoint_.resume(), 2);
  run_.step = 2;
  run_.train_to(3);
  checkpoint_.save(3);
  EXPECT_THAT(checkpoint_.steps(), ElementsAre(2, 3));
  EXPECT_EQ(checkpoint_.resume(), 3);
  EXPECT_TRUE(same_bits(run_.state(), states_[1]));
}

TEST_F(DamagedCheckpoint, OfAStepIsReplacedByAWholeOne) {
  fs::remove(checkpoint_.path_of(3) / "model.pt");
  {
    const CapturedLog log;
    EXPECT_EQ(checkpoint_.resume(), 2);
  }
  run_.step = 2;
  run_.train_to(3);
  checkpoint_.save(3);
  EXPECT_EQ(checkpoint_.resume(), 3);
  EXPECT_TRUE(same_bits(run_.state(), states_[1]));
}

TEST_F(DamagedCheckpoint, IncludesOneUnderTheNameOfAnotherStep) {
  fs::rename(checkpoint_.path_of(3), checkpoint_.path_of(4));
  const CapturedLog log;
  EXPECT_EQ(checkpoint_.resume(), 2);
  EXPECT_THAT(log.text(), HasSubstr("expected step 4"));
}

// The checkpoint may be whole, so neither resume() nor a later save() drops it.
TEST_F(DamagedCheckpoint, DoesNotIncludeOneOfALaterVersion) {
  const fs::path file = checkpoint_.path_of(3) / "manifest.json";
  std::string text = read_text(file);
  text.replace(text.find("\"version\": 1"), 12, "\"version\": 2");
  const std::size_t end = text.rfind(",\n \"crc32\"");
  write_text(file, text);
  EXPECT_EQ(checkpoint_.resume(), 2);  // changed by hand, without its checksum
  const std::string body = text.substr(0, end);
  write_text(file, body + ",\n \"crc32\": \"" + checksum_of(body + "\n}") + "\"\n}\n");
  EXPECT_THAT(message_of<FileError>([&] { checkpoint_.resume(); }),
              AllOf(HasSubstr("expected version 1"), HasSubstr("got 2")));
}

TEST_F(DamagedCheckpoint, DoesNotIncludeOneThatCannotBeRead) {
  const fs::path file = checkpoint_.path_of(3) / "model.pt";
  const fs::path aside = folder_ / "aside";
  fs::rename(file, aside);
  fs::create_symlink(file, file);  // a link to itself
  EXPECT_THAT(message_of<FileError>([&] { checkpoint_.resume(); }),
              AllOf(HasSubstr("expected to read"), HasSubstr("symbolic links")));
  fs::rename(aside, file);
  EXPECT_EQ(checkpoint_.resume(), 3);
}

TEST_F(DamagedCheckpoint, IncludesAManifestThatIsTooLarge) {
  fs::resize_file(checkpoint_.path_of(3) / "manifest.json", std::uintmax_t{1} << 40);
  const CapturedLog log;
  EXPECT_EQ(checkpoint_.resume(), 2);
  EXPECT_THAT(log.text(), HasSubstr("at most 64 MiB"));
}

}  // namespace
}  // namespace damage
}  // namespace semitone::checkpoint::test

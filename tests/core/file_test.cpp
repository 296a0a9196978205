#include "src/core/file.h"

#include "semitone/core/error.h"
#include "tests/support/temporary_folder.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <functional>
#include <string>

namespace semitone {
namespace {

using test::read_text;
using test::TemporaryFolder;
using test::write_text;
namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;

std::string message_of(const std::function<void()>& act) {
  try {
    act();
  } catch (const FileError& error) {
    return error.what();
  }
  return "nothing was thrown";
}

std::size_t files_in(const TemporaryFolder& folder) {
  return static_cast<std::size_t>(
      std::distance(std::filesystem::directory_iterator(folder.path()), {}));
}

TEST(WriteFile, MakesAndReplacesAFileAndLeavesNothingElse) {
  const TemporaryFolder folder;
  write_file(folder / "a", "first, and longer", "test");
  EXPECT_EQ(read_text(folder / "a"), "first, and longer");
  write_file(folder / "a", "second", "test");
  EXPECT_EQ(read_text(folder / "a"), "second");
  EXPECT_EQ(files_in(folder), 1U);
}

TEST(WriteFile, WritesPiecesOrNothingIfTheirSourceThrows) {
  const TemporaryFolder folder;
  const auto two_pieces = [](const WritePiece& write) {
    write("one, ");
    write("two");
  };
  write_file(folder / "a", two_pieces, "test");
  EXPECT_EQ(read_text(folder / "a"), "one, two");
  const auto half = [](const WritePiece& write) {
    write("half");
    throw FileError("source", "a second piece", "none");
  };
  EXPECT_THAT(message_of([&] { write_file(folder / "a", half, "test"); }), HasSubstr("[source]"));
  EXPECT_EQ(read_text(folder / "a"), "one, two");
  EXPECT_EQ(files_in(folder), 1U);
}

TEST(WriteFile, KeepsASymbolicLinkAndReplacesWhatItNames) {
  const TemporaryFolder folder;
  write_text(folder / "real", "old");
  std::filesystem::create_symlink("real", folder / "link");
  write_file(folder / "link", "new", "test");
  EXPECT_TRUE(std::filesystem::is_symlink(folder / "link"));
  EXPECT_EQ(read_text(folder / "real"), "new");
}

TEST(WriteFile, MakesTheFileAtTheEndOfSymbolicLinks) {
  const TemporaryFolder folder;
  fs::create_directory(folder / "below");
  fs::create_symlink("../link", folder / "below" / "link");
  fs::create_symlink(folder / "real", folder / "link");
  write_file(folder / "below" / "link", "new", "test");
  EXPECT_TRUE(fs::is_symlink(folder / "below" / "link"));
  EXPECT_TRUE(fs::is_symlink(folder / "link"));
  EXPECT_TRUE(fs::is_regular_file(fs::symlink_status(folder / "real")));
  EXPECT_EQ(read_text(folder / "real"), "new");
}

TEST(WriteFile, RefusesSymbolicLinksThatLeadToEachOther) {
  const TemporaryFolder folder;
  fs::create_symlink("there", folder / "here");
  fs::create_symlink("here", folder / "there");
  EXPECT_THAT(
      message_of([&] { write_file(folder / "here", "x", "test"); }),
      AllOf(HasSubstr((folder / "here").string()), HasSubstr("Too many levels of symbolic links")));
  EXPECT_THROW(require_writable(folder / "here", "test"), FileError);
  EXPECT_TRUE(fs::is_symlink(folder / "here"));
  EXPECT_EQ(files_in(folder), 2U);
}

TEST(WriteFile, WritesThroughADeviceInsteadOfReplacingIt) {
  write_file("/dev/null", "gone", "test");
  EXPECT_TRUE(std::filesystem::is_character_file("/dev/null"));
  EXPECT_THAT(message_of([] { write_file("/dev/full", "x", "test.room"); }),
              AllOf(HasSubstr("[test.room]"), HasSubstr("'/dev/full'"),
                    HasSubstr("No space left on device")));
}

TEST(WriteFile, KeepsTheModeOfWhatItReplaces) {
  using std::filesystem::perms;
  const TemporaryFolder folder;
  write_text(folder / "a", "old");
  std::filesystem::permissions(folder / "a", perms::owner_read | perms::owner_write);
  write_file(folder / "a", "new", "test");
  EXPECT_EQ(std::filesystem::status(folder / "a").permissions(),
            perms::owner_read | perms::owner_write);
  write_file(folder / "b", "new", "test");
  write_text(folder / "c", "new");
  EXPECT_EQ(std::filesystem::status(folder / "b").permissions(),
            std::filesystem::status(folder / "c").permissions());
}

TEST(WriteFile, ReplacesAFileInMemory) {
  const fs::path folder =
      fs::path("/dev/shm") / ("semitone_file_test." + std::to_string(::getpid()));
  fs::create_directory(folder);
  for (const char* const text : {"first", "second"}) {
    write_file(folder / "file", text, "test");
    EXPECT_EQ(read_text(folder / "file"), text);
  }
  fs::remove_all(folder);
}

TEST(WriteFile, GivesANewFileTheModeThatTheProcessGivesFiles) {
  const TemporaryFolder folder;
  const mode_t before = ::umask(0027);
  write_file(folder / "file", "text", "test");
  ::umask(before);
  EXPECT_EQ(fs::status(folder / "file").permissions(), fs::perms(0640));
}

TEST(WriteFile, AppendsToAnOpenFileOfThisProcess) {
  const TemporaryFolder folder;
  write_text(folder / "a", "old ");
  const int number = ::open((folder / "a").c_str(), O_WRONLY | O_CLOEXEC);
  ASSERT_GE(number, 0);
  write_file("/dev/fd/" + std::to_string(number), "new", "test");
  ::close(number);
  EXPECT_EQ(read_text(folder / "a"), "old new");
}

TEST(WriteFile, LeavesAFileOfAnotherThatHasAPartialName) {
  const TemporaryFolder folder;
  write_text(folder / "a.partial", "precious");
  require_writable(folder / "a", "test");
  write_file(folder / "a", "new", "test");
  EXPECT_EQ(read_text(folder / "a.partial"), "precious");
}

TEST(WriteFile, ThatFailsHalfwayLeavesTheOldFile) {
  const TemporaryFolder folder;
  write_file(folder / "a", "old", "test");
  // The kernel refuses to let files grow beyond 1000 bytes: what a full disk does, for this
  // process.
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit small{1000, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const std::string message =
      message_of([&] { write_file(folder / "a", std::string(2000, 'x'), "test"); });
  setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  EXPECT_THAT(message, HasSubstr("File too large"));
  EXPECT_EQ(read_text(folder / "a"), "old");
  EXPECT_EQ(files_in(folder), 1U);
}

TEST(WriteFile, SaysWhyItCannot) {
  const TemporaryFolder folder;
  EXPECT_THAT(message_of([&] { write_file(folder / "no" / "a", "x", "test"); }),
              AllOf(HasSubstr((folder / "no").string()), HasSubstr("No such file or directory")));
  EXPECT_THAT(message_of([&] { write_file(folder.path(), "x", "test"); }),
              HasSubstr("Is a directory"));
  write_text(folder / "file", "");
  EXPECT_THAT(message_of([&] { write_file(folder / "file" / "a", "x", "test"); }),
              HasSubstr("Not a directory"));
}

TEST(RequireWritable, ChangesNothing) {
  const TemporaryFolder folder;
  write_text(folder / "a", "old");
  require_writable(folder / "a", "test");
  require_writable(folder / "b", "test");
  require_writable("/dev/full", "test");
  EXPECT_EQ(read_text(folder / "a"), "old");
  EXPECT_EQ(files_in(folder), 1U);
}

TEST(RequireWritable, RefusesWhatCannotBeWritten) {
  const TemporaryFolder folder;
  EXPECT_THROW(require_writable(folder / "no" / "a", "test"), FileError);
  EXPECT_THROW(require_writable(folder.path(), "test"), FileError);
  EXPECT_THROW(require_writable("/proc/semitone", "test"), FileError);
}

TEST(RequireWritable, OfAFolderDoesNotDependOnWhatIsInIt) {
  const TemporaryFolder folder;
  fs::create_directory(folder / "new");
  require_writable_folder(folder.path(), "test");
  EXPECT_EQ(files_in(folder), 1U);
  EXPECT_THAT(message_of([&] { require_writable_folder(folder / "no", "test.room"); }),
              AllOf(HasSubstr("[test.room]"), HasSubstr((folder / "no").string()),
                    HasSubstr("No such file or directory")));
  EXPECT_THROW(require_writable_folder("/proc", "test"), FileError);
}

}  // namespace
}  // namespace semitone

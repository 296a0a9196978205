// Files that claim more than they have.

#include "semitone/core/error.h"
#include "semitone/weights/file.h"
#include "tests/support/errors.h"
#include "tests/support/temporary_folder.h"
#include "tests/weights/fixtures.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

namespace semitone::weights {
namespace hostile_files {
namespace {

using test::difference;
using test::expect_error;
using test::expected_tensors;
using test::python_file;
using test::TemporaryFolder;
using test::write_text;

Contents read_bytes(const std::string& bytes) {
  const TemporaryFolder folder;
  write_text(folder / "a", bytes);
  return read(folder / "a");
}

// A ZIP archive of PyTorch whose directory can be changed.
class Archive {
 public:
  // Fields of an entry of the directory, by their places.
  static constexpr std::size_t kMethod = 10;
  static constexpr std::size_t kStored = 20;
  static constexpr std::size_t kSize = 24;
  static constexpr std::size_t kHeader = 42;

  // The entry of a record, "data/0".
  std::size_t entry(const std::string& record) const {
    const std::string name = "state_dict/" + record;
    for (auto at = bytes.find("PK\x01\x02"); at != std::string::npos;
         at = bytes.find("PK\x01\x02", at + 1)) {
      if (get<std::uint16_t>(at + 28) == name.size() &&
          std::string_view(bytes).substr(at + 46, name.size()) == name)
        return at;
    }
    ADD_FAILURE() << "no record " << record;
    return 0;
  }

  std::size_t end() const { return bytes.rfind("PK\x05\x06"); }

  template <typename T>
  T get(std::size_t at) const {
    T number{};
    std::memcpy(&number, bytes.data() + at, sizeof(T));
    return number;
  }
  template <typename T>
  Archive& set(std::size_t at, T number) {
    std::memcpy(bytes.data() + at, &number, sizeof(T));
    return *this;
  }

  std::string bytes = python_file("state_dict.pt");
};

// The legacy format: magic number, version, system, the object, and the keys of no storage.
std::string legacy_of(const std::string& pickle) {
  return "\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."
         "\x80\x02M\xe9\x03.\x80\x02}." +
         pickle + "\x80\x02].";
}

void expect_refused(const Archive& archive, std::string_view part) {
  expect_error([&] { read_bytes(archive.bytes); }, {part});
}

TEST(HostileArchive, RecordsThatAreNotReadAreNeverUnpacked) {
  Archive bomb;
  const std::size_t version = bomb.entry("version");
  bomb.set<std::uint16_t>(version + Archive::kMethod, 8)
      .set<std::uint32_t>(version + Archive::kSize, 0xFFFFFFF0U);
  EXPECT_EQ(difference(read_bytes(bomb.bytes).tensors, expected_tensors("state_dict")), "");
}

TEST(HostileArchive, RecordsThatAreReadMustNotBeCompressed) {
  for (const char* const record : {"data.pkl", "data/0", "byteorder"}) {
    Archive packed;
    packed.set<std::uint16_t>(packed.entry(record) + Archive::kMethod, 8);
    expect_refused(packed, "a compressed or encrypted one");
  }
}

TEST(HostileArchive, SizesAndPlacesMustFitTheFile) {
  Archive larger;
  larger.set<std::uint32_t>(larger.entry("data/0") + Archive::kSize, 0x7FFFFFFFU);
  expect_refused(larger, "one size of record");
  Archive outside = larger;
  outside.set<std::uint32_t>(outside.entry("data/0") + Archive::kStored, 0x7FFFFFFFU);
  expect_refused(outside, "before its directory");
  Archive large_field = larger;
  large_field.set<std::uint32_t>(large_field.entry("data/0") + Archive::kStored, 0xFFFFFFFFU);
  expect_refused(large_field, "the size and place of record");
  Archive behind;
  behind.set<std::uint32_t>(behind.entry("data/0") + Archive::kHeader, 0xFFFFFFF0U);
  expect_refused(behind, "before its directory");
}

TEST(HostileArchive, RecordsMustNotOverlap) {
  Archive twice;
  twice.set(twice.entry("data/1") + Archive::kHeader,
            twice.get<std::uint32_t>(twice.entry("data/0") + Archive::kHeader));
  expect_refused(twice, "another one");
  Archive longer;
  const std::size_t entry = longer.entry("data/0");
  const auto size = longer.get<std::uint32_t>(entry + Archive::kSize) + 200;
  longer.set(entry + Archive::kSize, size).set(entry + Archive::kStored, size);
  expect_refused(longer, "records that overlap");
}

TEST(HostileArchive, NamesMustDiffer) {
  Archive named;
  const std::size_t one = named.entry("data/1");
  const std::size_t header = named.get<std::uint32_t>(one + Archive::kHeader);
  const std::size_t last = std::string("state_dict/data/1").size() - 1;
  named.bytes[one + 46 + last] = '0';
  named.bytes[header + 30 + last] = '0';
  expect_refused(named, "twice");
}

TEST(HostileArchive, TheDirectoryHasTheRecordsThatItStates) {
  Archive fewer;
  fewer.set<std::uint16_t>(fewer.end() + 10, 3);
  expect_refused(fewer, "more");
  Archive more;
  more.set<std::uint16_t>(more.end() + 10, 60'000);
  expect_refused(more, "a directory");
  Archive outside;
  outside.set<std::uint32_t>(outside.end() + 16, 0x7FFFFFFFU);
  expect_refused(outside, "a directory inside the file");
  Archive behind;
  behind.bytes += "more";
  expect_refused(behind, "a directory at its end");
  Archive large;
  large.set<std::uint32_t>(large.end() + 16, 0xFFFFFFFFU);
  EXPECT_EQ(difference(read_bytes(large.bytes).tensors, expected_tensors("state_dict")), "");
}

TEST(HostileFile, RepeatedElementsAreLimited) {
  expect_error([] { read_bytes(python_file("expanded.pt")); }, {"2^24 elements", "clone()"});
}

// Of losses, next to a state dict. There are more of them than containers that may be visited.
TEST(HostileFile, LongListsOfNumbersAreNoObstacle) {
  std::string pickle = "\x80\x02}(U\x06losses](";
  for (int i = 0; i < 1'200'000; ++i) pickle += "K\x01";
  pickle += "eU\x01w}u.";
  expect_error([&] { read_bytes(legacy_of(pickle)); }, {"a dict without any tensor"});
  std::string more = "\x80\x02](";
  for (int i = 0; i < 4'000'001; ++i) more += "K\x01";
  expect_error([&] { read_bytes(legacy_of(more + "e.")); },
               {"at most 4000000 values", "save the state_dict alone"});
}

// A pickle of some bytes that names 2^20 paths, each 800 bytes long.
TEST(HostileFile, NamesAreLimited) {
  using namespace std::string_literals;
  const std::string tensor =
      "ctorch._utils\n_rebuild_tensor_v2\n((U\x07storagectorch\nFloatStorage\n"s
      "U\x01"s
      "0U\x03"s
      "cpuK\x01tQK\x00))\x89"s
      "ccollections\nOrderedDict\n)RtR"s;
  std::string pickle = "\x80\x02" + tensor;
  // A dict with two keys for the previous value, 20 times.
  for (int i = 0; i < 20; ++i) {
    const std::string key(40, 'k');
    pickle +=
        "q\x01"
        "0}(X" +
        std::string("\x28\0\0\0", 4) + key + "h\x01X" + std::string("\x29\0\0\0", 4) + key +
        "kh\x01u";
  }
  pickle += ".";
  expect_error([&] { read_bytes(legacy_of(pickle)); }, {"named tensors"});
}

}  // namespace
}  // namespace hostile_files
}  // namespace semitone::weights

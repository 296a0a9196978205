#include "semitone/core/error.h"
#include "semitone/weights/file.h"
#include "tests/support/errors.h"
#include "tests/support/temporary_folder.h"
#include "tests/weights/fixtures.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <string>

namespace semitone::weights {
namespace safetensors_test {
namespace {

using test::expect_error;
using test::TemporaryFolder;
using test::write_text;

TEST(Safetensors, InvalidHeadersAreErrors) {
  const TemporaryFolder folder;
  const auto expect_refused = [&](const std::string& header, const std::string& data,
                                  const char* part) {
    std::string size(8, '\0');
    const std::uint64_t bytes = header.size();
    std::memcpy(size.data(), &bytes, 8);
    write_text(folder / "a", size + header + data);
    expect_error([&] { read(folder / "a"); }, {part});
  };
  const std::string a = R"("a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]})";
  expect_refused("{" + a + "," + a + "}", "12", "'a' twice");
  expect_refused("{" + a + "}", "123", "2 bytes of tensors");
  expect_refused("{" + a + "}", "1", "2 bytes of tensors");
  expect_refused(R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}})", "123",
                 "begin at byte 0");
  expect_refused(R"({"a":{"dtype":"U8","shape":[3],"data_offsets":[0,2]}})", "12",
                 "the bytes of the shape");
  expect_refused(R"({"a":{"dtype":"F7","shape":[2],"data_offsets":[0,2]}})", "12",
                 "a dtype that Semitone reads");
  expect_refused(R"({"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,2]}})", "12", "a shape");
  expect_refused(R"({"a":{"dtype":"F64","shape":[4611686018427387904,4],"data_offsets":[0,0]}})",
                 "", "the bytes of the shape");
  expect_refused(R"({"a":{"dtype":"BOOL","shape":[1],"data_offsets":[0,1]}})", "\x02", "0 or 1");
  expect_refused("{\"a\":" + std::string(100'000, '['), "", "nested");
  expect_refused(R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2],"dtype":"I8"}})", "12",
                 "'dtype' twice");
  expect_refused(
      R"({"a":{"dtype":"U8","shape":[0,4611686018427387904,4611686018427387904],"data_offsets":[0,0]}})",
      "", "the bytes of the shape");
  expect_refused("{broken", "", "a header in JSON");
  std::string size(8, '\xff');
  write_text(folder / "a", size + "{}");
  expect_error([&] { read(folder / "a"); }, {"a header of at most 2 bytes"});
}

// As the format's own reader does.
TEST(Safetensors, OtherFieldsAreSkipped) {
  const TemporaryFolder folder;
  const std::string header =
      R"({"__metadata__":null,"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2],"x":{"y":[[1]]}}})";
  std::string size(8, '\0');
  size[0] = static_cast<char>(header.size());
  write_text(folder / "a", size + header + "12");
  EXPECT_TRUE(
      test::same_bytes(read(folder / "a").tensors["a"], torch::tensor({'1', '2'}, torch::kByte)));
}

}  // namespace
}  // namespace safetensors_test
}  // namespace semitone::weights

#include "semitone/zoo/idx.h"

#include "semitone/core/error.h"
#include "src/zoo/byte_source.h"

#include <torch/types.h>

#include <algorithm>
#include <array>
#include <string>
#include <vector>

namespace semitone::zoo {
namespace {

constexpr auto kIdx = "zoo.idx";
constexpr unsigned kUint8 = 0x08;
// The largest number of dimensions that LibTorch prints and indexes well; IDX itself allows 255.
constexpr unsigned kMaxDimensions = 8;

std::string element_type(unsigned code) {
  switch (code) {
    case 0x09:
      return "int8";
    case 0x0B:
      return "int16";
    case 0x0C:
      return "int32";
    case 0x0D:
      return "float32";
    case 0x0E:
      return "float64";
    default:
      return "unknown ones";
  }
}

std::vector<std::int64_t> read_header(ByteSource& source, const std::filesystem::path& path) {
  std::array<unsigned char, 4> bytes{};
  const auto next = [&] {
    if (source.read(bytes.data(), bytes.size()) < bytes.size())
      throw FileError(kIdx, "a whole IDX header" + in(path), "one that ends early");
  };
  next();
  const unsigned type = bytes[2];
  const unsigned dimensions = bytes[3];
  if (bytes[0] != 0 || bytes[1] != 0 || dimensions == 0 || dimensions > kMaxDimensions) {
    throw FileError(kIdx, "the magic number 0 0 8 <dimensions> of an IDX file" + in(path),
                    std::to_string(bytes[0]) + " " + std::to_string(bytes[1]) + " " +
                        std::to_string(type) + " " + std::to_string(dimensions));
  }
  if (type != kUint8) {
    throw FileError(kIdx, "uint8 elements (type 8)" + in(path),
                    element_type(type) + " (type " + std::to_string(type) + ")");
  }
  std::vector<std::int64_t> shape;
  for (unsigned i = 0; i < dimensions; ++i) {
    next();
    std::int64_t size = 0;
    for (const unsigned char byte : bytes) size = 256 * size + byte;
    shape.push_back(size);
  }
  return shape;
}

// The product of the sizes; FileError above the limit, before it can overflow.
std::int64_t count_elements(const std::vector<std::int64_t>& shape, std::int64_t limit,
                            const std::filesystem::path& path) {
  std::int64_t count = 1;
  for (const std::int64_t size : shape) {
    if (size == 0) continue;  // strides are products of the others
    if (size > limit / count) {
      throw FileError(kIdx, "at most " + std::to_string(limit) + " bytes of data" + in(path),
                      c10::str("sizes ", at::IntArrayRef(shape)), "is the header corrupt?");
    }
    count *= size;
  }
  const bool is_empty = std::find(shape.begin(), shape.end(), 0) != shape.end();
  return is_empty ? 0 : count;
}

}  // namespace

at::Tensor read_idx(const std::filesystem::path& path, std::int64_t max_bytes) {
  ByteSource source(path, kIdx);
  const std::vector<std::int64_t> shape = read_header(source, path);
  const std::int64_t count = count_elements(shape, max_bytes, path);
  const auto truncated = [&](const std::string& came) {
    throw FileError(kIdx, std::to_string(count) + " bytes of data" + in(path), came,
                    c10::str("its header says ", at::IntArrayRef(shape), ": copy the file again"));
  };
  if (static_cast<std::uint64_t>(count) > source.most_bytes()) {
    truncated("a file that can hold " + std::to_string(source.most_bytes()) + " at most");
  }

  const at::Tensor data = read_at_most(source, count);
  if (data.numel() < count) truncated(std::to_string(data.numel()));
  // Reading to the end also makes zlib check the checksum of the data.
  unsigned char more = 0;
  if (source.read(&more, 1) != 0) {
    throw FileError(kIdx, std::to_string(count) + " bytes of data" + in(path), "more",
                    c10::str("its header says ", at::IntArrayRef(shape)));
  }
  return data.view(shape);
}

}  // namespace semitone::zoo

#include "semitone/zoo/text.h"

#include "semitone/core/error.h"
#include "src/zoo/byte_source.h"
#include "src/zoo/data_limit.h"

#include <c10/util/StringUtil.h>
#include <torch/types.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <limits>
#include <vector>

namespace semitone::zoo {
namespace {

constexpr auto kText = "zoo.text";
constexpr std::size_t kBytes = 256;

[[noreturn]] void refuse(const std::filesystem::path& file, std::int64_t max_bytes,
                         const std::string& got) {
  throw DataLimitError(kText,
                       c10::str("a text of at most ", max_bytes, " bytes in '", file.string(), "'"),
                       got, "raise max_bytes, or use a part of it");
}

at::Tensor read_bytes(const std::filesystem::path& file, std::int64_t max_bytes) {
  ByteSource source(file, kText);
  // The size of a plain file is known before a gigabyte of it is read.
  if (!source.is_gzipped() && source.most_bytes() > static_cast<std::uint64_t>(max_bytes))
    refuse(file, max_bytes, c10::str(source.most_bytes(), " bytes"));
  const auto bound = static_cast<std::int64_t>(std::min<std::uint64_t>(
      source.most_bytes(), static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())));
  const auto limit = std::min(bound, max_bytes);
  at::Tensor bytes = read_at_most(source, limit);
  // Reading to the end also makes zlib check the checksum of the data.
  unsigned char more = 0;
  if (source.read(&more, 1) != 0) {
    if (bound >= max_bytes) refuse(file, max_bytes, "a longer one");
    throw FileError(kText, c10::str("a text of at most ", limit, " bytes in '", file.string(), "'"),
                    "a longer one", "read a copy: the file grows, or does not state its size");
  }
  if (bytes.numel() == 0)
    throw FileError(kText, "a text in '" + file.string() + "'", "an empty gzip stream");
  return bytes;
}

// What to look up a byte's token in; -1 for bytes that are not in the vocabulary.
std::array<int, kBytes> places_of(std::string_view vocabulary) {
  std::array<int, kBytes> places{};
  places.fill(-1);
  for (std::size_t i = 0; i < vocabulary.size(); ++i)
    places.at(static_cast<unsigned char>(vocabulary[i])) = static_cast<int>(i);
  return places;
}

}  // namespace

at::Tensor Text::encode(std::string_view text) const {
  const auto places = places_of(vocabulary);
  at::Tensor result = torch::empty({static_cast<std::int64_t>(text.size())}, torch::kByte);
  auto* const to = result.mutable_data_ptr<std::uint8_t>();
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    if (places.at(byte) < 0) {
      throw Error(kText, c10::str("bytes of the vocabulary, which has ", vocabulary.size()),
                  c10::str("byte ", unsigned{byte}, " at place ", i));
    }
    to[i] = static_cast<std::uint8_t>(places.at(byte));
  }
  return result;
}

std::string Text::decode(const at::Tensor& numbers) const {
  if (!numbers.defined() || !c10::isIntegralType(numbers.scalar_type(), /*includeBool=*/false)) {
    throw Error(kText, "tokens as integers",
                numbers.defined() ? c10::str(numbers.scalar_type()) : "no tensor");
  }
  const at::Tensor flat = numbers.detach().to(torch::kCPU, torch::kLong).contiguous();
  const auto* const from = flat.const_data_ptr<std::int64_t>();
  std::string result;
  result.reserve(static_cast<std::size_t>(flat.numel()));
  for (std::int64_t i = 0; i < flat.numel(); ++i) {
    if (from[i] < 0 || from[i] >= classes()) {
      throw Error(kText, c10::str("tokens from 0 to ", classes() - 1),
                  c10::str(from[i], " at place ", i));
    }
    result += vocabulary[static_cast<std::size_t>(from[i])];
  }
  return result;
}

Text load_text(const std::filesystem::path& file, std::int64_t max_bytes) {
  if (max_bytes < 1) throw Error(kText, "max_bytes of at least 1", std::to_string(max_bytes));
  at::Tensor tokens = read_bytes(file, max_bytes);
  auto* const begin = tokens.mutable_data_ptr<std::uint8_t>();
  auto* const end = begin + tokens.numel();
  std::array<bool, kBytes> occurs{};
  std::for_each(begin, end, [&](std::uint8_t byte) { occurs.at(byte) = true; });
  std::string vocabulary;
  for (std::size_t byte = 0; byte < kBytes; ++byte)
    if (occurs.at(byte)) vocabulary += static_cast<char>(byte);
  const auto places = places_of(vocabulary);
  std::transform(begin, end, begin,
                 [&](std::uint8_t byte) { return static_cast<std::uint8_t>(places.at(byte)); });
  return {std::move(tokens), std::move(vocabulary)};
}

}  // namespace semitone::zoo

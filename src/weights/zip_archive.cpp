#include "src/weights/zip_archive.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

namespace semitone::weights {
namespace {

// A record takes some 100 bytes of the directory.
constexpr std::uint64_t kMaxDirectory = 100'000'000;
constexpr std::uint64_t kMaxComment = 0xFFFF;
// What a field holds if its value is in the fields for 64 bits.
constexpr std::uint64_t kSaturated = 0xFFFFFFFF;

constexpr std::string_view kLocalHeader = "PK\x03\x04";
constexpr std::string_view kEntry = "PK\x01\x02";
constexpr std::string_view kEnd = "PK\x05\x06";
constexpr std::string_view kEnd64 = "PK\x06\x06";
constexpr std::string_view kEnd64Locator = "PK\x06\x07";
constexpr std::size_t kLocalHeaderSize = 30;
constexpr std::size_t kEntrySize = 46;
constexpr std::size_t kEndSize = 22;
constexpr std::size_t kEnd64Size = 56;
constexpr std::size_t kEnd64LocatorSize = 20;

// An integer of the format, the lowest byte first. The text must be long enough.
template <typename T>
T number_at(std::string_view text, std::size_t position) {
  T number{};
  std::memcpy(&number, text.data() + position, sizeof(T));
  return number;
}

// Where the directory is, and how many records it has.
struct DirectoryPlace {
  std::uint64_t begin;
  std::uint64_t size;
  std::uint64_t count;
};

struct DirectoryEntry {
  std::string name;
  std::uint64_t header;  // the place of its local header
  std::uint64_t stored;  // bytes in the file
  std::uint64_t size;    // bytes when unpacked
  std::uint16_t flags;
  std::uint16_t method;
};

class Directory {
 public:
  explicit Directory(const InputFile& file) : file_(file) {}

  std::vector<DirectoryEntry> read() {
    place_ = find();
    if (place_.size > kMaxDirectory || place_.count > place_.size / kEntrySize)
      refuse("a directory of at most 100 MB", "a larger one");
    const std::string text = file_.read(place_.begin, place_.size);
    std::string_view rest = text;
    std::vector<DirectoryEntry> entries;
    entries.reserve(place_.count);
    while (entries.size() < place_.count) entries.push_back(next(rest));
    if (!rest.empty()) refuse("as many records as it states", "more");
    return entries;
  }

  // The first byte of a record, behind its local header, which must have the entry's name.
  std::uint64_t begin_of(const DirectoryEntry& entry) const {
    const std::size_t named = kLocalHeaderSize + entry.name.size();
    require_room(entry, entry.header, named);
    const std::string header = file_.read(entry.header, named);
    const std::string_view text = header;
    if (!text.starts_with(kLocalHeader) ||
        number_at<std::uint16_t>(text, 26) != entry.name.size() ||
        text.substr(kLocalHeaderSize) != entry.name)
      refuse("the header of record '" + entry.name + "'", "another one");
    const std::uint64_t begin = entry.header + named + number_at<std::uint16_t>(text, 28);
    require_room(entry, begin, entry.stored);
    return begin;
  }

  [[noreturn]] void refuse(const std::string& expected, const std::string& got) const {
    file_.refuse("a ZIP archive with " + expected, got);
  }

 private:
  // Throws unless that many bytes lie before the directory.
  void require_room(const DirectoryEntry& entry, std::uint64_t begin, std::uint64_t size) const {
    if (begin <= place_.begin && size <= place_.begin - begin) return;
    refuse("record '" + entry.name + "' before its directory", "one outside");
  }

  DirectoryPlace find() const {
    const std::uint64_t tail = std::min(file_.size(), kEndSize + kMaxComment);
    const std::uint64_t from = file_.size() - tail;
    const std::string text = file_.read(from, tail);
    // The end record has a comment behind it, up to the end of the file.
    for (auto at = text.rfind(kEnd); at != std::string::npos; at = text.rfind(kEnd, at - 1)) {
      const std::string_view end = std::string_view(text).substr(at);
      if (end.size() >= kEndSize && number_at<std::uint16_t>(end, 20) == end.size() - kEndSize)
        return described_by(end, from + at);
      if (at == 0) break;
    }
    refuse("a directory at its end", "none");
  }

  // @param end     the end record
  // @param behind  its place: the directory lies before it
  DirectoryPlace described_by(std::string_view end, std::uint64_t behind) const {
    DirectoryPlace place{number_at<std::uint32_t>(end, 16), number_at<std::uint32_t>(end, 12),
                         number_at<std::uint16_t>(end, 10)};
    const bool is_large =
        place.count == 0xFFFF || place.size == kSaturated || place.begin == kSaturated;
    if (is_large) {
      if (behind < kEnd64LocatorSize) refuse("a directory at its end", "none");
      const std::string locator = file_.read(behind - kEnd64LocatorSize, kEnd64LocatorSize);
      behind = number_at<std::uint64_t>(locator, 8);
      if (!locator.starts_with(kEnd64Locator) || behind > file_.size() - kEnd64Size)
        refuse("a directory at its end", "none");
      const std::string end64 = file_.read(behind, kEnd64Size);
      if (!end64.starts_with(kEnd64)) refuse("a directory at its end", "none");
      place = {number_at<std::uint64_t>(end64, 48), number_at<std::uint64_t>(end64, 40),
               number_at<std::uint64_t>(end64, 32)};
    }
    if (place.begin > behind || place.size > behind - place.begin)
      refuse("a directory inside the file", "one outside");
    return place;
  }

  // Takes the next entry from the text.
  DirectoryEntry next(std::string_view& rest) const {
    if (rest.size() < kEntrySize || !rest.starts_with(kEntry))
      refuse("as many records as it states", "fewer");
    const std::size_t name = number_at<std::uint16_t>(rest, 28);
    const std::size_t extra = number_at<std::uint16_t>(rest, 30);
    const std::size_t comment = number_at<std::uint16_t>(rest, 32);
    if (name + extra + comment > rest.size() - kEntrySize)
      refuse("a whole directory", "one that ends early");
    DirectoryEntry entry{
        std::string(rest.substr(kEntrySize, name)), number_at<std::uint32_t>(rest, 42),
        number_at<std::uint32_t>(rest, 20),         number_at<std::uint32_t>(rest, 24),
        number_at<std::uint16_t>(rest, 8),          number_at<std::uint16_t>(rest, 10)};
    read_large_fields(entry, rest.substr(kEntrySize + name, extra));
    rest.remove_prefix(kEntrySize + name + extra + comment);
    return entry;
  }

  // The values that do not fit into 32 bits are in an extra field, in this order.
  void read_large_fields(DirectoryEntry& entry, std::string_view extra) const {
    std::string_view values = large_values(extra);
    for (std::uint64_t* const field : {&entry.size, &entry.stored, &entry.header}) {
      if (*field != kSaturated) continue;
      if (values.size() < sizeof(std::uint64_t))
        refuse("the size and place of record '" + entry.name + "'", "none");
      *field = number_at<std::uint64_t>(values, 0);
      values.remove_prefix(sizeof(std::uint64_t));
    }
  }

  static std::string_view large_values(std::string_view extra) {
    constexpr std::uint16_t kLargeValues = 1;
    while (extra.size() >= 4) {
      const auto kind = number_at<std::uint16_t>(extra, 0);
      const std::size_t size = number_at<std::uint16_t>(extra, 2);
      extra.remove_prefix(4);
      if (kind == kLargeValues) return extra.substr(0, size);
      extra.remove_prefix(std::min(size, extra.size()));
    }
    return {};
  }

  const InputFile& file_;
  DirectoryPlace place_{};
};

// The folder of all records, "archive/": that of the first.
std::string folder_of(const std::vector<DirectoryEntry>& entries) {
  if (entries.empty()) return {};
  const std::string& first = entries.front().name;
  return first.substr(0, first.find('/') + 1);
}

}  // namespace

ZipArchive::ZipArchive(const InputFile& file) : file_(file) {
  Directory directory(file);
  const std::vector<DirectoryEntry> entries = directory.read();
  const std::string folder = folder_of(entries);
  std::vector<std::pair<std::uint64_t, std::uint64_t>> taken;  // from the local headers on
  for (const DirectoryEntry& entry : entries) {
    const std::uint64_t begin = directory.begin_of(entry);
    taken.emplace_back(entry.header, begin + entry.stored);
    constexpr std::uint16_t kEncrypted = 1;
    const bool is_plain = entry.method == 0 && (entry.flags & kEncrypted) == 0;
    if (is_plain && entry.stored != entry.size)
      directory.refuse("one size of record '" + entry.name + "'", "two");
    if (!entry.name.starts_with(folder)) continue;
    const Record record{begin, entry.size, is_plain};
    if (!records_.emplace(entry.name.substr(folder.size()), record).second)
      directory.refuse("each record once", "'" + entry.name + "' twice");
  }
  std::sort(taken.begin(), taken.end());
  for (std::size_t i = 1; i < taken.size(); ++i) {
    if (taken[i].first < taken[i - 1].second)
      directory.refuse("records one after the other", "records that overlap");
  }
}

const ZipArchive::Record& ZipArchive::find(const std::string& name) const {
  const auto found = records_.find(name);
  if (found == records_.end()) file_.refuse("a record '" + name + "'", "none");
  if (!found->second.is_plain) {
    file_.refuse("a record '" + name + "' as torch.save writes it", "a compressed or encrypted one",
                 "save the file again in Python");
  }
  return found->second;
}

std::uint64_t ZipArchive::size_of(const std::string& name) const {
  return find(name).size;
}

void ZipArchive::read(const std::string& name, void* buffer) const {
  const Record& record = find(name);
  file_.read(record.begin, buffer, record.size);
}

std::string ZipArchive::text(const std::string& name, std::uint64_t limit,
                             std::string_view remedy) const {
  const Record& record = find(name);
  if (record.size > limit) {
    file_.refuse("at most " + std::to_string(limit) + " bytes of '" + name + "'",
                 std::to_string(record.size), remedy);
  }
  return file_.read(record.begin, record.size);
}

}  // namespace semitone::weights

#include "src/weights/safetensors.h"

#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "src/core/utf8.h"
#include "src/weights/dtype_names.h"
#include "src/weights/tensor_bytes.h"

#include <ATen/ops/empty.h>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <set>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

namespace semitone::weights {
namespace {

using Json = nlohmann::json;

static_assert(std::endian::native == std::endian::little, "the format's numbers are little-endian");

constexpr std::uint64_t kSizeBytes = 8;
constexpr std::uint64_t kMaxHeader = 100'000'000;  // the limit of the format's own reader
// A million tensors of four dimensions. A value takes up to 50 times the memory of its text.
constexpr std::size_t kMaxValues = 8'000'000;
// Of fields that the format does not have: its own are three deep.
constexpr int kMaxNesting = 20;
constexpr auto kMetadata = "__metadata__";

constexpr auto kDtypes = std::to_array<DtypeName>({
    {"F64", at::kDouble},
    {"F32", at::kFloat},
    {"F16", at::kHalf},
    {"BF16", at::kBFloat16},
    {"F8_E4M3", at::kFloat8_e4m3fn},
    {"F8_E5M2", at::kFloat8_e5m2},
    {"C64", at::kComplexFloat},
    {"I64", at::kLong},
    {"I32", at::kInt},
    {"I16", at::kShort},
    {"I8", at::kChar},
    {"U64", at::kUInt64},
    {"U32", at::kUInt32},
    {"U16", at::kUInt16},
    {"U8", at::kByte},
    {"BOOL", at::kBool},
});

// An entry of the header.
struct Entry {
  std::string name;
  c10::ScalarType dtype;
  std::vector<std::int64_t> sizes;
  std::uint64_t begin;
  std::uint64_t end;
};

// Refuses a header while it is parsed.
class HeaderCheck {
 public:
  explicit HeaderCheck(const InputFile& file) : file_(file) {}

  bool operator()(int depth, Json::parse_event_t event, const Json& value) {
    if (depth > kMaxNesting) file_.refuse("a header of tensors", "values nested more than 20 deep");
    if (event != Json::parse_event_t::key) {
      if (++values_ > kMaxValues)
        file_.refuse("at most " + std::to_string(kMaxValues) + " values in the header", "more");
      return true;
    }
    if (depth == 1) fields_.clear();
    if (depth > 2) return true;
    const auto& key = value.get_ref<const std::string&>();
    if (!(depth == 1 ? names_ : fields_).insert(key).second)
      file_.refuse(depth == 1 ? "each tensor once" : "each field once", "'" + key + "' twice");
    return true;
  }

 private:
  const InputFile& file_;
  std::set<std::string> names_;   // of tensors
  std::set<std::string> fields_;  // of the current tensor
  std::size_t values_ = 0;
};

// The header as JSON.
Json parse_header(const InputFile& file, const std::string& text) {
  HeaderCheck check(file);
  Json header;
  try {
    header = Json::parse(text, [&](int depth, Json::parse_event_t event, Json& value) {
      return check(depth, event, value);
    });
  } catch (const Json::exception& error) {
    file.refuse("a header in JSON", error.what());
  }
  if (!header.is_object()) file.refuse("a header that is a JSON object", header.type_name());
  return header;
}

bool are_unsigned(const Json& values) {
  return values.is_array() && std::all_of(values.begin(), values.end(), [](const Json& value) {
           return value.is_number_unsigned();
         });
}

Entry entry_of(const InputFile& file, const std::string& name, const Json& value) {
  const auto wrong = [&](const std::string& expected) {
    file.refuse(expected + " for '" + name + "'", value.dump().substr(0, 200));
  };
  if (!value.is_object() || !value.contains("dtype") || !value.contains("shape") ||
      !value.contains("data_offsets"))
    wrong("dtype, shape and data_offsets");
  const auto& shape = value["shape"];
  const auto& offsets = value["data_offsets"];
  if (!value["dtype"].is_string()) wrong("a dtype");
  const auto dtype = dtype_named(kDtypes, value["dtype"].get<std::string>());
  if (!dtype.has_value()) wrong("a dtype that Semitone reads");
  if (!are_unsigned(shape) || shape.size() > kMaxDimensions) wrong("a shape");
  if (!are_unsigned(offsets) || offsets.size() != 2) wrong("two data_offsets");
  Entry entry{name, *dtype, shape.get<std::vector<std::int64_t>>(), offsets[0].get<std::uint64_t>(),
              offsets[1].get<std::uint64_t>()};
  const auto count = count_elements(entry.sizes);
  std::int64_t bytes = 0;
  if (!count.has_value() ||
      __builtin_mul_overflow(*count, static_cast<std::int64_t>(c10::elementSize(*dtype)), &bytes) ||
      entry.end < entry.begin || entry.end - entry.begin != static_cast<std::uint64_t>(bytes))
    wrong("data_offsets as far apart as the bytes of the shape");
  return entry;
}

// Throws unless the tensors fill the data exactly. Sorts them by their place.
void check_places(const InputFile& file, std::vector<Entry>& entries, std::uint64_t data_size) {
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
    return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
  });
  std::uint64_t place = 0;
  for (const Entry& entry : entries) {
    if (entry.begin != place) {
      file.refuse("'" + entry.name + "' to begin at byte " + std::to_string(place),
                  std::to_string(entry.begin));
    }
    place = entry.end;
  }
  if (place != data_size) {
    file.refuse(std::to_string(place) + " bytes of tensors behind the header",
                std::to_string(data_size));
  }
}

std::map<std::string, std::string> metadata_of(const InputFile& file, const Json& header) {
  std::map<std::string, std::string> metadata;
  if (!header.contains(kMetadata) || header[kMetadata].is_null()) return metadata;
  const Json& found = header[kMetadata];
  if (!found.is_object()) file.refuse("text under __metadata__", found.type_name());
  for (const auto& [key, value] : found.items()) {
    if (!value.is_string()) file.refuse("text under __metadata__", value.type_name());
    metadata.emplace(key, value.get<std::string>());
  }
  return metadata;
}

}  // namespace

Contents read_safetensors(const InputFile& file) {
  std::uint64_t header_size = 0;
  file.read(0, &header_size, kSizeBytes);
  const std::uint64_t rest = file.size() - kSizeBytes;
  if (header_size > std::min(kMaxHeader, rest)) {
    file.refuse("a header of at most " + std::to_string(std::min(kMaxHeader, rest)) + " bytes",
                std::to_string(header_size));
  }
  const Json header = parse_header(file, file.read(kSizeBytes, header_size));
  std::vector<Entry> entries;
  for (const auto& [name, value] : header.items()) {
    if (name != kMetadata) entries.push_back(entry_of(file, name, value));
  }
  check_places(file, entries, rest - header_size);

  Contents contents;
  contents.format = Format::safetensors;
  contents.metadata = metadata_of(file, header);
  for (const Entry& entry : entries) {
    at::Tensor tensor = at::empty(entry.sizes, at::TensorOptions(entry.dtype));
    file.read(kSizeBytes + header_size + entry.begin, tensor.mutable_data_ptr(), tensor.nbytes());
    if (entry.dtype == at::kBool && !are_bools(tensor.const_data_ptr(), tensor.nbytes()))
      file.refuse("bytes of 0 or 1 for '" + entry.name + "'", "others");
    contents.tensors.insert(entry.name, std::move(tensor));
  }
  return contents;
}

void write_safetensors(const StateDict& tensors, const std::map<std::string, std::string>& metadata,
                       const WritePiece& write) {
  // Wide elements first, as the format's own writer: then every tensor begins at a multiple of its
  // element's size.
  std::vector<const StateDict::Item*> order;
  for (const std::int64_t size : {16, 8, 4, 2, 1}) {
    for (const auto& item : tensors) {
      if (item.value().element_size() == size) order.push_back(&item);
    }
  }
  for (const auto& [key, value] : metadata) {
    if (!is_utf8(key) || !is_utf8(value))
      throw Error(kWrite, "metadata in UTF-8", "'" + key + "': '" + value + "'");
  }
  Json all_metadata(metadata);
  all_metadata["format"] = "pt";
  std::string text = "{" + Json(kMetadata).dump() + ":" + all_metadata.dump();
  std::uint64_t place = 0;
  for (const auto* item : order) {
    const at::Tensor& tensor = item->value();
    const auto dtype = name_in(kDtypes, tensor.scalar_type());
    if (!dtype.has_value()) {
      throw Error(kWrite, "a dtype that safetensors has for '" + item->key() + "'",
                  dtype_name(tensor.scalar_type()));
    }
    if (item->key() == kMetadata) throw Error(kWrite, "another name for a tensor", kMetadata);
    const std::uint64_t end = place + static_cast<std::uint64_t>(tensor.numel()) *
                                          static_cast<std::uint64_t>(tensor.element_size());
    const Json entry = {
        {"dtype", *dtype}, {"shape", tensor.sizes().vec()}, {"data_offsets", {place, end}}};
    text += "," + Json(item->key()).dump() + ":" + entry.dump();
    place = end;
  }
  text += '}';
  text.resize((text.size() + 7) / 8 * 8, ' ');
  const std::uint64_t size = text.size();
  std::array<char, kSizeBytes> size_bytes{};
  std::memcpy(size_bytes.data(), &size, kSizeBytes);
  write({size_bytes.data(), size_bytes.size()});
  write(text);
  for (const auto* item : order) write(bytes_of(contiguous_on_cpu(item->value())));
}

}  // namespace semitone::weights

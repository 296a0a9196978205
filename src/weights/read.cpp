#include "semitone/core/error.h"
#include "semitone/weights/file.h"
#include "src/weights/input_file.h"
#include "src/weights/python_file.h"
#include "src/weights/safetensors.h"
#include "src/weights/tensor_bytes.h"

#include <algorithm>
#include <array>
#include <string>
#include <string_view>

// Recognises the format of a file of weights.

namespace semitone::weights {
namespace {

constexpr std::string_view kSaveAgain =
    "save the weights in Python with safetensors.torch.save_file";

// The first bytes of files that people take for weights.
struct Signature {
  std::string_view bytes;
  std::string_view format;
  std::string_view remedy = kSaveAgain;
};

constexpr std::array<Signature, 10> kOtherFormats{{
    {"version https://git-lfs", "a pointer of Git LFS", "get the file itself with git lfs pull"},
    {"<", "a web page", "download the file itself; the site may require a login"},
    {"\x89HDF", "HDF5, such as Keras writes"},
    {"GGUF", "GGUF"},
    {"\x93NUMPY", "an array of NumPy (.npy)"},
    {"\x1f\x8b", "a gzipped file", "unpack it with gunzip"},
    {"\x28\xb5\x2f\xfd", "a file packed by zstd", "unpack it with unzstd"},
    {"\x08", "ONNX"},
    {"\x80", "a pickle that torch.save did not write"},
    {"PK", "an empty or damaged ZIP archive"},
}};

constexpr std::size_t kFirstBytes = 32;

}  // namespace

Contents read(const std::filesystem::path& path, const ReadOptions& options) {
  const InputFile file(path);
  const std::string first = file.read(0, std::min<std::uint64_t>(file.size(), kFirstBytes));
  if (first.starts_with("PK\x03\x04")) return read_archive(file, options.entry());
  if (begins_as_legacy(first)) return read_legacy(file, options.entry());
  if (first.size() > 8 && first[8] == '{') {
    if (!options.entry().empty()) {
      throw FileError(kRead, "an entry '" + options.entry() + "'" + file.in(),
                      "safetensors, which have no entries", "leave the entry out");
    }
    return read_safetensors(file);
  }
  const std::string expected = "safetensors, or a file of torch.save";
  if (first.empty()) file.refuse(expected, "an empty file");
  const auto* const other =
      std::find_if(kOtherFormats.begin(), kOtherFormats.end(),
                   [&](const auto& signature) { return first.starts_with(signature.bytes); });
  if (other == kOtherFormats.end()) file.refuse(expected, "another format", kSaveAgain);
  file.refuse(expected, std::string(other->format), other->remedy);
}

}  // namespace semitone::weights

#include "semitone/weights/file.h"

#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "src/core/file.h"
#include "src/weights/cast.h"
#include "src/weights/input_file.h"
#include "src/weights/python_file.h"
#include "src/weights/safetensors.h"
#include "src/weights/tensor_bytes.h"

#include <algorithm>
#include <array>
#include <utility>

namespace semitone::weights {
namespace {

struct Beginning {
  std::string_view bytes;
  std::string_view format;
};

// Files that people take for weights.
constexpr std::array<Beginning, 9> kOtherFormats{{
    {"version https://git-lfs", "a pointer of Git LFS: get the file itself with git lfs pull"},
    {"<", "a web page: the download needs a login"},
    {"\x89HDF", "HDF5, such as Keras writes"},
    {"GGUF", "GGUF"},
    {"\x93NUMPY", "an array of NumPy"},
    {"\x1f\x8b", "a gzipped file: unpack it first"},
    {"\x28\xb5\x2f\xfd", "a file packed by zstd: unpack it first"},
    {"\x08", "ONNX"},
    {"\x80", "a pickle that torch.save did not write"},
}};

constexpr std::size_t kFirstBytes = 32;

Contents read_any(const InputFile& file, const ReadOptions& options) {
  const std::string first = file.read(0, std::min<std::uint64_t>(file.size(), kFirstBytes));
  if (first.starts_with("PK\x03\x04")) return read_archive(file, options.entry());
  if (begins_as_row_of_pickles(first)) return read_row_of_pickles(file, options.entry());
  if (first.size() > 8 && first[8] == '{') {
    if (!options.entry().empty()) {
      throw FileError(kRead, "an entry '" + options.entry() + "'" + file.in(),
                      "safetensors, which have no entries", "leave the entry out");
    }
    return read_safetensors(file);
  }
  const auto* const other =
      std::find_if(kOtherFormats.begin(), kOtherFormats.end(),
                   [&](const auto& format) { return first.starts_with(format.bytes); });
  const std::string got = first.empty()                  ? "an empty file"
                          : other != kOtherFormats.end() ? std::string(other->format)
                                                         : "another format";
  throw FileError(kRead, "safetensors, or a file of torch.save" + file.in(), got,
                  "save the weights in Python with safetensors.torch.save_file");
}

Format format_for(const std::filesystem::path& path, const SaveOptions& options) {
  const auto refuse = [](const std::string& expected, const std::string& got) {
    throw Error(kWrite, expected, got, "set options.format(weights::Format::safetensors)");
  };
  if (options.format() == Format::torchscript)
    refuse("the format safetensors or pytorch", "torchscript");
  if (options.format().has_value()) return *options.format();
  const std::string extension = path.extension();
  if (extension == ".safetensors") return Format::safetensors;
  if (extension != ".pt" && extension != ".pth" && extension != ".bin")
    refuse("a name that ends in .safetensors, .pt, .pth or .bin", "'" + path.string() + "'");
  return Format::pytorch;
}

// The tensors in the dtype of the file; Error for what no file can hold.
StateDict prepared(const StateDict& tensors, const SaveOptions& options) {
  StateDict ready;
  for (const auto& item : tensors) {
    const at::Tensor& tensor = item.value();
    if (!tensor.defined() || tensor.layout() != at::kStrided || tensor.is_quantized() ||
        tensor.is_meta()) {
      throw Error(kWrite, "a dense tensor for '" + item.key() + "'",
                  !tensor.defined()       ? "an undefined one"
                  : tensor.is_quantized() ? "a quantised one"
                  : tensor.is_meta()      ? "one on the meta device"
                                          : "a sparse one");
    }
    const bool cast = options.dtype().has_value() && at::isFloatingType(tensor.scalar_type());
    ready.insert(
        item.key(),
        cast ? cast_without_overflow<Error>(tensor, *options.dtype(), kWrite, item.key()) : tensor);
  }
  return ready;
}

}  // namespace

std::string_view name_of(Format format) {
  switch (format) {
    case Format::safetensors:
      return "safetensors";
    case Format::pytorch:
      return "pytorch";
    case Format::torchscript:
      return "torchscript";
  }
  throw Error("weights.name_of", "a format", std::to_string(static_cast<int>(format)));
}

Contents read(const std::filesystem::path& path, const ReadOptions& options) {
  return read_any(InputFile(path), options);
}

void write(const std::filesystem::path& path, const StateDict& tensors,
           const SaveOptions& options) {
  const Format format = format_for(path, options);
  if (options.dtype().has_value() && !at::isFloatingType(*options.dtype()))
    throw Error(kWrite, "a floating-point dtype", dtype_name(*options.dtype()));
  if (format != Format::safetensors && !options.metadata().empty()) {
    throw Error(kWrite, "no metadata for the format pytorch",
                std::to_string(options.metadata().size()) + " entries", "write safetensors");
  }
  const StateDict ready = prepared(tensors, options);
  const auto produce = [&](const WritePiece& write_piece) {
    if (format == Format::safetensors) {
      write_safetensors(ready, options.metadata(), write_piece);
    } else {
      write_archive(ready, write_piece);
    }
  };
  write_file(path, produce, kWrite);
}

void save(const amp::Model& model, const std::filesystem::path& path, const SaveOptions& options) {
  write(path, state_dict(model), options);
}

UnmatchedNames load(const amp::Model& model, const std::filesystem::path& path,
                    const LoadOptions& options) {
  const Contents contents = read(path, ReadOptions().entry(options.entry()));
  return load_state_dict(model, contents.tensors, options);
}

}  // namespace semitone::weights

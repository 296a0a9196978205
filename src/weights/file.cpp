#include "semitone/weights/file.h"

#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "src/core/file.h"
#include "src/core/utf8.h"
#include "src/weights/cast.h"
#include "src/weights/file_names.h"
#include "src/weights/load.h"
#include "src/weights/python_file.h"
#include "src/weights/safetensors.h"
#include "src/weights/tensor_bytes.h"

#include <string>
#include <utility>

namespace semitone::weights {
namespace {

Format format_for(const std::filesystem::path& path, const SaveOptions& options) {
  const auto refuse = [](const std::string& expected, const std::string& got) {
    throw Error(kWrite, expected, got, "set options.format(weights::Format::safetensors)");
  };
  if (options.format() == Format::torchscript)
    refuse("the format safetensors or pytorch", "torchscript");
  if (options.format().has_value()) return *options.format();
  const auto format = format_of_name(path);
  if (!format.has_value())
    refuse(std::string("a name that ends in ") + kFileNames, "'" + path.string() + "'");
  return *format;
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
    // Python could not read the file otherwise.
    if (!is_utf8(item.key()))
      throw Error(kWrite, "names of tensors in UTF-8", "'" + item.key() + "'");
    const bool cast = options.dtype().has_value() && at::isFloatingType(tensor.scalar_type());
    ready.insert(item.key(), cast ? checked_cast<Error>(tensor, *options.dtype(), kWrite,
                                                        "'" + item.key() + "'")
                                  : tensor);
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
  return load_values(model, contents.tensors, options, "weights.load",
                     " in '" + path.string() + "'");
}

}  // namespace semitone::weights

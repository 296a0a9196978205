#pragma once

#include "semitone/autocast/model.h"
#include "semitone/weights/state_dict.h"

#include <c10/core/ScalarType.h>
#include <torch/arg.h>

#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>

namespace semitone::weights {

/// The format of a file of weights.
enum class Format {
  safetensors,  ///< a JSON header and the tensors' bytes: https://github.com/huggingface/safetensors
  pytorch,      ///< Python's `torch.save(model.state_dict(), path)`, also from before PyTorch 1.6
  torchscript,  ///< a TorchScript module, or what LibTorch's `torch::save` writes of a model
};

/// "safetensors", "pytorch" or "torchscript".
std::string_view name_of(Format format);

/// What a file holds.
struct Contents {
  Format format;
  StateDict tensors;                            ///< on the CPU
  std::map<std::string, std::string> metadata;  ///< safetensors' `__metadata__`
};

class ReadOptions {
 public:
  /// Which part of a Python file to read. Training programs often save a dict of several things,
  /// `{"state_dict": …, "optimizer": …, "epoch": 3}`: "state_dict" reads the first of them, and
  /// "a.b" what is under "b" in "a". Default: empty, the whole file, which must then be a state
  /// dict itself.
  TORCH_ARG(std::string, entry);
};

/// Reads a file of weights. Its first bytes tell the format; the name does not matter.
///
/// **Nothing in the file is executed.** A Python file is a pickle, which in Python can call any
/// function. Here its instructions build tensors, numbers, text and containers only; objects of
/// other classes are skipped. The code of TorchScript modules is not run either. The sizes of
/// tensors are checked against the size of the file before memory is allocated. Tensors that repeat
/// elements of their storage (of Python's expand(), with a stride of 0) may have 2^24 elements
/// together. Checksums inside ZIP archives are not compared, as in PyTorch.
///
/// FileError if the file cannot be read, has another format (the message says which, if it is a
/// known one), is truncated or corrupt, or holds tensors that are sparse, quantised or packed by a
/// TorchScript module's `__getstate__` in the part that is read. Other parts may have such tensors.
Contents read(const std::filesystem::path& path, const ReadOptions& options = {});

class SaveOptions {
 public:
  /// safetensors or pytorch. Default: safetensors for the name NAME.safetensors, pytorch for
  /// NAME.pt, .pth and .bin; Error for other names.
  TORCH_ARG(std::optional<Format>, format);
  /// The dtype of all floating-point tensors in the file. Default: unset, as state_dict() returns
  /// them: fp32 where the model computes in 16 bits.
  TORCH_ARG(std::optional<c10::ScalarType>, dtype);
  /// Text for safetensors' `__metadata__`, beside "format": "pt", which Python's readers expect.
  /// Error for other formats.
  using Metadata = std::map<std::string, std::string>;
  TORCH_ARG(Metadata, metadata);
};

/// Writes tensors to a file that Python reads: `safetensors.torch.load_file(path)`, or
/// `torch.load(path)`, whose default `weights_only=True` accepts it. The file is complete or not
/// there; an existing one is replaced. Needs the memory of one more tensor. With
/// options.dtype() it needs that of the cast tensors too, and up to 24 bytes for each element of the
/// largest tensor, on its device, to look for values that the cast would lose.
///
/// Error if a tensor is sparse, quantised or has no values, if its dtype has no name in the format
/// (complex128 in safetensors), or if a finite value would be infinite in options.dtype(). FileError
/// if the file cannot be written.
void write(const std::filesystem::path& path, const StateDict& tensors,
           const SaveOptions& options = {});

/// Writes `state_dict(model)`.
void save(const amp::Model& model, const std::filesystem::path& path,
          const SaveOptions& options = {});

/// Reads a file into a model: `read`, then `load_state_dict`.
///
///     weights::load(model, "resnet50.safetensors");
///     weights::load(model, "checkpoint.pth", weights::LoadOptions().entry("state_dict"));
UnmatchedNames load(const amp::Model& model, const std::filesystem::path& path,
                    const LoadOptions& options = {});

}  // namespace semitone::weights

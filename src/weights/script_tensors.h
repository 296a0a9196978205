#pragma once

// Internal interface: other rooms include this header.

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <string>
#include <unordered_map>
#include <unordered_set>

namespace semitone::weights {

// Reads those tensors of a TorchScript file that have one of these names, on the CPU. What else the
// file has, of any kind, is skipped. Tensors that repeat elements of their storage may have any
// size. FileError as weights::read.
std::unordered_map<std::string, at::Tensor> read_script_tensors(
    const std::filesystem::path& path, const std::unordered_set<std::string>& names);

}  // namespace semitone::weights

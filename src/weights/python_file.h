// Files of Python's torch.save, and of LibTorch's torch::save and TorchScript, which have the same
// container: a ZIP archive with a pickle and a record for each storage. PyTorch's legacy format,
// from before 1.6, is a row of pickles with the storages behind them.

#pragma once

#include "semitone/weights/file.h"
#include "src/core/file.h"
#include "src/weights/input_file.h"

#include <string>
#include <string_view>

namespace semitone::weights {

Contents read_archive(const InputFile& file, const std::string& entry);

Contents read_legacy(const InputFile& file, const std::string& entry);
// Whether a file begins as those do.
bool begins_as_legacy(std::string_view first_bytes);

// @param tensors  of any device and strides, dense
void write_archive(const StateDict& tensors, const WritePiece& write);

}  // namespace semitone::weights

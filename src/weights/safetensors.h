// The format of https://github.com/huggingface/safetensors: 8 bytes with the size of a header, the
// header in JSON, and the bytes of the tensors one after the other.

#pragma once

#include "semitone/weights/file.h"
#include "src/core/file.h"
#include "src/weights/input_file.h"

#include <map>
#include <string>

namespace semitone::weights {

// Throws FileError unless the file is as the format's documentation asks: a header of at most
// 100 MB, no key twice, the tensors' bytes without gaps or overlap up to the end of the file. Other
// fields of a tensor than dtype, shape and data_offsets are skipped, as by the format's own reader
// (safetensors 0.8).
Contents read_safetensors(const InputFile& file);

// @param tensors  of any device and strides, dense
void write_safetensors(const StateDict& tensors, const std::map<std::string, std::string>& metadata,
                       const WritePiece& write);

}  // namespace semitone::weights

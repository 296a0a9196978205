#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>

namespace semitone::zoo {

/// Reads an IDX file, the format of MNIST: a big-endian header (two zero bytes, the element type,
/// the number of dimensions, then each size as 32 bits) and the elements. The file may be gzipped,
/// which is detected from its content, not its name.
///
/// @param max_bytes  largest size of the data; larger data are an error. The function uses no more
///                   memory than the file has data for, whatever the header says. It reads at most
///                   one byte more than the header's sizes from a gzip stream, which may be
///                   endless.
/// @return           uint8, of the file's shape
/// FileError with the path, what was expected and what was found, for a file that is missing,
/// unreadable, empty, not in IDX format, truncated, or longer than its header says, for elements
/// that are not bytes, and for corrupt or truncated gzip.
at::Tensor read_idx(const std::filesystem::path& path,
                    std::int64_t max_bytes = std::int64_t{1} << 33);

}  // namespace semitone::zoo

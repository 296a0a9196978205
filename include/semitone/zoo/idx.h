#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>

namespace semitone::zoo {

/// Reads an IDX file, the format of MNIST: a big-endian header (two zero bytes, the element type,
/// the number of dimensions, then each size as 32 bits) and the elements, plain or gzipped. Which
/// of the two is told by the content, not by the name.
///
/// @param max_bytes  refuse data larger than this. Whatever the header asks for, no more memory is
///                   used than the file has data for, and a gzip stream that never ends is read no
///                   further than the header's sizes and one byte.
/// @return           uint8, of the file's shape
/// FileError with the path, what was expected and what came: missing, unreadable, empty, no IDX
/// file, elements that are no bytes, truncated, more data than the sizes say, corrupt or truncated
/// gzip.
at::Tensor read_idx(const std::filesystem::path& path,
                    std::int64_t max_bytes = std::int64_t{1} << 33);

}  // namespace semitone::zoo

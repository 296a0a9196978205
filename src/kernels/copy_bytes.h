#pragma once

#include <cstdint>
#include <span>

namespace semitone::kernels {

struct BytesToCopy {
  const void* from;
  void* to;
  std::int64_t count;
};

// Copies bytes between memories that do not overlap, on all threads, of which each copies the same
// number of bytes. For what will not be read soon: the copy is written past the caches, so that the
// processor need not read the cache lines that it writes. Of 218 MB that takes 13 to 16 ms, and
// memcpy 15 to 21 (medians; AMD EPYC, 2 cores).
void copy_bytes(std::span<const BytesToCopy> parts);

}  // namespace semitone::kernels

#pragma once

#include <cstdint>

namespace semitone::kernels {

// Copies bytes between memories that do not overlap, on all threads. For what will not be read soon:
// the copy is written past the caches. That takes 16 ms for 208 MB instead of memcpy's 20 on two
// cores (AMD EPYC, AVX2), since the processor then need not read the cache lines that it writes.
void copy_bytes(const void* from, void* to, std::int64_t count);

}  // namespace semitone::kernels

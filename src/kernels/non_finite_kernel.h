#pragma once

#include <cstddef>
#include <cstdint>

// The function on pointers behind non_finite.h.
namespace semitone::kernels {

// Whether (element & mask) == value for one of `size` unsigned integers of 1, 2, 4 or 8 bytes.
bool any_matches(const void* data, std::size_t size, std::size_t bytes, std::uint64_t mask,
                 std::uint64_t value);

}  // namespace semitone::kernels

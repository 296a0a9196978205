// The checks that every format of weights needs.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

namespace semitone::weights {

// The components in errors.
inline constexpr auto kRead = "weights.read";
inline constexpr auto kWrite = "weights.write";

// More sizes than any model has; formats allow any number.
inline constexpr std::size_t kMaxDimensions = 64;

// The number of elements, or nothing if a size is negative or the product exceeds int64.
std::optional<std::int64_t> count_elements(const std::vector<std::int64_t>& sizes);

// The number of elements that a storage must have for these sizes and strides, or nothing if one
// of them is negative or the number exceeds int64.
std::optional<std::int64_t> elements_spanned(std::int64_t offset,
                                             const std::vector<std::int64_t>& sizes,
                                             const std::vector<std::int64_t>& strides);

// Whether all bytes are 0 or 1, as C++ needs of a bool.
bool are_bools(const void* data, std::size_t bytes);

// The values of a tensor of any device and strides, in this order in memory.
at::Tensor contiguous_on_cpu(const at::Tensor& tensor);

// The bytes of a tensor that is contiguous and on the CPU.
std::string_view bytes_of(const at::Tensor& tensor);

}  // namespace semitone::weights

#include "src/weights/tensor_bytes.h"

#include <algorithm>

namespace semitone::weights {

std::optional<std::int64_t> count_elements(const std::vector<std::int64_t>& sizes) {
  std::int64_t count = 1;
  for (const std::int64_t size : sizes) {
    // LibTorch's strides are products of all sizes, with 1 for 0.
    const std::int64_t factor = std::max<std::int64_t>(size, 1);
    if (size < 0 || __builtin_mul_overflow(count, factor, &count)) return std::nullopt;
  }
  const bool is_empty = std::find(sizes.begin(), sizes.end(), 0) != sizes.end();
  return is_empty ? 0 : count;
}

std::optional<std::int64_t> elements_spanned(std::int64_t offset,
                                             const std::vector<std::int64_t>& sizes,
                                             const std::vector<std::int64_t>& strides) {
  if (offset < 0 || sizes.size() != strides.size()) return std::nullopt;
  bool is_empty = false;
  std::int64_t last = offset;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] < 0 || strides[i] < 0) return std::nullopt;
    if (sizes[i] == 0) {
      is_empty = true;
      continue;
    }
    std::int64_t step = 0;
    if (__builtin_mul_overflow(sizes[i] - 1, strides[i], &step)) return std::nullopt;
    if (__builtin_add_overflow(last, step, &last)) return std::nullopt;
  }
  if (is_empty) return 0;
  if (__builtin_add_overflow(last, std::int64_t{1}, &last)) return std::nullopt;
  return last;
}

bool are_bools(const void* data, std::size_t bytes) {
  const auto* first = static_cast<const unsigned char*>(data);
  return std::all_of(first, first + bytes, [](unsigned char byte) { return byte <= 1; });
}

at::Tensor contiguous_on_cpu(const at::Tensor& tensor) {
  return tensor.detach().to(at::kCPU).resolve_conj().resolve_neg().contiguous();
}

std::string_view bytes_of(const at::Tensor& tensor) {
  return {static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes()};
}

}  // namespace semitone::weights

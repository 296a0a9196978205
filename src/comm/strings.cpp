#include "src/comm/strings.h"

#include <torch/types.h>

#include <algorithm>
#include <cstring>

namespace semitone::comm {

at::Tensor to_bytes(std::string_view text, std::int64_t length) {
  at::Tensor bytes = at::zeros({length}, at::kByte);
  const auto used = std::min(text.size(), static_cast<std::size_t>(length));
  if (used > 0) std::memcpy(bytes.mutable_data_ptr(), text.data(), used);
  return bytes;
}

at::Tensor to_bytes(std::string_view text, c10::Device device) {
  return to_bytes(text, static_cast<std::int64_t>(text.size())).to(device);
}

void copy_bytes(const at::Tensor& bytes, char* to, std::size_t length) {
  const at::Tensor here = bytes.cpu();
  if (length > 0) std::memcpy(to, here.const_data_ptr(), length);
}

std::string to_string(const at::Tensor& bytes, std::int64_t length) {
  const at::Tensor here = bytes.cpu();
  return {static_cast<const char*>(here.const_data_ptr()), static_cast<std::size_t>(length)};
}

std::vector<std::string> gather_strings(
    const std::string& text, c10::Device device,
    const std::function<std::vector<at::Tensor>(const at::Tensor&)>& all_gather) {
  const auto lengths = all_gather(at::full({1}, static_cast<std::int64_t>(text.size()),
                                           at::TensorOptions(at::kLong).device(device)));
  std::vector<std::int64_t> sizes;
  sizes.reserve(lengths.size());
  for (const at::Tensor& length : lengths) sizes.push_back(length.item<std::int64_t>());
  const std::int64_t longest = *std::max_element(sizes.begin(), sizes.end());
  if (longest == 0) return std::vector<std::string>(sizes.size());
  const auto padded = all_gather(to_bytes(text, longest).to(device));
  std::vector<std::string> strings;
  strings.reserve(sizes.size());
  for (std::size_t rank = 0; rank < sizes.size(); ++rank) {
    strings.push_back(to_string(padded[rank], sizes[rank]));
  }
  return strings;
}

}  // namespace semitone::comm

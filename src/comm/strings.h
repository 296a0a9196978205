#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

// Strings as tensors, for transports that only carry tensors.
namespace semitone::comm {

// A uint8 tensor of this length that starts with the string; the rest is 0.
at::Tensor to_bytes(std::string_view text, std::int64_t length);
// A tensor of the string's own length, on a device.
at::Tensor to_bytes(std::string_view text, c10::Device device);
// Writes the first bytes of a uint8 tensor of any device.
void copy_bytes(const at::Tensor& bytes, char* to, std::size_t length);
// The first bytes of a uint8 tensor.
std::string to_string(const at::Tensor& bytes, std::int64_t length);

// Gathers every rank's string, of any length, by all_gather calls with tensors of one shape.
std::vector<std::string> gather_strings(
    const std::string& text, c10::Device device,
    const std::function<std::vector<at::Tensor>(const at::Tensor&)>& all_gather);

}  // namespace semitone::comm

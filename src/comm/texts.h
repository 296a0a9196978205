#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

// Texts as tensors, for transports that carry nothing else.
namespace semitone::comm {

// A uint8 tensor of this length that begins with the text; the rest is 0.
at::Tensor to_bytes(std::string_view text, std::int64_t length);
// One of the text's own length, on a device.
at::Tensor to_bytes(std::string_view text, c10::Device device);
// Writes the first bytes of a uint8 tensor of any device.
void copy_bytes(const at::Tensor& bytes, char* to, std::size_t length);
// The first bytes of a uint8 tensor.
std::string to_text(const at::Tensor& bytes, std::int64_t length);

// Every rank's text, of any length, by means of an all_gather for tensors of one shape.
std::vector<std::string> gather_texts(
    const std::string& text, c10::Device device,
    const std::function<std::vector<at::Tensor>(const at::Tensor&)>& all_gather);

}  // namespace semitone::comm

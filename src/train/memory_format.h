#pragma once

#include <c10/core/DeviceType.h>
#include <c10/core/MemoryFormat.h>

#include <string_view>

namespace semitone::train {

// The memory format of images and of the weights of convolutions.
enum class MemoryFormat { automatic, nchw, nhwc };

std::string_view name_of(MemoryFormat format);
// Parses "auto", "nchw" or "nhwc". Error for anything else.
MemoryFormat parse_memory_format(std::string_view name);

// Returns the format that automatic stands for: nhwc on every device. The ConvNet's convolutions
// use it without reordering, so that a step in 16 bits is about a fifth shorter; in fp32 both are
// equally fast.
MemoryFormat choose_memory_format(c10::DeviceType device);

// Returns a format as it is, or the device's choice for automatic.
MemoryFormat resolve(MemoryFormat format, c10::DeviceType device);

// LibTorch's type for the chosen format.
at::MemoryFormat layout_of(MemoryFormat format);

}  // namespace semitone::train

#include "src/train/memory_format.h"

#include "semitone/core/error.h"

#include <string>

namespace semitone::train {

std::string_view name_of(MemoryFormat format) {
  switch (format) {
    case MemoryFormat::nchw:
      return "nchw";
    case MemoryFormat::nhwc:
      return "nhwc";
    case MemoryFormat::automatic:
      break;
  }
  return "auto";
}

MemoryFormat parse_memory_format(std::string_view name) {
  for (const auto format : {MemoryFormat::automatic, MemoryFormat::nchw, MemoryFormat::nhwc}) {
    if (name == name_of(format)) return format;
  }
  throw Error("train.memory_format", "auto, nchw or nhwc", "'" + std::string(name) + "'");
}

MemoryFormat choose_memory_format(c10::DeviceType /*device*/) {
  return MemoryFormat::nhwc;
}

MemoryFormat resolve(MemoryFormat format, c10::DeviceType device) {
  return format == MemoryFormat::automatic ? choose_memory_format(device) : format;
}

at::MemoryFormat layout_of(MemoryFormat format) {
  return format == MemoryFormat::nhwc ? at::MemoryFormat::ChannelsLast
                                      : at::MemoryFormat::Contiguous;
}

}  // namespace semitone::train

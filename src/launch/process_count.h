#pragma once

#include <string>
#include <string_view>

namespace semitone::launch {

// The number of processes to run on this node.
struct ProcessCount {
  int count = 1;
  std::string reason;  // "one for each of 2 cores"; empty for an explicit number

  // Parses torchrun's syntax: a number, "gpu" (one for each GPU), "cpu" (one for each core that
  // this process may use), or "auto" ("gpu" if there is a GPU, otherwise "cpu"). Error for
  // anything else, and for "gpu" on a machine without a GPU.
  static ProcessCount parse(std::string_view text);
};

}  // namespace semitone::launch

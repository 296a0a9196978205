#pragma once

namespace semitone::launch {

constexpr int kMaxProcesses = 4096;  // of a node
constexpr int kMaxNodes = 1 << 16;   // of a job

}  // namespace semitone::launch

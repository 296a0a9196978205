#pragma once

namespace semitone::launch {

constexpr int kMaxProcesses = 4096;  // of a node
constexpr int kMaxNodes = 1 << 16;   // of a job
constexpr int kMaxStandbys = 64;     // nodes for which a job has no room

}  // namespace semitone::launch

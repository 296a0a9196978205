#pragma once

#include <string>

// The machine that a process runs on, for comparison between ranks.
namespace semitone::comm {

struct Machine {
  std::string host;     // its name
  std::string kernel;   // of the running kernel: two machines may have one name, as containers do
  std::string network;  // of the network namespace
};

// The machine of this process.
Machine this_machine();

// The fields as words, for sending; the later ones may be missing.
std::string to_string(const Machine& machine);
Machine parse_machine(const std::string& text);

// Whether the processes share GPUs and cores: the same host name and the same kernel.
bool are_same_machine(const Machine& one, const Machine& other);

// Whether they share a loopback interface.
bool share_loopback(const Machine& one, const Machine& other);

}  // namespace semitone::comm

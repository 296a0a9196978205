#pragma once

#include <string>

// Where a process runs, for the ranks to compare.
namespace semitone::comm {

struct Machine {
  std::string host;     // its name
  std::string kernel;   // of the running kernel: two machines may have one name, as containers do
  std::string network;  // of the network namespace
};

// That of this process.
Machine this_machine();

// Words, to send; the later ones may be missing.
std::string to_text(const Machine& machine);
Machine machine_from_text(const std::string& text);

// Whether their processes share GPUs and cores: one host name on one kernel.
bool are_same_machine(const Machine& one, const Machine& other);

// Whether the loopback interface of one is that of the other.
bool share_loopback(const Machine& one, const Machine& other);

}  // namespace semitone::comm

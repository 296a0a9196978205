#pragma once

// Internal interface: other rooms include this header.

#include "semitone/comm/group.h"
#include "semitone/comm/init_options.h"
#include "src/comm/watch.h"
#include "src/comm/watched_backend.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace semitone::comm {

struct Group::Impl {
  std::string name = "all";
  int rank = 0;
  int size = 1;
  std::string backend = "none";
  c10::Device device = c10::kCPU;  // of the tensors that the transport takes
  InitOptions options;
  std::string address;             // local IP address to listen on
  std::vector<int> members = {0};  // its ranks, by their numbers in the group of all processes
  bool is_of_all = true;
  int subgroups = 0;  // made so far: numbers their keys in the store
  int barriers = 0;
  c10::intrusive_ptr<c10d::Store> store;
  std::shared_ptr<Watch> watch;
  // Null for a single process. These members are the last, so they are destroyed first, while the
  // watch can still tell the others and the store still serves others.
  c10::intrusive_ptr<WatchedBackend> transport;
  c10::intrusive_ptr<c10d::ProcessGroup> process_group;
};

// Makes the process group of a set of processes that share a store.
void connect(Group::Impl& group);

// A barrier. That of c10d::ProcessGroup also frees a tensor of the call before it: where memory is
// measured now and was not then, LibTorch warns of a block of unknown size.
void wait_for_all(const Group::Impl& group);

// The c10d group behind a Group, for c10d::Reducer. Null for a single process.
inline c10::intrusive_ptr<c10d::ProcessGroup> process_group(const Group& group) {
  return group.impl()->process_group;
}

// The number of one of a group's ranks in the group of all processes, by which errors name it.
inline int number_in_all(const Group& group, int rank) {
  return group.impl()->members.at(static_cast<std::size_t>(rank));
}
inline int number_in_all(const Group& group) {
  return number_in_all(group, group.rank());
}

// A group of the same ranks whose messages are sent by the CPU, for a thread of the library beside
// the program's. NCCL needs one order of all its collectives, of all groups, which two threads would
// not keep.
Group group_of_cpus(const Group& group);

// Whether transports can reduce tensors of this dtype.
bool is_reducible(at::ScalarType dtype);

// Whether the group's transport can add up gradients of this dtype.
bool can_add_up(const Group& group, at::ScalarType dtype);

// The same memory in a dtype that transports know: not all know every dtype, but all know bytes.
at::Tensor transportable(const at::Tensor& tensor);

// Collectives of a group of several ranks without their checks, for the library's own calls, which
// are compared at CheckLevel::full only.
void broadcast_unchecked(const Group& group, const std::vector<at::Tensor>& tensors, int root);
std::vector<at::Tensor> all_gather_unchecked(const Group& group, const at::Tensor& tensor);
void all_reduce_unchecked(const Group& group, at::Tensor& sums);

// Sends consecutive parts of a tensor, and receives others, with these extents of the first
// dimension; none: equal parts. Does not wait.
c10::intrusive_ptr<c10d::Work> start_all_to_all(const Group& group, at::Tensor& output,
                                                at::Tensor& input,
                                                std::vector<std::int64_t> output_splits = {},
                                                std::vector<std::int64_t> input_splits = {});

// Sends a string of any length from one rank to another, without the other ranks. For groups of
// several ranks.
void send_string(const Group& group, const std::string& text, int to);
std::string receive_string(const Group& group, int from);

// Compares a call that the library makes on behalf of the program with the other ranks' calls, like
// a call on a Group (CheckLevel::calls).
void announce(const Group& group, const std::string& call, const std::string& arguments);

}  // namespace semitone::comm

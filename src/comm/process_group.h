#pragma once

#include "semitone/comm/group.h"
#include "semitone/comm/init.h"
#include "src/comm/backends.h"
#include "src/comm/watch.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <chrono>
#include <memory>
#include <string>

namespace semitone::comm {

struct Group::Impl {
  int rank = 0;
  int size = 1;
  std::string backend = "none";
  InitOptions options;
  BackendRequest request;  // how the transport was made, to make those of subgroups
  c10::intrusive_ptr<c10d::Store> store;
  c10::intrusive_ptr<c10d::ProcessGroup> process_group;  // null for a single process
  std::shared_ptr<Watch> watch;
  int subgroups = 0;  // made so far: numbers their keys in the store
  int barriers = 0;
};

// Makes the c10d group of a set of processes that share a store.
std::shared_ptr<Group::Impl> make_group(const BackendRequest& request, const std::string& backend,
                                        const InitOptions& options, std::shared_ptr<Watch> watch);

// c10d's group behind a Group, for c10d::Reducer. Null for a single process.
inline c10::intrusive_ptr<c10d::ProcessGroup> process_group(const Group& group) {
  return group.impl()->process_group;
}

}  // namespace semitone::comm

#pragma once

#include "src/launch/descriptor.h"

#include <sys/types.h>

namespace semitone::launch {

// A small helper process that does nothing until this process ends, for any reason. It then kills
// the process groups that were added to it. The system's own death signal reaches the children
// only, not the processes that they have started.
class WorkerReaper {
 public:
  // @param max_groups  largest number of groups at a time
  explicit WorkerReaper(int max_groups);
  ~WorkerReaper();
  WorkerReaper(const WorkerReaper&) = delete;
  WorkerReaper& operator=(const WorkerReaper&) = delete;

  // Where a child adds its group (ChildOptions::registry). This process would be late: if it were
  // killed before it has noted a child that runs already, what that child has started would stay.
  int registry() const { return socket_.number(); }
  // Removes a group that has ended; another group may get its number.
  void remove(pid_t group);

 private:
  Descriptor socket_;
  pid_t id_ = -1;
};

}  // namespace semitone::launch

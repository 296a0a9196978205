#pragma once

#include "src/launch/descriptor.h"

#include <sys/types.h>

namespace semitone::launch {

// A small helper process that does nothing until this process ends, for any reason. It then kills
// the process groups that were added to it. The system's own death signal reaches the children
// only, not the processes that they have started.
class Guardian {
 public:
  // @param most  largest number of groups at a time
  explicit Guardian(int most);
  ~Guardian();
  Guardian(const Guardian&) = delete;
  Guardian& operator=(const Guardian&) = delete;

  void guard(pid_t group);
  // Removes a group that has ended; another group may get its number.
  void forget(pid_t group);

 private:
  void tell(pid_t group);

  Descriptor words_;
  pid_t id_ = -1;
};

}  // namespace semitone::launch

#pragma once

#include "src/launch/descriptor.h"

#include <sys/types.h>

namespace semitone::launch {

// A small process beside this one that does nothing until this one ends, however it ends: then it
// kills the process groups that were left in its care. The system's own death signal reaches the
// children only, not what they have started.
class Guardian {
 public:
  // @param most  groups in its care at a time
  explicit Guardian(int most);
  ~Guardian();
  Guardian(const Guardian&) = delete;
  Guardian& operator=(const Guardian&) = delete;

  void guard(pid_t group);
  // The group is gone; another may get its number.
  void forget(pid_t group);

 private:
  void tell(pid_t group);

  Descriptor words_;
  pid_t id_ = -1;
};

}  // namespace semitone::launch

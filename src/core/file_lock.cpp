#include "src/core/file_lock.h"

#include <sys/file.h>

#include <cerrno>

namespace semitone {

bool try_lock(const Descriptor& file) {
  return ::flock(file.number(), LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK;
}

}  // namespace semitone

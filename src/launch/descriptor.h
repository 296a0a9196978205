#pragma once

#include "src/core/descriptor.h"

#include <sys/types.h>

#include <utility>

namespace semitone::launch {

// File descriptors between processes. All of them are closed by exec, and have numbers above those
// of the standard streams, which a child replaces. Error if the system has no more descriptors.
struct Pipe {
  Descriptor read;
  Descriptor write;
};

Pipe make_pipe();
Descriptor open_null(int flags);
// Two connected ends, which do not block.
std::pair<Descriptor, Descriptor> socket_pair();
// Sends the number of a process or group, as one message. Async-signal-safe; the peer may have ended.
void send_number(int socket, pid_t number);

}  // namespace semitone::launch

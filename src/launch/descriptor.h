#pragma once

#include "src/core/descriptor.h"

namespace semitone::launch {

struct Pipe {
  Descriptor read;
  Descriptor write;
};

// All of them are closed by exec, and have numbers above those of the standard streams, which a
// child replaces. Error if the system has no more descriptors.
Pipe make_pipe();
Descriptor open_null(int flags);
Descriptor above_standard_streams(Descriptor descriptor);

}  // namespace semitone::launch

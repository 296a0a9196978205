#pragma once

namespace semitone {

// Cores that this process may run on.
int usable_cores();

}  // namespace semitone

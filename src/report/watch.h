#pragma once

#include "src/report/operator_callbacks.h"

namespace semitone::report {

// As long as an object exists, the operators that this thread calls are shown to the CheckState in
// force. End it on the same thread; elsewhere it stays, without effect once the state looks no more.
class Watch : public OperatorCallbacks {
 public:
  Watch();
};

}  // namespace semitone::report

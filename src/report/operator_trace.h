#pragma once

#include "semitone/core/events.h"
#include "src/report/operator_callbacks.h"

namespace semitone::report {

class SampleState;

// As long as an object exists, the operators that this thread calls are shown to the SampleState in
// force, as with Watch.
class OperatorTrace : public OperatorCallbacks {
 public:
  OperatorTrace();

  // An event of an operator in progress on this thread, for the state that listens. Another one that
  // is in force here has the operator.
  static void add(SampleState& state, const events::Cast& event);
  static void add(SampleState& state, const events::OperatorReplaced& event);
};

}  // namespace semitone::report

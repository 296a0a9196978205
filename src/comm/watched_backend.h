#pragma once

#include "semitone/comm/init.h"
#include "src/comm/watch.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <memory>
#include <string>

namespace semitone::comm {

// Wraps a transport so that everybody who uses it — our groups, c10d's Reducer in the middle of a
// backward pass — gets errors that name ranks, and, at CheckLevel::full, a comparison of what the
// ranks call before they call it.
c10::intrusive_ptr<c10d::Backend> make_watched(c10::intrusive_ptr<c10d::Backend> inner,
                                               std::shared_ptr<Watch> watch,
                                               c10::intrusive_ptr<c10d::Store> store,
                                               CheckLevel check);

}  // namespace semitone::comm

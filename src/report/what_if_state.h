#pragma once

#include "semitone/report/what_if.h"
#include "src/core/thread_state.h"
#include "src/report/parameter_names.h"
#include "src/report/rounded_values.h"

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace semitone::report {

// The kind of WhatIfState among the states of a thread, in addition to those of thread_state.h.
inline constexpr std::string_view kWhatIfStateName = "semitone what-if";
inline constexpr c10::DebugInfoKind kWhatIfState = thread_state_kind(206, &kWhatIfStateName);

// The generator of random numbers that an operator may draw from, as it was before.
class RandomNumbers {
 public:
  RandomNumbers() = default;
  explicit RandomNumbers(at::Generator generator);

  // Calls a function that draws the numbers of before. Then they are as they were when it began.
  void repeat(const std::function<void()>& function) const;

 private:
  at::Generator generator_;
  at::Tensor before_;  // not defined: there is no generator
};

// The state of a WhatIf. LibTorch passes it on to autograd's threads.
class WhatIfState : public c10::DebugInfoBase {
 public:
  // A node of the graph: the thread of its forward operator, and the number that autograd gave it.
  using NodeId = std::pair<std::uint64_t, std::int64_t>;

  WhatIfState(const torch::nn::Module& model, const WhatIfOptions& options);

  bool examines(std::string_view op) const { return operators_.contains(op); }
  // The layer whose parameter is among the arguments; empty: none.
  std::string layer_of(const std::vector<c10::IValue>& arguments) const;
  void set_layer(const NodeId& node, const std::string& layer);
  std::string layer_of(const NodeId& node) const;

  // An operator that has been called.
  struct Call {
    WhatIfRow row;  // with op, layer and backward
    c10::OperatorHandle op;
    std::vector<c10::IValue> arguments;
    RandomNumbers random;
  };
  // Computes it again, and compares.
  void examine(const Call& call, const std::vector<c10::IValue>& results);
  void failed(const std::string& why);
  void next_step();
  std::vector<WhatIfRow> rows() const;

 private:
  // Sums of one row and format.
  struct Sums {
    double changes = 0;  // of squares
    double results = 0;  // of squares
    std::int64_t numel = 0;
    std::int64_t non_zero = 0;
    std::int64_t underflow = 0;
    std::int64_t overflow = 0;
    std::int64_t non_finite = 0;
  };
  // The largest finite absolute values of an argument: in this step, and in those before in which it
  // had any but 0.
  struct Amax {
    double now = 0;
    std::deque<double> before;
  };
  struct Place {
    WhatIfRow row;
    std::vector<Sums> sums;  // of each format
    std::int64_t calls_in_step = 0;
    // By the call in the step, and the argument's index among the tensors.
    std::map<std::pair<std::int64_t, std::size_t>, Amax> amax;
  };

  Place& place_of(const WhatIfRow& row);
  void examine(Place& place, std::size_t format, const Call& call,
               const std::vector<c10::IValue>& results);
  std::vector<c10::IValue> round_arguments(Place& place, std::size_t format,
                                           const std::vector<c10::IValue>& arguments) const;

  const WhatIfOptions options_;
  const std::set<std::string, std::less<>> operators_;
  mutable std::mutex mutex_;  // of all that follows
  ParameterNames names_;
  std::map<NodeId, std::string> layers_;
  std::vector<Place> places_;
  std::optional<std::string> failure_;
};

}  // namespace semitone::report

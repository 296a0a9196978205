#pragma once

#include "src/report/check_state.h"

#include <ATen/record_function.h>
#include <c10/util/SmallVector.h>
#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace semitone::report {

// A floating-point argument of an operator in progress.
struct WatchedArgument {
  at::Tensor tensor;
  std::size_t position;  // among the operator's arguments
  std::int64_t index;    // in a list of tensors; -1: no list
  Kinds before = 0;      // of an argument that the operator writes to, before it did
  bool is_written = false;
  bool is_overwritten = false;  // its values before the operator do not matter
};

// An operator, or a node of the graph, in progress on this thread.
struct Frame : at::ObserverContext {
  explicit Frame(std::shared_ptr<CheckState> state_) : state(std::move(state_)) {}

  std::string name_of(const WatchedArgument& argument) const;

  std::shared_ptr<CheckState> state;
  Frame* caller = nullptr;
  const OperatorInfo* op = nullptr;  // null: a node
  bool is_ignored = false;
  c10::SmallVector<WatchedArgument, 4> arguments;
  Kinds numbers = 0;  // of the arguments that are numbers
  // An operator that this one called had a result that is not finite, and should be. What it made
  // matters only if it is seen in the results of this one: LibTorch's kernels cast memory that is
  // not initialised, and compute with values that they do not use.
  bool is_suspicious = false;
  std::optional<NonFiniteFinding> found_inside;  // of the first one that made such values
  Place place;
  std::shared_ptr<torch::autograd::Node> node;
  NodeId node_id{};
  int exceptions = 0;  // in flight when it began
};

// What a thread remembers between operators.
class ThreadTrace {
 public:
  static ThreadTrace& of_this_thread();

  // Forgets everything that belongs to another step.
  void enter(const CheckState& state);

  // The storages of the last results. (Memory that was looked at may be written to later without an
  // operator: addmm begins with a copy. So only composite operators rely on it.)
  void add_examined(const at::Tensor& tensor);
  bool was_examined(const at::Tensor& tensor) const;

  Frame* innermost = nullptr;
  const ParameterNames::Entry* last_layer = nullptr;  // in the forward pass
  // The last node of the graph that has computed gradients. Only compared.
  const torch::autograd::Node* last_node = nullptr;

 private:
  using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

  std::uint64_t epoch_ = 0;
  std::vector<WeakStorage> examined_;  // a ring
  std::size_t next_ = 0;
};

}  // namespace semitone::report

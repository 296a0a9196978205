#pragma once

#include "src/core/autograd_node.h"
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

// Memory that may be freed before it is looked at.
class Suspect {
 public:
  explicit Suspect(const at::Tensor& tensor);
  // The tensor; not defined if its memory has been freed.
  at::Tensor lock() const;

 private:
  c10::weak_intrusive_ptr<c10::StorageImpl> storage_;
  at::TensorOptions options_;
  std::vector<std::int64_t> sizes_;
  std::vector<std::int64_t> strides_;
  std::int64_t offset_;
};

// An operator, or a node of the graph, in progress on this thread.
struct Frame : at::ObserverContext {
  explicit Frame(std::shared_ptr<CheckState> state_) : state(std::move(state_)) {}

  std::string name_of(const WatchedArgument& argument) const;
  // The built-in node of the graph within which an operator runs; null if there is none.
  Frame* formula() const;
  void add_suspect(const at::Tensor& result) { suspects.emplace_back(result); }
  // Whether a node, which has just ended, has left a suspect that is not finite. Without a graph of
  // the gradients, what it did not return has been freed.
  bool has_returned_suspect() const;

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
  // Of a node: the results since found_inside that are not finite. LibTorch's formulas make such
  // values and mask them, so only those that the node returns count.
  std::vector<Suspect> suspects;
  Place place;
  NodePtr node;
  bool is_custom_node = false;  // a custom function's
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

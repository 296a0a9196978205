#pragma once

#include "semitone/report/nonfinite_check.h"
#include "src/core/autograd_node.h"
#include "src/core/thread_state.h"
#include "src/report/operator_info.h"
#include "src/report/parameter_names.h"
#include "src/report/tensor_values.h"

#include <ATen/core/Tensor.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/autograd/function.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace semitone::report {

// The kind of CheckState among the states of a thread, in addition to those of thread_state.h.
inline constexpr std::string_view kCheckStateName = "semitone non-finite check";
inline constexpr c10::DebugInfoKind kCheckState = thread_state_kind(203, &kCheckStateName);

// Where an operator runs.
struct Place {
  const ParameterNames::Entry* entry = nullptr;  // null: not known
  bool is_after = false;  // the operator has none of its parameters: it runs after that layer
};

// An operator of the forward pass that made a node of the graph.
struct ForwardOp {
  const OperatorInfo* op = nullptr;
  Place place;
};

// What identifies a node of the graph: the number that autograd gave it, and the thread.
struct NodeId {
  std::uint64_t thread;
  std::int64_t sequence;
  auto operator<=>(const NodeId&) const = default;
};

// A node of the graph that has computed gradients.
struct Producer {
  std::string name;
  NodeId id;
  // What its operators made, if it is not known whether the node returned it.
  std::shared_ptr<const NonFiniteFinding> inside{};
};

// Storages with infs or NaNs that are intended, or were ignored.
class KnownStorages {
 public:
  void add(const at::Tensor& tensor, Kinds kinds);
  Kinds find(const at::Tensor& tensor) const;
  void clear() { storages_.clear(); }

 private:
  struct Known {
    // Keeps the address in use, but not the memory.
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    Kinds kinds;
  };
  void sweep();

  std::unordered_map<const c10::StorageImpl*, Known> storages_;
  std::size_t sweep_at_ = 64;
};

// What a NonFiniteCheck knows. LibTorch carries it to the threads that work for this one.
class CheckState : public c10::DebugInfoBase, public std::enable_shared_from_this<CheckState> {
 public:
  explicit CheckState(const NonFiniteCheckOptions& options);

  // The state in force on this thread that looks at operators now, or null.
  static std::shared_ptr<CheckState> looking();

  bool is_looking() const { return is_looking_.load(std::memory_order_relaxed); }
  void stop() { is_looking_ = false; }
  // Different for each step of each object.
  std::uint64_t epoch() const { return epoch_.load(std::memory_order_relaxed); }
  bool ignores(const OperatorInfo& op) const;

  void add_model(const torch::nn::Module& model, const std::string& prefix);
  void next_step();
  std::int64_t step() const { return step_.load(std::memory_order_relaxed); }

  // Of the names that were added.
  const ParameterNames::Entry* entry_of(const at::Tensor& tensor) const;

  void add_forward_op(const NodeId& node, const ForwardOp& op);
  ForwardOp forward_op(const NodeId& node) const;
  // The nodes that receive a node's gradients when it has computed them.
  void add_producer(const torch::autograd::Node& node, const Producer& producer);
  // The last node that computed a gradient for this one.
  std::optional<Producer> producer_of(const torch::autograd::Node& receiver) const;
  // The nodes that computed gradients for those that a node computes them for, in order.
  std::vector<Producer> producers_beside(const torch::autograd::Node& node) const;

  void add_known(const at::Tensor& tensor, Kinds kinds);
  Kinds known_kinds(const at::Tensor& tensor) const;

  // Keeps the first one, with the step and the rank.
  void found(NonFiniteFinding finding);
  void failed(const std::string& why);
  std::optional<NonFiniteFinding> finding() const;
  std::optional<std::string> failure() const;

 private:
  bool is_due() const;

  NonFiniteCheckOptions options_;
  std::set<std::string> ignored_;
  std::atomic<bool> is_looking_{true};
  std::atomic<std::uint64_t> epoch_;
  std::atomic<std::int64_t> step_;
  mutable std::mutex mutex_;  // of all that follows
  ParameterNames names_;
  std::map<NodeId, ForwardOp> forward_ops_;
  // By receiver. Another graph may have a node at the same address when the first has ended.
  struct Producers {
    WeakNodePtr receiver{NodePtr()};
    std::vector<Producer> all;
  };
  const std::vector<Producer>* producers_for(const torch::autograd::Node* receiver) const;
  std::unordered_map<const torch::autograd::Node*, Producers> producers_;
  KnownStorages known_;
  std::optional<NonFiniteFinding> finding_;
  std::optional<std::string> failure_;
};

}  // namespace semitone::report

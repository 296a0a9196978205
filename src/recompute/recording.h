#pragma once

#include "src/core/autograd_node.h"

#include <ATen/SequenceNumber.h>
#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace semitone::nn {

// The part of the autograd graph that this thread has recorded since an object was constructed.
class Recording {
 public:
  // Returns the edges by which the part below these outputs is left: to accumulators of gradients of
  // leaves, and to nodes from before or of other threads. Each once, in the order of a search from
  // the first output, without the edges to these inputs.
  torch::autograd::edge_list edges_left_by(const std::vector<at::Tensor>& outputs,
                                           const std::vector<at::Tensor>& inputs) const;

  // Takes nodes out of the part: those of views of captured tensors, which autograd makes anew when
  // a view is used after its base has been written to.
  void exclude(const std::vector<NodePtr>& nodes);

  // Directs edges of the part below these outputs to other nodes.
  using Redirections = std::unordered_map<torch::autograd::Edge, torch::autograd::Edge>;
  void redirect(const std::vector<at::Tensor>& outputs, const Redirections& to) const;

 private:
  bool has(const torch::autograd::Node& node) const;
  // Calls visit(node) for each node of the part, and leave(edge) for each edge by which it is left.
  template <typename Visit, typename Leave>
  void walk(const std::vector<at::Tensor>& outputs, const Visit& visit, const Leave& leave) const;

  std::unordered_set<const torch::autograd::Node*> excluded_;
  std::uint64_t thread_ = at::RecordFunction::currentThreadId();
  std::uint64_t first_ = at::sequence_number::peek();
};

// Returns an edge to a new node that passes gradients on to another edge: a place where a graph can
// be cut off from what lies beyond.
torch::autograd::Edge relay_to(const torch::autograd::Edge& edge);
// Returns a tensor with the same memory, whose gradients pass through such a node.
at::Tensor behind_relay(const at::Tensor& tensor);

// The edge by which a gradient reaches a tensor. Invalid if it needs none.
torch::autograd::Edge edge_of(const at::Tensor& tensor);

}  // namespace semitone::nn

#include "src/recompute/recording.h"

#include "src/core/autograd_node.h"

#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <limits>
#include <memory>
#include <string>
#include <unordered_set>
#include <utility>

namespace semitone::nn {

using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Node;

Edge edge_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.requires_grad()) return {};
  return torch::autograd::impl::gradient_edge(tensor);
}

bool Recording::has(const Node& node) const {
  // Nodes that accumulate gradients have the greatest number, whenever they were made.
  return node.thread_id() == thread_ && node.sequence_nr() >= first_ &&
         node.sequence_nr() != std::numeric_limits<std::uint64_t>::max() &&
         !excluded_.contains(&node);
}

void Recording::exclude(const std::vector<NodePtr>& nodes) {
  for (const NodePtr& node : nodes) excluded_.insert(node.get());
}

template <typename Visit, typename Leave>
void Recording::walk(const std::vector<at::Tensor>& outputs, const Visit& visit,
                     const Leave& leave) const {
  std::unordered_set<const Node*> visited;
  edge_list open;
  std::transform(outputs.rbegin(), outputs.rend(), std::back_inserter(open), edge_of);
  while (!open.empty()) {
    const Edge edge = std::move(open.back());
    open.pop_back();
    if (!edge.is_valid()) continue;
    if (!has(*edge.function)) {
      leave(edge);
    } else if (visited.insert(edge.function.get()).second) {
      const edge_list& next = edge.function->next_edges();
      open.insert(open.end(), next.rbegin(), next.rend());
      visit(*edge.function);
    }
  }
}

edge_list Recording::edges_left_by(const std::vector<at::Tensor>& outputs,
                                   const std::vector<at::Tensor>& inputs) const {
  std::unordered_set<Edge> known;
  for (const at::Tensor& input : inputs) known.insert(edge_of(input));
  edge_list left;
  walk(
      outputs, [](const Node&) {},
      [&](const Edge& edge) {
        if (known.insert(edge).second) left.push_back(edge);
      });
  return left;
}

void Recording::redirect(const std::vector<at::Tensor>& outputs, const Redirections& to) const {
  walk(
      outputs,
      [&](Node& node) {
        // set_next_edge() is only for nodes that no other leads to. A relay is not above
        // the node, as LibTorch counts their levels: these need not change.
        for (Edge& edge : node.next_edges()) {
          const auto found = to.find(edge);
          if (found != to.end()) edge = found->second;
        }
      },
      [](const Edge&) {});
}

namespace {

class Relay final : public Node {
 public:
  Relay(const at::Tensor& like, Edge to) {
    add_input_metadata(like);
    set_next_edges({std::move(to)});
  }
  std::string name() const override { return "semitone::nn::Relay"; }
  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    return std::move(grads);
  }
};

Edge new_relay(const at::Tensor& like, const Edge& to) {
  return {make_node<Relay>(like, to), 0};
}

// A tensor with the shape and options of the gradients of an edge, without memory for them.
at::Tensor like_gradients_of(const Edge& edge) {
  const auto* const leaf =
      dynamic_cast<const torch::autograd::AccumulateGrad*>(edge.function.get());
  if (leaf != nullptr) return leaf->variable;
  const auto& metadata = edge.function->input_metadata(edge.input_nr);
  return at::empty({}, metadata.options())
      .expand(C10_AS_INTARRAYREF_SLOW(metadata.shape_as_dim_vector()));
}

}  // namespace

Edge relay_to(const Edge& edge) {
  return new_relay(like_gradients_of(edge), edge);
}

at::Tensor behind_relay(const at::Tensor& tensor) {
  at::Tensor result = tensor.detach();
  torch::autograd::impl::set_gradient_edge(result, new_relay(tensor, edge_of(tensor)));
  return result;
}

}  // namespace semitone::nn

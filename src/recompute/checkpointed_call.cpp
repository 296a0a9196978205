#include "semitone/recompute/detail/checkpointed_call.h"

#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "src/recompute/recording.h"
#include "src/recompute/surroundings.h"

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>

namespace semitone::nn::detail {
namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using Tensors = CheckpointedCall::Tensors;

constexpr auto kCheckpoint = "nn.checkpoint";

// The tensors that the function gets. Its graph ends at them, or, if its gradients are to be
// differentiated again, passes through them.
Tensors places_of(const Tensors& inputs, bool create_graph) {
  Tensors places;
  for (const at::Tensor& input : inputs) {
    if (!input.defined() || !input.requires_grad()) {
      places.push_back(input);
    } else if (create_graph) {
      places.push_back(input.view_as(input));
    } else {
      places.push_back(input.detach().requires_grad_());
    }
  }
  return places;
}

// What a result of the function must have in common in both runs.
struct Shape {
  explicit Shape(const at::Tensor& output)
      : sizes(output.defined() ? output.sizes().vec() : std::vector<std::int64_t>()),
        dtype(output.defined() ? output.scalar_type() : c10::ScalarType::Undefined),
        requires_grad(output.defined() && output.requires_grad()) {}
  bool operator==(const Shape&) const = default;
  std::string text() const {
    return c10::str(dtype_name(dtype), " ", c10::IntArrayRef(sizes),
                    requires_grad ? "" : " without a gradient");
  }

  std::vector<std::int64_t> sizes;
  c10::ScalarType dtype;
  bool requires_grad;
};

std::vector<Shape> shapes_of(const Tensors& outputs) {
  std::vector<Shape> shapes;
  for (const at::Tensor& output : outputs) shapes.emplace_back(output);
  return shapes;
}

[[noreturn]] void throw_difference(const std::string& expected, const std::string& got) {
  throw Error(kCheckpoint, expected + " as in the forward pass when the function runs again", got,
              "let it depend only on its inputs, parameters and random numbers");
}

// A parameter, or another leaf, that the function uses.
struct UsedLeaf {
  const AccumulateGrad* node;  // held by the edges
  std::int64_t version;
};

class RecomputeBackward final : public Node {
 public:
  RecomputeBackward(const Tensors& inputs, const Tensors& buffers, AutocastRegions regions,
                    std::optional<RandomStates> random)
      : buffers_(buffers), regions_(std::move(regions)), random_(std::move(random)) {
    for (const at::Tensor& input : inputs) inputs_.emplace_back(input, /*is_output=*/false);
  }

  // Ends the forward pass.
  void complete(CheckpointedCall::Run run, std::vector<Shape> outputs, edge_list inputs,
                edge_list others) {
    run_ = std::move(run);
    outputs_ = std::move(outputs);
    others_ = std::move(others);
    for (const Edge& edge : others_) {
      if (const auto* leaf = dynamic_cast<const AccumulateGrad*>(edge.function.get()))
        leaves_.push_back({leaf, leaf->variable._version()});
    }
    edge_list next = std::move(inputs);
    next.insert(next.end(), others_.begin(), others_.end());
    set_next_edges(std::move(next));
  }

  std::string name() const override { return "semitone::nn::RecomputeBackward"; }

  void release_variables() override {
    const std::lock_guard lock(mutex_);
    for (SavedVariable& input : inputs_) input.reset_data();
    run_ = nullptr;
  }

  variable_list apply(variable_list&& grads) override {
    const std::lock_guard lock(mutex_);
    TORCH_CHECK(run_ != nullptr, torch::autograd::ERR_BACKWARD_TWICE);
    require_unchanged_leaves();
    const bool create_graph = c10::GradMode::is_enabled();
    const Second second = run_again(create_graph);
    edge_list roots;
    variable_list root_grads;
    for (std::size_t i = 0; i < second.roots.size(); ++i) {
      if (!grads[i].defined()) continue;
      roots.push_back(second.roots[i]);
      root_grads.push_back(std::move(grads[i]));
    }
    return gradients(second, roots, root_grads, create_graph);
  }

 private:
  // The second run. Its graph ends at `ends`, one for each edge of others_: LibTorch's engine would
  // else also compute what lies beyond an edge if another one leads there, and run the hooks of
  // parameters twice.
  struct Second {
    Tensors places;
    Tensors outputs;
    edge_list roots;  // of the outputs that need a gradient
    edge_list ends;
  };

  void require_unchanged_leaves() const {
    for (const UsedLeaf& leaf : leaves_) {
      if (leaf.node->variable._version() == leaf.version) continue;
      throw Error(kCheckpoint,
                  "parameters that are unchanged between the forward and the backward pass",
                  c10::str("one of shape ", leaf.node->variable.sizes(), " that was written to"),
                  "call backward() before the optimizer's step");
    }
  }

  Second run_again(bool create_graph) {
    const at::AutoGradMode recording(true);
    Tensors inputs;
    for (const SavedVariable& input : inputs_) inputs.push_back(input.unpack());
    const UnchangedTensors unchanged(buffers_);
    std::optional<RandomStates::Scope> random;
    if (random_.has_value()) random.emplace(*random_);
    const AutocastRegions::Scope regions(regions_);
    Second second{places_of(inputs, create_graph), {}, {}, {}};
    const Recording recording_of_run;
    second.outputs = run_(second.places);
    require_same(second, recording_of_run);
    end_graph(second, recording_of_run);
    return second;
  }

  void end_graph(Second& second, const Recording& recording) const {
    Recording::Redirections to_ends;
    for (const Edge& edge : others_)
      to_ends.emplace(edge, second.ends.emplace_back(end_like(edge)));
    recording.redirect(second.outputs, to_ends);
    for (const at::Tensor& output : second.outputs) {
      const Edge edge = edge_of(output);
      if (!edge.is_valid()) continue;
      const auto end = to_ends.find(edge);
      second.roots.push_back(end == to_ends.end() ? edge : end->second);
    }
  }

  void require_same(const Second& second, const Recording& recording) const {
    const std::vector<Shape> shapes = shapes_of(second.outputs);
    if (shapes.size() != outputs_.size()) {
      throw_difference(c10::str(outputs_.size(), " results"), std::to_string(shapes.size()));
    }
    for (std::size_t i = 0; i < shapes.size(); ++i) {
      if (shapes[i] != outputs_[i])
        throw_difference(c10::str("result ", i, ", ", outputs_[i].text()), shapes[i].text());
    }
    const edge_list others = recording.edges_left_by(second.outputs, second.places);
    const std::unordered_set<Edge> before(others_.begin(), others_.end());
    const std::unordered_set<Edge> now(others.begin(), others.end());
    if (before == now) return;
    throw_difference("the same parameters and captured tensors",
                     before.size() == now.size()
                         ? std::string("others")
                         : c10::str(now.size(), " instead of ", before.size()));
  }

  // Of the inputs that need one, and of what else the function uses.
  variable_list gradients(const Second& second, const edge_list& roots,
                          const variable_list& root_grads, bool create_graph) {
    edge_list wanted;
    std::vector<std::size_t> indices;
    auto want = [&, index = std::size_t{0}](const Edge& edge) mutable {
      if (task_should_compute_output(index)) {
        wanted.push_back(edge);
        indices.push_back(index);
      }
      ++index;
    };
    for (const at::Tensor& place : second.places) {
      const Edge edge = edge_of(place);
      if (edge.is_valid()) want(edge);
    }
    for (const Edge& end : second.ends) want(end);
    variable_list result(num_outputs());
    if (roots.empty() || wanted.empty()) return result;
    variable_list found = torch::autograd::Engine::get_default_engine().execute(
        roots, root_grads, /*keep_graph=*/create_graph, create_graph, /*accumulate_grad=*/false,
        wanted);
    for (std::size_t i = 0; i < indices.size(); ++i) result[indices[i]] = std::move(found[i]);
    return result;
  }

  std::vector<SavedVariable> inputs_;
  Tensors buffers_;
  AutocastRegions regions_;
  std::optional<RandomStates> random_;
  CheckpointedCall::Run run_;
  std::vector<Shape> outputs_;
  edge_list others_;
  std::vector<UsedLeaf> leaves_;
};

bool shares_memory(const at::Tensor& output, const Tensors& inputs) {
  return output.has_storage() && std::ranges::any_of(inputs, [&](const at::Tensor& input) {
           return input.defined() && input.has_storage() &&
                  input.storage().is_alias_of(output.storage());
         });
}

}  // namespace

struct CheckpointedCall::Impl {
  Impl(Tensors given, bool preserve_rng_state, const Tensors& buffers)
      : originals(std::move(given)),
        node(new RecomputeBackward(
                 originals, buffers, regions,
                 preserve_rng_state ? std::optional(RandomStates::of(originals)) : std::nullopt),
             torch::autograd::deleteNode),
        inputs(places_of(originals, /*create_graph=*/false)) {
    scope.emplace(regions);
  }

  Tensors originals;
  AutocastRegions regions;
  std::shared_ptr<RecomputeBackward> node;
  Tensors inputs;
  Recording recording;
  std::optional<AutocastRegions::Scope> scope;
};

bool CheckpointedCall::is_needed() {
  return c10::GradMode::is_enabled() && !c10::InferenceMode::is_enabled();
}

CheckpointedCall::CheckpointedCall(Tensors inputs, bool preserve_rng_state, const Tensors& buffers)
    : impl_(std::make_unique<Impl>(std::move(inputs), preserve_rng_state, buffers)) {}

CheckpointedCall::~CheckpointedCall() = default;

const Tensors& CheckpointedCall::inputs() const {
  return impl_->inputs;
}

Tensors CheckpointedCall::finish(const Tensors& outputs, Run run) && {
  impl_->scope.reset();
  if (std::ranges::none_of(outputs, [](const at::Tensor& output) {
        return output.defined() && output.requires_grad();
      }))
    return outputs;
  edge_list to_inputs;
  for (const at::Tensor& input : impl_->originals) {
    if (const Edge edge = edge_of(input); edge.is_valid()) to_inputs.push_back(edge);
  }
  impl_->node->complete(std::move(run), shapes_of(outputs), std::move(to_inputs),
                        impl_->recording.edges_left_by(outputs, impl_->inputs));
  Tensors results;
  for (const at::Tensor& output : outputs) {
    if (!output.defined() || !output.requires_grad()) {
      results.push_back(output);
      continue;
    }
    at::Tensor& result = results.emplace_back(output.detach());
    if (shares_memory(output, impl_->originals)) result = result.clone();
    torch::autograd::set_history(result, impl_->node);
  }
  return results;
}

}  // namespace semitone::nn::detail

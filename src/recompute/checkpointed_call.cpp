#include "semitone/recompute/detail/checkpointed_call.h"

#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "src/core/autograd_node.h"
#include "src/core/log.h"
#include "src/recompute/captured_tensors.h"
#include "src/recompute/recording.h"
#include "src/recompute/surroundings.h"

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
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

// An input that needed no gradient in the first run.
at::Tensor constant(const at::Tensor& input) {
  return input.defined() && input.requires_grad() ? input.detach() : input;
}

// The tensors that the function gets. An input that needs a gradient is replaced by behind(input):
// leaf_of_values() where the graph ends, and behind_relay() where it goes on to that of the inputs,
// for gradients that are differentiated again, and for tensors that leave the first run in another
// way than as its result.
template <typename Behind>
Tensors places_of(const Tensors& inputs, const std::vector<bool>& needs_gradient,
                  const Behind& behind) {
  Tensors places;
  for (std::size_t i = 0; i < inputs.size(); ++i)
    places.push_back(needs_gradient[i] ? behind(inputs[i]) : constant(inputs[i]));
  return places;
}

at::Tensor leaf_of_values(const at::Tensor& input) {
  return input.detach().requires_grad_();
}

std::vector<bool> which_need_gradients(const Tensors& inputs) {
  std::vector<bool> which;
  for (const at::Tensor& input : inputs) which.push_back(input.defined() && input.requires_grad());
  return which;
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

// The index of the first output that is the same tensor.
std::size_t first_of(const Tensors& outputs, std::size_t index) {
  std::size_t first = 0;
  while (!outputs[first].is_same(outputs[index])) ++first;
  return first;
}

[[noreturn]] void throw_difference(const std::string& expected, const std::string& got) {
  throw Error(kCheckpoint, expected + " as in the forward pass when the function runs again", got,
              "let it depend only on its inputs, parameters and random numbers, and change "
              "requires_grad after backward()");
}

const AccumulateGrad* leaf_of(const Edge& edge) {
  return dynamic_cast<const AccumulateGrad*>(edge.function.get());
}

// Whether nothing but the graph refers to the leaf of an edge: a run made it, and nothing
// else can read its gradient.
bool is_private_leaf(const Edge& edge) {
  const AccumulateGrad* const leaf = leaf_of(edge);
  return leaf != nullptr && leaf->variable.use_count() == 1;
}

class RecomputeBackward final : public Node {
 public:
  // The first run begins.
  RecomputeBackward(const Tensors& inputs, const CheckpointedCall::State& state,
                    AutocastRegions regions)
      : needs_gradient_(which_need_gradients(inputs)),
        buffers_(state.buffers),
        modes_(state.module),
        regions_(std::move(regions)) {
    for (const at::Tensor& input : inputs) {
      const bool is_inference = input.defined() && input.is_inference();  // cannot be saved
      inputs_.emplace_back(is_inference ? at::Tensor() : input, /*is_output=*/false);
      inference_inputs_.push_back(is_inference ? input : at::Tensor());
    }
    if (state.preserve_rng_state) random_.emplace(inputs);
  }

  const std::vector<bool>& needs_gradient() const { return needs_gradient_; }
  // Null if they are not to be preserved.
  const RngStates* random() const { return random_.has_value() ? &*random_ : nullptr; }

  // The first run ends.
  // @param captured  tensors that the function used without changing them
  // @param draws     whether it has drawn random numbers: it may have put the generators back
  void complete(CheckpointedCall::Run run, std::vector<Shape> outputs, edge_list to_inputs,
                edge_list others, std::vector<SeenTensor> captured, bool draws) {
    captured_ = std::move(captured);
    if (random_.has_value() && !random_->note_end() && !draws) random_.reset();
    buffers_.note_end();
    run_ = std::move(run);
    outputs_ = std::move(outputs);
    others_ = std::move(others);
    for (const Edge& edge : others_) {
      if (const AccumulateGrad* const leaf = leaf_of(edge)) leaves_.emplace_back(leaf->variable);
    }
    edge_list next = std::move(to_inputs);
    next.insert(next.end(), others_.begin(), others_.end());
    set_next_edges(std::move(next));
  }

  std::string name() const override { return "semitone::nn::RecomputeBackward"; }

  void release_variables() override {
    const std::lock_guard lock(recomputation_);
    for (SavedVariable& input : inputs_) input.reset_data();
    inference_inputs_.clear();
    captured_.clear();
    run_ = nullptr;
    // LibTorch deletes a long graph without recursion only if nothing else leads on.
    others_.clear();
    leaves_.clear();
  }

  variable_list apply(variable_list&& grads) override {
    const std::lock_guard lock(recomputation_);
    TORCH_CHECK(run_ != nullptr, torch::autograd::ERR_BACKWARD_TWICE);
    require_unchanged();
    const bool create_graph = c10::GradMode::is_enabled();
    BufferValues::Scope buffers(buffers_);
    const Second second = run_again(create_graph);
    buffers.note_end_of_run();
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

  void require_unchanged() const {
    if (modes_.have_changed()) {
      throw Error(kCheckpoint, "the modes (train or eval) of the forward pass", "others",
                  "call train() and eval() after backward()");
    }
    require_unchanged(leaves_, "parameters", "call backward() before the optimizer's step");
    require_unchanged(buffers_.only_read(), "buffers", "update them after backward()");
    require_unchanged(
        captured_, "captured tensors",
        "write to a copy, or give CheckpointOptions::buffers those that the function updates");
  }

  static void require_unchanged(const std::vector<SeenTensor>& tensors, const char* what,
                                const char* remedy) {
    for (const SeenTensor& seen : tensors) {
      const std::optional<at::Tensor> changed = seen.changed();
      if (!changed.has_value()) continue;
      throw Error(kCheckpoint,
                  c10::str(what, " that are unchanged between the forward and the backward pass"),
                  c10::str("one of shape ", changed->sizes(), " that was written to"), remedy);
    }
  }

  Second run_again(bool create_graph) {
    const at::AutoGradMode recording(true);
    Tensors inputs;
    for (std::size_t i = 0; i < inputs_.size(); ++i) {
      const at::Tensor input = inputs_[i].unpack();
      inputs.push_back(input.defined() ? input : inference_inputs_[i]);
    }
    std::optional<RngStates::Scope> random;
    if (random_.has_value()) random.emplace(*random_);
    Second second;
    second.places = create_graph ? places_of(inputs, needs_gradient_, behind_relay)
                                 : places_of(inputs, needs_gradient_, leaf_of_values);
    const AutocastRegions::Scope regions(regions_, inputs, second.places);
    const Recording recording_of_run;
    second.outputs = run_(second.places);
    if (random_.has_value() && !random_->are_at_end()) {
      throw Error(kCheckpoint,
                  "the random numbers of the forward pass when the function runs again", "others",
                  "let no other thread draw from the default generators meanwhile, or set "
                  "preserve_rng_state(false) if the function draws none");
    }
    require_same(second, recording_of_run);
    end_graph(second, recording_of_run);
    return second;
  }

  void end_graph(Second& second, const Recording& recording) const {
    Recording::Redirections to_ends;
    for (const Edge& edge : others_)
      to_ends.emplace(edge, second.ends.emplace_back(relay_to(edge)));
    recording.redirect(second.outputs, to_ends);
    for (std::size_t i = 0; i < second.outputs.size(); ++i) {
      const Edge edge = edge_of(second.outputs[i]);
      if (!edge.is_valid() || first_of(second.outputs, i) < i) continue;
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
    const edge_list missing = without(others_, others);
    const edge_list added = without(others, others_);
    // Leaves that each run makes for itself.
    if (missing.size() == added.size() && std::ranges::all_of(missing, is_private_leaf) &&
        std::ranges::all_of(added, [](const Edge& edge) { return leaf_of(edge) != nullptr; }))
      return;
    throw_difference("the same parameters and captured tensors",
                     others.size() == others_.size()
                         ? std::string("others")
                         : c10::str(others.size(), " instead of ", others_.size()));
  }

  static edge_list without(const edge_list& edges, const edge_list& excluded) {
    const std::unordered_set<Edge> known(excluded.begin(), excluded.end());
    edge_list rest;
    for (const Edge& edge : edges) {
      if (!known.contains(edge)) rest.push_back(edge);
    }
    return rest;
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
  Tensors inference_inputs_;
  std::vector<bool> needs_gradient_;
  BufferValues buffers_;
  ModuleModes modes_;
  AutocastRegions regions_;
  std::optional<RngStates> random_;
  CheckpointedCall::Run run_;
  std::vector<Shape> outputs_;
  edge_list others_;
  std::vector<SeenTensor> leaves_;
  std::vector<SeenTensor> captured_;
  // While gradients of the second run are computed, the engine may give this thread the same node
  // of another backward pass.
  std::recursive_mutex recomputation_;
};

bool shares_memory(const at::Tensor& output, std::span<const at::Tensor> others) {
  return output.has_storage() && std::ranges::any_of(others, [&](const at::Tensor& other) {
           return other.defined() && other.has_storage() &&
                  other.storage().is_alias_of(output.storage());
         });
}

// Whether a tensor was there before the run: a captured one, or a view of one.
bool is_captured(const at::Tensor& output, const edge_list& others) {
  const at::Tensor root = output.is_view() ? at::Tensor(output._base()) : output;
  return root.is_leaf() || std::ranges::find(others, edge_of(root)) != others.end();
}

// Of forward-mode derivatives.
bool has_tangent(const at::Tensor& tensor) {
  return tensor.defined() && tensor._fw_grad(/*level=*/0).defined();
}

// Once: each layer of each step would say the same.
void warn_of_second_change(const at::Tensor& tensor) {
  static std::atomic<bool> warned = false;
  if (warned.exchange(true)) return;
  log()->warn(
      "{}: the function changes a captured tensor of shape {}, and so does its second run in the "
      "backward pass: running statistics move twice. Give CheckpointOptions::buffers what it "
      "updates",
      kCheckpoint, c10::str(tensor.sizes()));
}

}  // namespace

struct CheckpointedCall::Impl {
  Impl(Tensors given, const State& state)
      : originals(std::move(given)),
        node(make_node<RecomputeBackward>(originals, state, regions)),
        inputs(places_of(originals, node->needs_gradient(), behind_relay)) {
    scope.emplace(regions, originals, inputs);
    Tensors known = originals;
    known.insert(known.end(), inputs.begin(), inputs.end());
    known.insert(known.end(), state.buffers.begin(), state.buffers.end());
    captured.emplace(known, node->random());
  }

  Tensors originals;
  AutocastRegions regions;
  NodePtrOf<RecomputeBackward> node;
  Tensors inputs;
  Recording recording;
  std::optional<AutocastRegions::Scope> scope;
  std::optional<CapturedTensors> captured;
};

bool CheckpointedCall::is_needed(const Tensors& inputs) {
  return c10::GradMode::is_enabled() && !c10::InferenceMode::is_enabled() &&
         std::ranges::none_of(inputs, has_tangent);
}

CheckpointedCall::CheckpointedCall(Tensors inputs, const State& state)
    : impl_(std::make_unique<Impl>(std::move(inputs), state)) {}

CheckpointedCall::~CheckpointedCall() = default;

const Tensors& CheckpointedCall::inputs() const {
  return impl_->inputs;
}

Tensors CheckpointedCall::finish(const Tensors& outputs, Run run) && {
  std::vector<SeenTensor> captured = impl_->captured->unchanged();
  const std::optional<at::Tensor> changed = impl_->captured->changed();
  const bool draws = impl_->captured->draws();
  impl_->recording.exclude(impl_->captured->nodes_of_views());
  impl_->captured.reset();
  impl_->scope.reset();
  if (std::ranges::none_of(outputs, [](const at::Tensor& output) {
        return output.defined() && output.requires_grad();
      }))
    return outputs;
  if (std::ranges::any_of(outputs, has_tangent)) {
    throw Error(kCheckpoint, "forward-mode derivatives of inputs", "those of a captured tensor",
                "give the function this tensor as an input");
  }
  if (changed.has_value()) warn_of_second_change(*changed);
  edge_list to_inputs;
  for (const at::Tensor& input : impl_->originals) {
    if (const Edge edge = edge_of(input); edge.is_valid()) to_inputs.push_back(edge);
  }
  const edge_list others = impl_->recording.edges_left_by(outputs, impl_->inputs);
  impl_->node->complete(std::move(run), shapes_of(outputs), std::move(to_inputs), others,
                        std::move(captured), draws);
  Tensors results;
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const at::Tensor& output = outputs[i];
    const std::size_t first = first_of(outputs, i);
    if (first < i || !output.defined() || !output.requires_grad()) {
      results.push_back(first < i ? results[first] : output);
      continue;
    }
    at::Tensor& result = results.emplace_back(output.detach());
    // Autograd would not see what the program writes to one of them in the other.
    if (shares_memory(output, impl_->originals) ||
        shares_memory(output, std::span(results).first(i)) || is_captured(output, others))
      result = result.clone();
    torch::autograd::set_history(result, impl_->node);
  }
  return results;
}

}  // namespace semitone::nn::detail

#include "semitone/parallel/detail/replica_sync.h"

#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "semitone/core/events.h"
#include "src/comm/process_group.h"
#include "src/core/autograd_node.h"
#include "src/core/capture_scope.h"
#include "src/core/for_each_module.h"
#include "src/core/log.h"
#include "src/core/unreduced.h"
#include "src/parallel/reduction.h"
#include "src/parallel/same_model.h"
#include "src/parallel/send_weights.h"

#include <c10/util/DimVector.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <torch/nn/modules/embedding.h>
#include <torch/types.h>

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <unordered_set>
#include <utility>

namespace semitone::parallel::detail {
namespace {

// Number of steps without input after which a warning says that a rank has too little data.
constexpr int kSkewToWarnOf = 1000;

// What a search for unused parameters needs.
constexpr auto kSearchable = "a forward that returns tensors, or containers of them";

// Adds each tensor once, under its first name.
class Collector {
 public:
  void add(std::vector<ModelTensors::Entry>& entries, const std::string& name,
           const at::Tensor& tensor, bool sparse_gradient = false) {
    if (!tensor.defined() || !seen_.insert(tensor.unsafeGetTensorImpl()).second) return;
    entries.push_back({name, tensor, sparse_gradient});
  }

 private:
  std::set<const c10::TensorImpl*> seen_;
};

// The parameters that a layer has registered itself. Module::named_parameters would copy their
// names, which takes several times as long.
struct Registered : torch::nn::Module {
  static const torch::OrderedDict<std::string, at::Tensor>& parameters_of(
      const torch::nn::Module& layer) {
    return layer.*(&Registered::parameters_);
  }
};

// The properties of a parameter and its gradient, or of a buffer.
struct Kind {
  explicit Kind(const at::Tensor& tensor)
      : dtype(tensor.scalar_type()),
        device(tensor.device()),
        sizes(tensor.sizes()),
        trained(tensor.requires_grad()) {}

  bool fits(const at::Tensor& tensor) const {
    return tensor.scalar_type() == dtype && tensor.device() == device && tensor.sizes() == sizes;
  }
  std::string to_string() const { return c10::str(dtype_name(dtype), sizes, " on ", device); }

  at::ScalarType dtype;
  c10::Device device;
  c10::DimVector sizes;
  bool trained;
};

// Results of forward, on their way to the loss. Backward reaches this node first, and then, with
// undefined gradients, also results that the loss does not use. All nodes that led to any result
// are therefore reached.
struct Outputs : public torch::autograd::Function<Outputs> {
  struct Listener : torch::CustomClassHolder {
    std::function<void()> on_gradient;
  };

  // A TensorList, since autograd does not look into a vector.
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* context,
                                                at::TensorList outputs,
                                                const c10::intrusive_ptr<Listener>& listener) {
    context->set_materialize_grads(false);
    context->saved_data["listener"] = c10::IValue::make_capsule(listener);
    torch::autograd::variable_list copies;
    for (const at::Tensor& output : outputs) copies.push_back(output.clone());
    return copies;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const auto capsule = context->saved_data["listener"].toCapsule();
    c10::static_intrusive_pointer_cast<Listener>(capsule)->on_gradient();
    gradients.emplace_back();  // for the listener
    return gradients;
  }
};

// Reducer's hooks, and the detection of lost ranks, run on the host.
void refuse_capture() {
  if (!CaptureScope::is_active()) return;
  throw Error(kDdp, "steps that run operator by operator, with several ranks",
              "a forward in amp::CapturedStep", "train without CapturedStep");
}

using SparseWeights = std::set<const c10::TensorImpl*>;

template <typename Layer>
void add_if_sparse(SparseWeights& sparse, const torch::nn::Module& module) {
  const auto* const layer = module.as<Layer>();
  if (layer != nullptr && layer->options.sparse())
    sparse.insert(layer->weight.unsafeGetTensorImpl());
}

SparseWeights sparse_weights(const torch::nn::Module& model) {
  SparseWeights sparse;
  for_each_module(model, [&](const torch::nn::Module& layer) {
    add_if_sparse<torch::nn::Embedding>(sparse, layer);
    add_if_sparse<torch::nn::EmbeddingBag>(sparse, layer);
  });
  return sparse;
}

}  // namespace

ModelTensors tensors_of(const torch::nn::Module& model) {
  const SparseWeights sparse = sparse_weights(model);
  ModelTensors tensors;
  Collector collector;
  for (const auto& item : model.named_parameters()) {
    collector.add(tensors.parameters, item.key(), item.value(),
                  sparse.contains(item.value().unsafeGetTensorImpl()));
  }
  for (const auto& item : model.named_buffers())
    collector.add(tensors.buffers, item.key(), item.value());
  tensors.current_parameters = [&model] { return tensors_of(model).parameters; };
  return tensors;
}

ModelTensors tensors_of(const torch::jit::Module& model) {
  ModelTensors tensors;
  Collector collector;
  for (const auto& item : model.named_parameters())
    collector.add(tensors.parameters, item.name, item.value);
  tensors.current_parameters = [model] { return tensors_of(model).parameters; };
  tensors.current_buffers = [model, collector] {
    std::vector<ModelTensors::Entry> buffers;
    Collector others = collector;
    for (const auto& item : model.named_buffers()) others.add(buffers, item.name, item.value);
    return buffers;
  };
  tensors.buffers = tensors.current_buffers();
  return tensors;
}

struct ReplicaSync::Impl {
  Impl(ModelTensors given, comm::Group group_, const DistributedDataParallelOptions& options_);
  ~Impl();
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  struct Hook {
    NodePtr accumulator;
    std::uintptr_t key;
  };
  Hook hook_on(NodePtr accumulator, std::size_t index);
  void listen(std::size_t index);
  void follow(std::size_t index);
  void prepare_reduction();
  void forget_failed_backward();
  void begin_backward_again();
  void forget_gradients();
  std::vector<at::Tensor> listen_to(const std::vector<at::Tensor>& outputs);
  void on_gradient(std::size_t index);
  void require_first_pass() const;
  void at_end_of_backward(int task);
  void clear_marks();
  void end_local_with_this_pass();
  std::uint64_t weights_version() const;
  void check_own_forward();
  void require_unchanged() const;
  bool knows(const at::Tensor& parameter) const;
  void require_known(const std::vector<ModelTensors::Entry>& parameters) const;
  void require_same_buffers(const char* remedy) const;
  void restore_accumulators() const;

  // A number from each rank, and their combination.
  struct Reduced {
    at::Tensor value;
    c10::intrusive_ptr<c10d::Work> work;

    std::int64_t get() const {
      const events::PhaseScope phase(events::Phase::communication);
      work->wait();
      return value.item<std::int64_t>();
    }
  };
  Reduced start_all_reduce(std::int64_t value, c10d::ReduceOp op) const;
  std::int64_t all_reduce(std::int64_t value, c10d::ReduceOp op) const;
  std::int64_t announce(bool has_input);
  int last_rank_with(bool condition) const;
  void find_buffers();
  void sync_buffers(bool has_input);
  bool agree_to_reduce(bool reduces, bool leaves_gradients = false);
  bool has_unreduced_gradients() const;
  void shadow_step();
  void take_final_model(bool was_last);

  bool alone() const { return reduction == nullptr; }
  bool checks_parameters() const { return !alone() && at::GradMode::is_enabled(); }

  // What happens to the gradients of the last forward.
  enum class Mode {
    idle,    // all is done: no gradients are expected
    local,   // accumulation, until the end of the next backward pass
    reduced  // under way
  };
  void set_mode(Mode next) {
    mode = next;
    next_pass->is_local = mode == Mode::local;
  }
  struct Joining {
    JoinOptions options;
    std::int64_t live = 0;   // ranks that have input
    bool announced = false;  // a forward in no_sync, which has not returned: it may be repeated
    bool ended = false;      // on all ranks, early
  };

  ModelTensors model;    // all of it
  ModelTensors trained;  // the parameters that need gradients
  std::vector<at::Tensor> buffers;
  comm::Group group;
  DistributedDataParallelOptions options;
  std::shared_ptr<int> unsynced = std::make_shared<int>(0);  // NoSyncs alive
  std::optional<Joining> joining;
  Mode mode = Mode::idle;
  std::shared_ptr<NextPass> next_pass = std::make_shared<NextPass>();
  bool any_unreduced = false;  // gradients of no_sync() that are still to be reduced
  bool end_queued = false;     // a backward pass is under way, or an exception has ended it
  // Expires with the backward pass under way: callbacks own it, which autograd drops at the end of
  // the pass, or earlier by an exception. A pass inside another one does not end it.
  std::weak_ptr<const int> under_way;
  std::weak_ptr<const int> local_under_way;  // as above, for a pass in Mode::local
  // Autograd's number of the last pass, if it has left out gradients that the forward expects.
  std::optional<int> partial_pass;
  // The last forward, or its backward pass, threw: the next forward replaces it.
  bool repeats_step = false;
  // The weights of the last ddp.forward() that sent buffers. Its backward passes use them too: none
  // if a backward pass has found others since.
  std::optional<std::uint64_t> forward_version;
  bool awaits_gradients = false;  // the last reduced forward has had no backward pass
  bool abandoned = false;         // and forwards in no_sync came after it
  std::mutex gradients_mutex;     // of the flags, while backward runs

  std::vector<Hook> hooks;             // of each trained parameter
  std::vector<Hook> outdated_hooks;    // on nodes that a graph may still have
  std::vector<unsigned> hooks_before;  // positions among each one's hooks, before it adds up
  std::vector<Kind> as_constructed;    // each of the model's parameters
  std::vector<Kind> buffers_as_constructed;
  std::unordered_set<const c10::TensorImpl*> known;  // the model's parameters
  std::unique_ptr<Reduction> reduction;              // null for a single process
  std::shared_ptr<const int> alive =
      std::make_shared<const int>(0);  // for graphs that outlive this
};

ReplicaSync::Impl::Impl(ModelTensors given, comm::Group group_,
                        const DistributedDataParallelOptions& options_)
    : model(std::move(given)), group(std::move(group_)), options(options_) {
  require_consistent(options);
  require_same_model(model, group, options);
  for (const auto& entry : model.parameters) {
    as_constructed.emplace_back(entry.tensor);
    known.insert(entry.tensor.unsafeGetTensorImpl());
    if (entry.tensor.requires_grad()) trained.parameters.push_back(entry);
  }
  find_buffers();
  for (const at::Tensor& buffer : buffers) buffers_as_constructed.emplace_back(buffer);
  if (group.size() == 1) return;

  send_weights(model, group, 0);
  const Divisor divisor = [this] {
    const bool fewer = joining.has_value() && !joining->options.divide_by_initial_world_size();
    return fewer ? joining->live : group.size();
  };
  reduction = options.delay_allreduce() ? make_delayed_reduction(trained, group, options, divisor)
                                        : make_bucketed_reduction(trained, group, options, divisor);
  for (std::size_t index = 0; index < trained.parameters.size(); ++index) listen(index);
}

ReplicaSync::Impl::~Impl() {
  for (const auto* const all : {&hooks, &outdated_hooks})
    for (const Hook& hook : *all) hook.accumulator->del_post_hook(hook.key);
  for (std::size_t index = 0; index < hooks_before.size(); ++index)
    trained.parameters[index].tensor.remove_hook(hooks_before[index]);
}

ReplicaSync::Impl::Hook ReplicaSync::Impl::hook_on(NodePtr accumulator, std::size_t index) {
  using torch::autograd::variable_list;
  const auto key =
      accumulator->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(
          [this, index](const variable_list& outputs, const variable_list&) {
            on_gradient(index);
            return outputs;
          }));
  return {std::move(accumulator), key};
}

void ReplicaSync::Impl::listen(std::size_t index) {
  const at::Tensor& parameter = trained.parameters[index].tensor;
  hooks.push_back(hook_on(torch::autograd::impl::grad_accumulator(parameter), index));
  // Without a ddp.forward(), nothing restores the nodes of the graph.
  if (options.delay_allreduce())
    hooks_before.push_back(
        parameter.register_hook([this, index](const at::Tensor&) { follow(index); }));
  else if (options.find_unused_parameters() && !options.static_graph())
    hooks_before.push_back(parameter.register_hook(
        [this, index](const at::Tensor&) { reduction->require_found(index); }));
}

// Called with a parameter's gradient, before its node in the graph adds it up. torch::load gives
// parameters new nodes, without the hook.
void ReplicaSync::Impl::follow(std::size_t index) {
  const std::scoped_lock lock(gradients_mutex);
  auto accumulator = torch::autograd::impl::grad_accumulator(trained.parameters[index].tensor);
  if (accumulator == hooks[index].accumulator) return;
  outdated_hooks.push_back(hooks[index]);
  hooks[index] = hook_on(std::move(accumulator), index);
}

// The gradients of an earlier pass that left some out are not reduced yet. An optimizer may have
// stepped with them. Passes have ascending numbers: a lower one is the pass around the earlier one.
void ReplicaSync::Impl::require_first_pass() const {
  if (!partial_pass.has_value() || torch::autograd::get_current_graph_task_id() <= *partial_pass)
    return;
  throw Error(kDdp, "one backward pass for each ddp.forward()",
              fmt::format("a second one on rank {}, for parameters that the first left out: the "
                          "gradients of the first are not reduced yet",
                          comm::number_in_all(group)),
              "add losses and call backward once; or use delay_allreduce(true)");
}

// Autograd has a thread for each device of the model.
void ReplicaSync::Impl::on_gradient(std::size_t index) {
  const std::scoped_lock lock(gradients_mutex);
  if (mode == Mode::local && abandoned && *unsynced == 0) {
    throw Error(
        kDdp, "the backward pass of each ddp.forward() before forwards in no_sync()",
        fmt::format("a gradient for '{}' after both", trained.parameters[index].name),
        "call backward in the scope of no_sync(), and forwards without a backward pass with "
        "torch::NoGradGuard");
  }
  if (mode == Mode::local || (mode == Mode::idle && *unsynced > 0)) {
    mark_unreduced(trained.parameters[index].tensor.grad(), next_pass);
    any_unreduced = true;
    if (mode == Mode::local) end_local_with_this_pass();
    return;
  }
  if (mode == Mode::idle && !options.delay_allreduce()) {
    throw Error(kDdp, "backward passes of forwards through ddp.forward(), one for each",
                fmt::format("a gradient for '{}' from another", trained.parameters[index].name),
                "call ddp.forward(), not the model's own; add losses and call backward once; in "
                "no_sync(), gradients stay each rank's own; delay_allreduce(true) reduces them");
  }
  if (joining.has_value() && options.delay_allreduce() && !awaits_gradients && !end_queued) {
    throw Error(
        "parallel.join", "one backward pass for each ddp.forward()",
        fmt::format("a gradient for '{}' from a second one", trained.parameters[index].name),
        "a rank without input takes part in one only: add losses and call backward once");
  }
  const bool begins = under_way.expired();
  if (begins && end_queued) begin_backward_again();
  if (begins) require_first_pass();
  if (begins && mode == Mode::idle) check_own_forward();
  set_mode(Mode::reduced);
  awaits_gradients = false;
  if (begins) reduction->begin_backward();
  reduction->on_gradient(index);
  if (!begins) return;
  const auto pass = std::make_shared<const int>(torch::autograd::get_current_graph_task_id());
  under_way = pass;
  end_queued = true;
  // Queued twice, so that the reduction's own callbacks, which wait for the other ranks, run in
  // between.
  torch::autograd::Engine::get_default_engine().queue_callback([this, pass] {
    std::shared_ptr<const events::PhaseScope> waiting;
    if (events::listening())
      waiting = std::make_shared<const events::PhaseScope>(events::Phase::communication);
    torch::autograd::Engine::get_default_engine().queue_callback(
        [this, pass, waiting = std::move(waiting)]() mutable {
          waiting.reset();
          at_end_of_backward(*pass);
        });
  });
}

// @param task  autograd's number of the pass
void ReplicaSync::Impl::at_end_of_backward(int task) {
  const std::scoped_lock lock(gradients_mutex);
  end_queued = false;
  under_way.reset();
  if (!reduction->finished()) {
    // A pass inside a node of another one, as of activation checkpointing, is followed by more.
    if (torch::autograd::get_current_node() == nullptr) partial_pass = task;
    return;
  }
  set_mode(Mode::idle);
  clear_marks();
}

// Gradients have been reduced.
void ReplicaSync::Impl::clear_marks() {
  ++next_pass->passes_done;
  if (!std::exchange(any_unreduced, false)) return;
  for (const auto& entry : trained.parameters) clear_unreduced(entry.tensor.grad());
}

// The model's own forward may come next. With delay_allreduce its gradients are to be reduced,
// together with those that this pass leaves; else it is an error. A pass that throws ends nothing: it
// may be repeated.
void ReplicaSync::Impl::end_local_with_this_pass() {
  if (!local_under_way.expired()) return;
  const auto pass = std::make_shared<const int>(0);
  local_under_way = pass;
  torch::autograd::Engine::get_default_engine().queue_callback([this, pass] {
    const std::scoped_lock lock(gradients_mutex);
    local_under_way.reset();
    // An abandoned forward's backward pass remains an error.
    if (mode == Mode::local && !abandoned) set_mode(Mode::idle);
  });
}

// Another number after each change of the weights, as by an optimizer's step.
std::uint64_t ReplicaSync::Impl::weights_version() const {
  std::uint64_t sum = 0;
  for (const auto& entry : trained.parameters) {
    // Autograd does not count the changes of inference tensors.
    if (!entry.tensor.is_inference()) sum += static_cast<std::uint64_t>(entry.tensor._version());
  }
  return sum;
}

// The next forward replaces the one whose backward pass threw: the other ranks still wait for this
// step's gradients. The communication before a forward has been done already.
void ReplicaSync::Impl::forget_failed_backward() {
  // An exception before the first gradient, in the loss for example, leaves no other trace than that
  // none came, as does a forward without a backward pass.
  if (mode != Mode::reduced || (!end_queued && !awaits_gradients)) return;
  forget_gradients();
  set_mode(Mode::idle);
  end_queued = false;
  under_way.reset();
  repeats_step = true;
}

// Makes the checks of ddp.forward() before a backward pass without one. The pass may also be a
// further one of the same ddp.forward().
void ReplicaSync::Impl::check_own_forward() {
  refuse_capture();
  require_unchanged();
  if (model.current_parameters) require_known(model.current_parameters());
  if (forward_version != weights_version()) forward_version.reset();
  if (forward_version.has_value() || !options.broadcast_buffers()) return;
  find_buffers();
  if (buffers.empty()) return;
  throw Error(kDdp, "ddp.forward(), which sends rank 0's buffers to all ranks",
              fmt::format("the model's own forward, with the buffer '{}'", model.buffers[0].name),
              "call ddp.forward(), or set broadcast_buffers(false): each rank keeps its own");
}

// A backward pass that threw is called again, without another forward. Reducer has counted the
// gradients of the first attempt: only another forward makes it count from the beginning.
void ReplicaSync::Impl::begin_backward_again() {
  if (!options.delay_allreduce()) {
    throw Error(kDdp, "another ddp.forward() after a backward pass that threw",
                fmt::format("the same backward pass again on rank {}", comm::number_in_all(group)),
                "repeat the step from ddp.forward() on; with delay_allreduce(true), backward alone "
                "may be repeated");
  }
  // An earlier pass of the same step may already have been reduced, which cannot be detected here.
  if (!forward_version.has_value()) {
    throw Error(
        kDdp, "steps that are repeated with ddp.forward()",
        fmt::format("a step with the model's own forward on rank {}, after one that threw",
                    comm::number_in_all(group)),
        "end this process, so that the other ranks notice, and resume from a checkpoint; steps "
        "with ddp.forward() may be repeated");
  }
  forget_gradients();
}

void ReplicaSync::Impl::forget_gradients() {
  if (const auto lost = group.impl()->watch->lost("ddp")) std::rethrow_exception(lost);
  if (!reduction->forget_backward()) {
    throw Error(kDdp, "backward passes that end without an exception",
                fmt::format("one on rank {} that threw after part of its gradients had been sent",
                            comm::number_in_all(group)),
                "end this process, so that the other ranks notice, and resume from a checkpoint; "
                "with delay_allreduce(true) nothing is sent before backward is done");
  }
}

void ReplicaSync::Impl::require_unchanged() const {
  for (std::size_t i = 0; i < model.parameters.size(); ++i) {
    const at::Tensor& tensor = model.parameters[i].tensor;
    if (tensor.requires_grad() && !as_constructed[i].trained) {
      throw Error(kDdp, fmt::format("'{}' frozen as at construction", model.parameters[i].name),
                  "one that requires a gradient, which no rank would send",
                  "construct DistributedDataParallel anew after requires_grad_(true); or construct "
                  "it before layers are frozen, with find_unused_parameters(true)");
    }
    if (as_constructed[i].fits(tensor)) continue;
    throw Error(kDdp,
                fmt::format("'{}' to be {} as at construction", model.parameters[i].name,
                            as_constructed[i].to_string()),
                Kind(tensor).to_string(),
                "cast and move the model first, then construct DistributedDataParallel");
  }
}

bool ReplicaSync::Impl::knows(const at::Tensor& parameter) const {
  return !parameter.defined() || known.contains(parameter.unsafeGetTensorImpl());
}

void ReplicaSync::Impl::require_known(const std::vector<ModelTensors::Entry>& parameters) const {
  for (const auto& entry : parameters) {
    if (knows(entry.tensor)) continue;
    throw Error(kDdp, "the parameters of construction",
                fmt::format("another one, '{}', which no rank would send", entry.name),
                "construct DistributedDataParallel after all layers exist");
  }
}

// Gloo ends the process if a message has another size than on the rank that sends it.
void ReplicaSync::Impl::require_same_buffers(const char* remedy) const {
  if (buffers.size() != buffers_as_constructed.size()) {
    throw Error(kDdp, fmt::format("{} buffers as at construction", buffers_as_constructed.size()),
                fmt::format("{}", buffers.size()), remedy);
  }
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    if (buffers_as_constructed[i].fits(buffers[i])) continue;
    throw Error(kDdp,
                fmt::format("the buffer '{}' to be {} as at construction", model.buffers[i].name,
                            buffers_as_constructed[i].to_string()),
                Kind(buffers[i]).to_string(), remedy);
  }
}

// torch::load gives parameters new nodes in the graph, without the hooks.
void ReplicaSync::Impl::restore_accumulators() const {
  for (std::size_t i = 0; i < hooks.size(); ++i) {
    const at::Tensor& parameter = trained.parameters[i].tensor;
    if (torch::autograd::impl::grad_accumulator(parameter) != hooks[i].accumulator)
      torch::autograd::impl::set_grad_accumulator(parameter, WeakNodePtr(hooks[i].accumulator));
  }
}

ReplicaSync::Impl::Reduced ReplicaSync::Impl::start_all_reduce(std::int64_t value,
                                                               c10d::ReduceOp op) const {
  std::vector<at::Tensor> tensors{
      at::full({1}, value, model.parameters.front().tensor.options().dtype(at::kLong))};
  c10d::AllreduceOptions reduce;
  reduce.reduceOp = std::move(op);
  auto work = comm::process_group(group)->allreduce(tensors, reduce);
  return {tensors[0], std::move(work)};
}

std::int64_t ReplicaSync::Impl::all_reduce(std::int64_t value, c10d::ReduceOp op) const {
  return start_all_reduce(value, std::move(op)).get();
}

// Before each step of a joined loop: returns how many ranks have input for it.
std::int64_t ReplicaSync::Impl::announce(bool has_input) {
  const Reduced live = start_all_reduce(has_input ? 1 : 0, c10d::ReduceOp::SUM);
  joining->live = live.get();
  if (joining->live < group.size() && joining->live > 0 &&
      joining->options.throw_on_early_termination()) {
    const auto rank = all_reduce(has_input ? -1 : group.rank(), c10d::ReduceOp::MAX);
    joining->ended = true;
    throw Error(
        "parallel.join", "as many batches on every rank",
        fmt::format("none left on rank {}", comm::number_in_all(group, static_cast<int>(rank))),
        "give all ranks the same number, or set throw_on_early_termination to false");
  }
  if (has_input && !joining->options.divide_by_initial_world_size())
    reduction->divide_by(live.work);
  return joining->live;
}

// The highest rank for which a condition holds.
int ReplicaSync::Impl::last_rank_with(bool condition) const {
  return static_cast<int>(all_reduce(condition ? group.rank() : -1, c10d::ReduceOp::MAX));
}

// Again before each use, if forward may replace them.
void ReplicaSync::Impl::find_buffers() {
  if (model.current_buffers) {
    model.buffers = model.current_buffers();
  } else if (!buffers.empty()) {
    return;
  }
  buffers.clear();
  for (const auto& entry : model.buffers) buffers.push_back(entry.tensor);
}

void ReplicaSync::Impl::sync_buffers(bool has_input) {
  if (!options.broadcast_buffers()) return;
  find_buffers();
  require_same_buffers("set broadcast_buffers(false) for buffers whose size or dtype changes");
  if (buffers.empty()) return;
  const events::PhaseScope phase(events::Phase::communication);
  // A rank without input has outdated buffers.
  const int root = joining.has_value() ? last_rank_with(has_input) : 0;
  comm::broadcast_unchecked(group, buffers, root);
}

// In a joined loop: whether the ranks with input reduce gradients in this step. Error on every rank
// if only some of them do: they would wait for the others, which are in no_sync().
// @param leaves_gradients  whether this rank is without input and still has gradients of no_sync()
bool ReplicaSync::Impl::agree_to_reduce(bool reduces, bool leaves_gradients) {
  constexpr std::int64_t kLeft = std::int64_t{1} << 32;  // above each number of ranks
  const std::int64_t sum =
      all_reduce((reduces ? 1 : 0) + (leaves_gradients ? kLeft : 0), c10d::ReduceOp::SUM);
  const std::int64_t count = sum % kLeft;
  if (count > 0 && sum >= kLeft) {
    joining->ended = true;
    throw Error("parallel.join", "no gradients of no_sync on ranks without input",
                fmt::format("some on {} of {}, which no step would reduce", sum / kLeft,
                            group.size() - joining->live),
                "end each rank's loop after a step that reduces, or with zero_grad(), which leaves "
                "them out");
  }
  if (count > 0 && count < joining->live) {
    joining->ended = true;
    throw Error("parallel.join", "no_sync in the same steps on all ranks",
                fmt::format("a step that {} of {} ranks with input reduce", count, joining->live),
                "accumulate over the same steps on all ranks: a rank's last batch is no exception");
  }
  return count > 0;
}

bool ReplicaSync::Impl::has_unreduced_gradients() const {
  const at::NoGradGuard no_grad;
  return any_unreduced && std::ranges::any_of(trained.parameters, [](const auto& entry) {
           const at::Tensor& grad = entry.tensor.grad();
           return grad.defined() && grad.ne(0).any().template item<bool>();
         });
}

void ReplicaSync::Impl::shadow_step() {
  if (!agree_to_reduce(false, has_unreduced_gradients())) return;
  // The others' step takes the place of what this rank has dropped.
  clear_marks();
  reduction->before_forward();
  sync_buffers(false);
  if (!joining->options.follow()) return reduction->shadow(/*keep=*/false);
  bool received = false;
  joining->options.follow()([&] {
    if (!std::exchange(received, true)) reduction->shadow(/*keep=*/true);
  });
  if (!received) {
    throw Error("parallel.join", "a call of receive() in JoinOptions::follow", "none",
                "the other ranks wait for it");
  }
}

void ReplicaSync::Impl::take_final_model(bool was_last) {
  find_buffers();
  require_same_buffers("keep the size and dtype of buffers in a joined loop");
  const int root = last_rank_with(was_last);
  if (!joining->options.follow()) {
    send_weights(model, group, root);
  } else if (!buffers.empty()) {
    comm::broadcast_unchecked(group, buffers, root);
  }
}

ReplicaSync::ReplicaSync(ModelTensors model, comm::Group group,
                         const DistributedDataParallelOptions& options)
    : impl_(std::make_unique<Impl>(std::move(model), std::move(group), options)) {}
ReplicaSync::ReplicaSync(ReplicaSync&&) noexcept = default;
ReplicaSync& ReplicaSync::operator=(ReplicaSync&&) noexcept = default;
ReplicaSync::~ReplicaSync() = default;

const comm::Group& ReplicaSync::group() const {
  return impl_->group;
}

std::optional<GradientOrder> ReplicaSync::gradient_order() const {
  return impl_->alone() ? std::nullopt : impl_->reduction->order();
}

void ReplicaSync::set_gradient_order(const std::optional<GradientOrder>& order) {
  if (!impl_->alone()) impl_->reduction->set_order(order);
}

// The reduction may make new buckets, into which it moves gradients.
void ReplicaSync::Impl::prepare_reduction() {
  // They are other tensors then, without the marks.
  std::vector<at::Tensor> unreduced;
  // Those of fp32 masters that a 16-bit model shows: a bucket would take them over, rounded.
  std::vector<std::pair<at::Tensor, at::Tensor>> shown;
  const auto put_back = c10::make_scope_exit([&] {
    for (const auto& [parameter, grad] : shown) parameter.mutable_grad() = grad;
  });
  for (const auto& entry : trained.parameters) {
    at::Tensor& grad = entry.tensor.mutable_grad();
    if (!grad.defined()) continue;
    if (grad.scalar_type() != entry.tensor.scalar_type()) {
      shown.emplace_back(entry.tensor, std::exchange(grad, {}));
    } else if (any_unreduced && is_unreduced(grad)) {
      unreduced.push_back(entry.tensor);
    }
  }
  reduction->before_forward();
  for (const at::Tensor& parameter : unreduced) mark_unreduced(parameter.grad(), next_pass);
}

void ReplicaSync::before_forward() {
  if (impl_->alone() || !at::GradMode::is_enabled()) return;
  refuse_capture();
  impl_->require_unchanged();
  impl_->restore_accumulators();
  impl_->forget_failed_backward();
  auto& joining = impl_->joining;
  const bool reduces = *impl_->unsynced == 0;
  const bool announces =
      joining.has_value() && !impl_->repeats_step && (reduces || !joining->announced);
  if (announces) {
    impl_->announce(true);
    impl_->agree_to_reduce(reduces);
  }
  if (joining.has_value()) joining->announced = !reduces;
  if (!reduces) return;
  impl_->forward_version = impl_->weights_version();
  impl_->prepare_reduction();
  if (!impl_->repeats_step) impl_->sync_buffers(true);
  impl_->repeats_step = true;
}

void ReplicaSync::require_no_new_parameters(const torch::nn::Module& model) const {
  if (!impl_->checks_parameters()) return;
  bool knows_all = true;
  for_each_module(model, [&](const torch::nn::Module& layer) {
    for (const auto& item : Registered::parameters_of(layer))
      knows_all = knows_all && impl_->knows(item.value());
  });
  if (!knows_all) impl_->require_known(tensors_of(model).parameters);
}

void ReplicaSync::require_no_new_parameters(const torch::jit::Module& model) const {
  if (!impl_->checks_parameters()) return;
  bool knows_all = true;
  for (const at::Tensor& parameter : model.parameters())
    knows_all = knows_all && impl_->knows(parameter);
  if (!knows_all) impl_->require_known(tensors_of(model).parameters);
}

bool ReplicaSync::wants_outputs() const {
  return !impl_->alone() && at::GradMode::is_enabled() && *impl_->unsynced == 0 &&
         impl_->reduction->wants_outputs();
}

bool ReplicaSync::must_search_outputs() const {
  return wants_outputs() && !impl_->options.static_graph();
}

void ReplicaSync::refuse_outputs() {
  throw Error(kDdp, kSearchable, "another type, which cannot be searched for unused parameters",
              "give the type a method map_tensors, see core/map_tensors.h");
}

void ReplicaSync::refuse_void() {
  throw Error(kDdp, kSearchable, "void, which cannot be searched for unused parameters",
              "return what the loss is computed from, or use static_graph(true) or "
              "delay_allreduce(true)");
}

std::vector<at::Tensor> ReplicaSync::expect_backward(const std::vector<at::Tensor>& outputs) {
  if (impl_->alone() || !at::GradMode::is_enabled()) return outputs;
  impl_->end_queued = false;
  impl_->under_way.reset();
  impl_->partial_pass.reset();
  if (impl_->joining.has_value()) impl_->joining->announced = false;
  if (*impl_->unsynced > 0) {
    impl_->abandoned = impl_->awaits_gradients;
    impl_->set_mode(Impl::Mode::local);
    impl_->reduction->expect_local_gradients();
    return outputs;
  }
  impl_->repeats_step = impl_->abandoned = false;
  impl_->forward_version = impl_->weights_version();  // forward may have changed them
  impl_->awaits_gradients = true;
  impl_->set_mode(Impl::Mode::reduced);
  const std::vector<at::Tensor> results = impl_->listen_to(outputs);
  // A search from a result that is a parameter itself would not find the parameter.
  std::vector<at::Tensor> defined;
  std::copy_if(results.begin(), results.end(), std::back_inserter(defined),
               [](const at::Tensor& result) { return result.defined(); });
  impl_->reduction->before_backward(defined);
  return results;
}

// The results of forward, with a node that tells when the backward pass reaches them.
std::vector<at::Tensor> ReplicaSync::Impl::listen_to(const std::vector<at::Tensor>& outputs) {
  std::vector<at::Tensor> results = outputs;
  torch::autograd::variable_list differentiable;
  for (const at::Tensor& output : outputs) {
    if (output.defined() && output.requires_grad()) differentiable.push_back(output);
  }
  if (differentiable.empty()) return results;
  auto listener = c10::make_intrusive<Outputs::Listener>();
  listener->on_gradient = [this, still_alive = std::weak_ptr(alive)] {
    if (still_alive.expired()) {
      throw Error(kDdp, "DistributedDataParallel to exist until the backward pass is done",
                  "one that was destroyed");
    }
    reduction->on_outputs_gradient();
  };
  const auto copies = Outputs::apply(at::TensorList(differentiable), listener);
  auto next = copies.begin();
  for (at::Tensor& result : results) {
    if (result.defined() && result.requires_grad()) result = *next++;
  }
  return results;
}

NoSync ReplicaSync::no_sync() {
  return NoSync(impl_->unsynced);
}

void ReplicaSync::join(const std::function<void()>& loop, const JoinOptions& options) {
  if (impl_->alone()) return loop();
  if (impl_->joining.has_value())
    throw Error("parallel.join", "one joined loop at a time", "another inside it");
  if (impl_->options.static_graph()) {
    throw Error("parallel.join", "options without static_graph", "static_graph",
                "a rank without input has no graph: use find_unused_parameters");
  }
  if (impl_->options.comm_hook() != nullptr && !options.divide_by_initial_world_size()) {
    throw Error("parallel.join", "divide_by_initial_world_size with a comm_hook", "false",
                "hooks divide by the number of all ranks: leave it true, or use no hook");
  }
  for (const auto& entry : impl_->trained.parameters) {
    if (!entry.sparse_gradient) continue;
    throw Error("parallel.join", "dense gradients",
                fmt::format("'{}' with sparse ones", entry.name),
                "a rank without input cannot send them: use Embedding without sparse(true)");
  }
  struct Scope {
    Impl& impl;
    ~Scope() {
      impl.joining.reset();
      impl.reduction->divide_by(nullptr);
    }
  };
  // A forward before the loop is none of its steps.
  impl_->forget_failed_backward();
  impl_->repeats_step = false;
  impl_->joining = Impl::Joining{options, impl_->group.size()};
  const Scope scope{*impl_};
  try {
    loop();
    bool was_last = true;
    for (int steps = 0; impl_->announce(false) > 0; ++steps) {
      if (steps == kSkewToWarnOf) {
        log()->warn(
            "rank {} has had no input for {} steps while other ranks continue: distribute the data "
            "evenly",
            comm::number_in_all(impl_->group), steps);
      }
      impl_->shadow_step();
      was_last = false;
    }
    impl_->take_final_model(was_last);
  } catch (...) {
    // Otherwise the others would wait for this rank's next step.
    if (!impl_->joining->ended)
      impl_->group.impl()->watch->report_lost("left a joined loop by an exception");
    throw;
  }
}

}  // namespace semitone::parallel::detail

#include "semitone/core/error.h"
#include "src/comm/process_group.h"
#include "src/parallel/agreement.h"
#include "src/parallel/averaging.h"
#include "src/parallel/gradient_order.h"
#include "src/parallel/reducer.h"
#include "src/parallel/reduction.h"
#include "src/parallel/same_model.h"

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/distributed/c10d/logger.hpp>
#include <torch/types.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <limits>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace semitone::parallel::detail {
namespace {

// A size in bytes. Sizes beyond those of all models are the same to Reducer, and would be out of
// the integer's range.
std::int64_t to_bytes(double mib) {
  constexpr double kMiB = 1024.0 * 1024.0;
  constexpr double kMost = 1e18;
  return static_cast<std::int64_t>(std::min(mib * kMiB, kMost));
}

// The buckets of a static graph's first step, of which c10d's Reducer says that each is the first one.
struct FirstStepBuckets {
  std::vector<std::vector<at::Tensor>> parameters;  // of each; empty in later steps
  std::size_t next = 0;
};

// Adapts a CommHook to c10d's interface.
class HookAdapter final : public c10d::CommHookInterface {
 public:
  // @param threw_midway  is set if the hook throws after a collective of its own
  HookAdapter(std::shared_ptr<CommHook> hook, comm::Group group,
              std::shared_ptr<FirstStepBuckets> first_step, std::shared_ptr<bool> threw_midway)
      : hook_(std::move(hook)),
        group_(std::move(group)),
        first_step_(std::move(first_step)),
        threw_midway_(std::move(threw_midway)) {}

  c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket& bucket) override {
    const at::Tensor& buffer = bucket.getBuffer();
    // A backward pass in a region computes as outside.
    const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
    const auto future = reduce(described(bucket));
    return future->then(
        [buffer](c10::ivalue::Future& done) -> c10::IValue {
          const c10::IValue result = done.value();  // throws if it failed
          const at::Tensor tensor = result.isTensor() ? result.toTensor() : at::Tensor();
          const bool fits = tensor.defined() && tensor.sizes() == buffer.sizes() &&
                            tensor.scalar_type() == buffer.scalar_type();
          if (!fits) {
            throw Error(kComponent,
                        fmt::format("a tensor like the bucket's buffer, {}, from the hook",
                                    describe_layout(buffer)),
                        tensor.defined() ? describe_layout(tensor) : "none");
          }
          return result;
        },
        c10::TensorType::get());
  }

  at::Tensor parseHookResult(const c10::IValue& result) override { return result.toTensor(); }

 private:
  c10::intrusive_ptr<c10::ivalue::Future> reduce(const GradientBucket& bucket) {
    const comm::Watch& watch = *group_.impl()->watch;
    const auto starts = watch.starts();
    try {
      auto future = hook_->reduce(bucket, group_);
      if (future == nullptr) throw Error(kComponent, "a future from the hook", "none");
      return future;
    } catch (...) {
      *threw_midway_ = *threw_midway_ || watch.starts() != starts;
      throw;
    }
  }

  static constexpr auto kComponent = "parallel.comm_hook";

  GradientBucket described(c10d::GradBucket& bucket) const {
    const auto& all = first_step_->parameters;
    if (all.empty())
      return {bucket.getBuffer(), bucket.getParameters(), bucket.getIndex(), bucket.isLast()};
    const std::size_t index = first_step_->next++;
    return {bucket.getBuffer(), all.at(index), index, index + 1 == all.size()};
  }

  const std::shared_ptr<CommHook> hook_;
  const comm::Group group_;
  const std::shared_ptr<FirstStepBuckets> first_step_;
  const std::shared_ptr<bool> threw_midway_;
};

class AveragingHook final : public CommHook {
 public:
  explicit AveragingHook(Averaging averaging) : averaging_(std::move(averaging)) {}

  c10::intrusive_ptr<c10::ivalue::Future> reduce(const GradientBucket& bucket,
                                                 const comm::Group& group) override {
    return averaging_.start(bucket.buffer, group);
  }

 private:
  const Averaging averaging_;
};

// The numbers after "Parameter indices which did not receive grad for rank R:" in Reducer's
// message; none for another message.
std::vector<std::size_t> indices_without_gradient(std::string_view message) {
  constexpr std::string_view kBefore = "did not receive grad for rank ";
  std::vector<std::size_t> indices;
  const auto start = message.find(kBefore);
  if (start == std::string_view::npos) return indices;
  message.remove_prefix(message.find(':', start) + 1);
  std::size_t at = 0;
  const auto is_digit = [&] { return at < message.size() && std::isdigit(message[at]) != 0; };
  for (;;) {
    while (at < message.size() && (message[at] == ' ' || message[at] == ',')) ++at;
    if (!is_digit()) return indices;
    std::size_t index = 0;
    for (; is_digit(); ++at) index = 10 * index + static_cast<std::size_t>(message[at] - '0');
    indices.push_back(index);
  }
}

// Whether the backward pass under way is that of torch::autograd::grad, which changes no gradient:
// it captures them. backward() with a list of inputs captures none.
bool computes_only_some() {
  const auto* const part = torch::autograd::get_current_graph_task_exec_info();
  return part != nullptr && std::ranges::any_of(*part, [](const auto& node) {
           return node.second.captures_ != nullptr;
         });
}

class BucketedReduction final : public Reduction {
 public:
  BucketedReduction(const ModelTensors& model, comm::Group group,
                    const DistributedDataParallelOptions& options, const Divisor& divisor)
      : group_(std::move(group)), options_(options), model_(model) {
    std::unordered_map<std::size_t, std::string> names;
    for (const auto& entry : model.parameters) {
      names.emplace(parameters_.size(), entry.name);
      parameters_.push_back(entry.tensor);
      sparse_.push_back(entry.sparse_gradient);
    }
    const std::int64_t cap = to_bytes(options.bucket_cap_mb());
    const std::int64_t first_cap = std::min(cap, to_bytes(options.first_bucket_mb()));
    sizes_ = {static_cast<std::size_t>(first_cap), static_cast<std::size_t>(cap)};
    // The first step determines the order of gradients, in which buckets are then rebuilt. The
    // first buckets are final only if the set of gradients may change.
    const bool rebuilds = options.static_graph() || !options.find_unused_parameters();
    const std::vector<std::size_t> one_size{std::numeric_limits<std::size_t>::max()};
    Buckets buckets = divide_into_buckets(parameters_, rebuilds ? one_size : sizes_, sparse_);
    std::reverse(buckets.begin(), buckets.end());
    reducer_ = std::make_shared<Reducer>(
        parameters_, std::move(buckets), comm::process_group(group_), sparse_, first_cap, cap,
        options.find_unused_parameters(), options.gradient_as_bucket_view(), std::move(names));
    reducer_->set_logger(logger_ = std::make_shared<c10d::Logger>(reducer_));
    std::shared_ptr<CommHook> hook = options.comm_hook();
    Averaging averaging(options, divisor);
    if (hook == nullptr && !averaging.is_plain())
      hook = std::make_shared<AveragingHook>(std::move(averaging));
    if (hook != nullptr)
      reducer_->register_comm_hook(
          std::make_unique<HookAdapter>(std::move(hook), group_, first_step_, hook_threw_midway_));
  }

  std::optional<GradientOrder> order() const override {
    if (given_.has_value() || searches()) return given_;
    if (reducer_->is_laid_out()) return order_of(reducer_->buckets(), model_, options_);
    const auto arrivals = reducer_->arrivals();
    if (arrivals.empty()) return std::nullopt;
    return order_of(divide_into_buckets(parameters_, sizes_, sparse_, arrivals), model_, options_);
  }

  void set_order(const std::optional<GradientOrder>& order) override {
    if (searches()) return;
    const bool is_late = started_ && order.has_value() && order != this->order();
    Buckets buckets;
    std::string problem = is_late ? "another one after the first forward" : "";
    if (!started_ && order.has_value()) problem = misfit_of(*order, model_, options_, buckets);
    require_same_order(order, std::move(problem), group_);
    if (started_) return;
    given_ = order;
    given_buckets_ = std::move(buckets);
  }

  void before_forward() override {
    if (learns() && has_gradients_) {
      throw Error(
          kDdp, "gradients that are reduced at the end of backward",
          fmt::format("those of the first step on rank {} were not", comm::number_in_all(group_)),
          "with static_graph(true), the first step's loss must come from ddp.forward()'s "
          "results; or use find_unused_parameters(true)");
    }
    // Not before the first step, which would also count the gradients of no_sync().
    if (!std::exchange(started_, true) && options_.static_graph()) reducer_->set_static_graph();
    reducer_->prepare_for_forward();
    if (given_.has_value()) {
      reducer_->lay_out(std::move(given_buckets_));
      given_.reset();
    }
    explained([this] { reducer_->rebuild_buckets(); });
    if (options_.gradient_as_bucket_view()) forget_views();
  }

  void divide_by(const c10::intrusive_ptr<c10d::Work>& live) override {
    reducer_->set_forward_pass_work_handle(live, /*useStaticWorldSize=*/live == nullptr);
  }

  void expect_local_gradients() override { reducer_->ignore_gradients(); }

  void before_backward(const std::vector<at::Tensor>& outputs) override {
    if (learns()) reducer_->count_from_here();
    arrivals_.clear();
    waits_for_end_ = false;
    if (searches()) reducer_->note_used();
    explained([&] { reducer_->prepare_for_backward(outputs); });
  }

  bool finished() override {
    if (learns() && has_gradients_) return false;  // a pass inside the whole one is done
    try {
      reducer_->check_finalized();
    } catch (const c10::Error&) {
      return false;
    }
    if (searches()) reducer_->take_back_empty_gradients();
    if (options_.gradient_as_bucket_view()) forget_views();
    return true;
  }

  bool forget_backward() override {
    if (sends_first_step_ || *hook_threw_midway_) return false;
    has_gradients_ = false;
    return reducer_->forget_gradients();
  }

  bool wants_outputs() const override { return searches() || learns(); }

  // The whole backward pass ends with the pass that reaches the outputs: with activation
  // checkpointing, the first gradients may come from a pass inside it.
  void on_outputs_gradient() override {
    if (searches() && !computes_only_some()) reducer_->prepare_unused();
    if (learns()) learn_at_end();
  }

  // Reducer has counted the parameter as ready already, perhaps in a bucket that was sent.
  void require_found(std::size_t index) override {
    if (computes_only_some() || !reducer_->is_unused(index)) return;
    throw Error(kDdp, "a loss of ddp.forward()'s results alone, with find_unused_parameters(true)",
                fmt::format("a gradient for '{}', which takes no part in them, on rank {}",
                            model_.parameters[index].name, comm::number_in_all(group_)),
                "return what the loss needs from forward; or use delay_allreduce(true)");
  }

  void on_gradient(std::size_t index) override {
    if (!reducer_->expects_gradients()) {
      throw Error(kDdp, "one backward pass for each ddp.forward()",
                  fmt::format("more gradients on rank {} after all were reduced",
                              comm::number_in_all(group_)),
                  "add losses and call backward once");
    }
    if (!learns()) return;
    has_gradients_ = true;
    arrivals_.push_back(index);
    // Not all losses come from the outputs: a gradient penalty comes from their derivatives.
    if (!waits_for_end_) learn_at_end();
  }

  void shadow(bool keep) override {
    auto buckets = reducer_->get_grad_buckets(/*return_zero_tensors=*/true);
    std::vector<c10::intrusive_ptr<c10::ivalue::Future>> futures;
    futures.reserve(buckets.size());
    for (auto& bucket : buckets) futures.push_back(reducer_->run_comm_hook(bucket));
    for (const auto& future : futures) future->waitAndThrow();
    std::unordered_set<const c10::TensorImpl*> unused;
    if (searches()) {
      std::vector<at::Tensor> used{at::zeros_like(reducer_->get_local_used_map_on_device())};
      comm::process_group(group_)->allreduce(used)->wait();
      const at::Tensor counts = used[0].cpu();
      for (std::size_t i = 0; i < parameters_.size(); ++i) {
        if (counts[static_cast<std::int64_t>(i)].item<int>() == 0)
          unused.insert(parameters_[i].unsafeGetTensorImpl());
      }
    }
    for (std::size_t i = 0; keep && i < buckets.size(); ++i) {
      const c10::IValue result = futures[i]->value();
      store(result.isTensor() ? result.toTensor() : result.toTensorVector().at(0),
            buckets[i].getParameters(), unused);
    }
    reducer_->push_rebuilt_params_for_all_indices();
  }

 private:
  // Whether unused parameters are searched for in every step.
  bool searches() const { return options_.find_unused_parameters() && !options_.static_graph(); }
  // Whether the first step still has to determine which parameters are used.
  bool learns() const { return options_.static_graph() && !learned_; }

  // Reduces the first step's gradients when the current backward pass is done. There may be none:
  // torch::autograd::grad reaches the outputs, too.
  void learn_at_end() {
    waits_for_end_ = true;
    torch::autograd::Engine::get_default_engine().queue_callback([this] {
      waits_for_end_ = false;
      if (!learns() || !has_gradients_) return;
      require_sparse_gradients();
      first_step_->next = 0;
      for (const std::vector<std::size_t>& indices : reducer_->buckets()) {
        std::vector<at::Tensor>& bucket = first_step_->parameters.emplace_back();
        for (const std::size_t index : indices) bucket.push_back(parameters_[index]);
      }
      sends_first_step_ = true;
      reducer_->delay_all_reduce();
      sends_first_step_ = false;
      first_step_->parameters.clear();
      learned_ = true;
      has_gradients_ = false;
      reducer_->set_arrivals(last_arrivals());
    });
  }

  // Reducer has no sparse gradient for parameters that a static graph does not use.
  void require_sparse_gradients() const {
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      if (!sparse_[i] || parameters_[i].grad().defined()) continue;
      throw Error(kDdp, "a gradient for each parameter with sparse ones, with static_graph(true)",
                  fmt::format("none for '{}' on rank {}", model_.parameters[i].name,
                              comm::number_in_all(group_)),
                  "use find_unused_parameters(true) in its place, or layers with sparse(false)");
    }
  }

  // The parameters in the order of their last gradients in a static graph's first step, and behind
  // them those without any. Reducer would note this order in the second step only, and a run that
  // was saved between them would not have it.
  std::vector<std::size_t> last_arrivals() const {
    std::vector<std::size_t> order;
    order.reserve(parameters_.size());
    std::vector<bool> seen(parameters_.size(), false);
    for (auto index = arrivals_.rbegin(); index != arrivals_.rend(); ++index) {
      if (!seen[*index]) order.push_back(*index);
      seen[*index] = true;
    }
    std::reverse(order.begin(), order.end());
    for (std::size_t i = 0; i < seen.size(); ++i) {
      if (!seen[i]) order.push_back(i);
    }
    return order;
  }

  // Gradients that share the buckets' memory, as Reducer requires, but are not views for autograd,
  // since detach_(), which every torch::optim::Optimizer::zero_grad() calls, refuses views.
  void forget_views() const {
    for (const at::Tensor& parameter : parameters_) {
      at::Tensor& gradient = parameter.mutable_grad();
      if (gradient.defined() && gradient.is_view()) gradient = gradient.variable_data();
    }
  }

  // Sets parameters' gradients to those in a bucket, in Reducer's layout.
  static void store(const at::Tensor& bucket, const std::vector<at::Tensor>& parameters,
                    const std::unordered_set<const c10::TensorImpl*>& unused) {
    // Reducer sends complex numbers as pairs.
    const bool pairs = parameters.at(0).is_complex() && !bucket.is_complex();
    const at::Tensor numbers = pairs ? at::view_as_complex(bucket.view({-1, 2})) : bucket;
    std::int64_t offset = 0;
    for (const at::Tensor& parameter : parameters) {
      const at::Tensor part = numbers.narrow(0, offset, parameter.numel());
      offset += parameter.numel();
      if (unused.contains(parameter.unsafeGetTensorImpl())) continue;
      parameter.mutable_grad() =
          parameter.is_non_overlapping_and_dense()
              ? part.as_strided(parameter.sizes(), parameter.strides()).clone()
              : part.view(parameter.sizes()).clone();
    }
  }

  // Runs code that may complain about an earlier step, and converts its message.
  template <typename Call>
  void explained(const Call& call) const {
    try {
      call();
    } catch (const c10::Error& error) {
      explain(error);
    }
  }

  [[noreturn]] void explain(const c10::Error& error) const {
    const std::string message = error.what_without_backtrace();
    if (options_.static_graph()) {
      throw Error(kDdp, "the first step's graph in every step, with static_graph(true)",
                  fmt::format("fewer gradients in the last backward pass on rank {}",
                              comm::number_in_all(group_)),
                  "use find_unused_parameters(true) or delay_allreduce(true)");
    }
    std::vector<std::string> unused;
    for (const std::size_t index : indices_without_gradient(message)) {
      if (index < parameters_.size()) unused.push_back("'" + model_.parameters[index].name + "'");
    }
    if (unused.empty()) throw;
    throw Error(
        kDdp, "a gradient for every parameter in the last backward pass",
        fmt::format("none for {} on rank {}", fmt::join(unused, ", "), comm::number_in_all(group_)),
        "use all of forward's results in the loss; or set find_unused_parameters(true) for "
        "parameters that take no part in some steps, static_graph(true) for those that take "
        "none in any, or delay_allreduce(true)");
  }

  const comm::Group group_;
  const DistributedDataParallelOptions options_;
  const ModelTensors model_;
  std::vector<at::Tensor> parameters_;
  std::vector<bool> sparse_;
  std::vector<std::size_t> sizes_;      // of buckets, in bytes: of the first, and of the others
  std::optional<GradientOrder> given_;  // and not yet in force
  Buckets given_buckets_;
  std::shared_ptr<Reducer> reducer_;
  std::shared_ptr<c10d::Logger> logger_;  // Reducer takes it for granted when it searches
  bool started_ = false;
  // In a static graph's first step:
  bool learned_ = false;           // it is done
  bool has_gradients_ = false;     // it has some, not yet reduced
  bool waits_for_end_ = false;     // of the backward pass under way
  bool sends_first_step_ = false;  // some may have been sent
  const std::shared_ptr<FirstStepBuckets> first_step_ = std::make_shared<FirstStepBuckets>();
  const std::shared_ptr<bool> hook_threw_midway_ = std::make_shared<bool>(false);
  std::vector<std::size_t> arrivals_;  // of gradients
};

}  // namespace

std::unique_ptr<Reduction> make_bucketed_reduction(const ModelTensors& model,
                                                   const comm::Group& group,
                                                   const DistributedDataParallelOptions& options,
                                                   const Divisor& divisor) {
  return std::make_unique<BucketedReduction>(model, group, options, divisor);
}

}  // namespace semitone::parallel::detail

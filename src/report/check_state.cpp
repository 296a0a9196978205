#include "src/report/check_state.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <fmt/format.h>

#include <algorithm>

namespace semitone::report {
namespace {

constexpr auto kCheck = "report.nonfinite_check";
// Graphs that live longer lose the names of their oldest operators, and nothing else.
constexpr std::size_t kMostForwardOps = 1 << 17;

std::uint64_t next_epoch() {
  static std::atomic<std::uint64_t> epoch{0};
  return ++epoch;
}

const c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.storage().unsafeGetStorageImpl();
}

bool is_registered(const std::string& name) {
  for (const c10::OperatorName& op : c10::Dispatcher::singleton().getAllOpNames()) {
    const std::string base = without_aten(op.name);
    if (name == base || name == base + "." + op.overload_name) return true;
  }
  return false;
}

}  // namespace

void KnownStorages::add(const at::Tensor& tensor, Kinds kinds) {
  if (storages_.size() >= sweep_at_) sweep();
  const auto [known, is_new] = storages_.try_emplace(
      storage_of(tensor), Known{tensor.storage().getWeakStorageImpl(), kinds});
  if (!is_new) known->second.kinds |= kinds;
}

Kinds KnownStorages::find(const at::Tensor& tensor) const {
  const auto found = storages_.find(storage_of(tensor));
  return found == storages_.end() ? Kinds{0} : found->second.kinds;
}

void KnownStorages::sweep() {
  std::erase_if(storages_, [](const auto& known) { return known.second.storage.expired(); });
  sweep_at_ = std::max<std::size_t>(64, 2 * storages_.size());
}

CheckState::CheckState(const NonFiniteCheckOptions& options)
    : options_(options), epoch_(next_epoch()), step_(options.first_step()) {
  if (options.every() < 1)
    throw Error(kCheck, "an interval of at least 1 step", fmt::format("{}", options.every()));
  for (const std::string& op : options.ignore()) {
    const std::string name = without_aten(op);
    if (!is_registered(name))
      throw Error(kCheck, "names of registered operators to ignore", "'" + op + "'",
                  "use ATen's names, as in findings");
    ignored_.insert(name);
  }
}

std::shared_ptr<CheckState> CheckState::looking() {
  auto* const state = static_cast<CheckState*>(c10::ThreadLocalDebugInfo::get(kCheckState));
  if (state == nullptr || !state->is_looking()) return nullptr;
  return state->shared_from_this();
}

bool CheckState::ignores(const OperatorInfo& op) const {
  return !ignored_.empty() &&
         (ignored_.contains(op.name) || ignored_.contains(without_overload(op.name)));
}

void CheckState::add_model(const torch::nn::Module& model, const std::string& prefix) {
  const std::lock_guard lock(mutex_);
  names_.add(model, prefix);
}

bool CheckState::is_due() const {
  return (step_ - options_.first_step()) % options_.every() == 0;
}

void CheckState::next_step() {
  const std::lock_guard lock(mutex_);
  ++step_;
  epoch_ = next_epoch();
  names_.refresh();
  producers_.clear();
  forward_ops_.clear();
  finding_.reset();
  failure_.reset();
  is_looking_ = is_due();
}

const ParameterNames::Entry* CheckState::entry_of(const at::Tensor& tensor) const {
  const std::lock_guard lock(mutex_);
  return names_.find(tensor);
}

void CheckState::add_forward_op(const NodeId& node, const ForwardOp& op) {
  const std::lock_guard lock(mutex_);
  if (forward_ops_.size() >= kMostForwardOps)
    forward_ops_.erase(forward_ops_.begin(), std::next(forward_ops_.begin(), kMostForwardOps / 2));
  forward_ops_.insert_or_assign(node, op);
}

ForwardOp CheckState::forward_op(const NodeId& node) const {
  const std::lock_guard lock(mutex_);
  const auto found = forward_ops_.find(node);
  return found == forward_ops_.end() ? ForwardOp{} : found->second;
}

void CheckState::add_producer(const torch::autograd::Node& node, const Producer& producer) {
  const std::lock_guard lock(mutex_);
  producers_.erase(&node);  // it has got its gradients
  for (const torch::autograd::Edge& edge : node.next_edges()) {
    if (!edge.is_valid()) continue;
    Producers& producers = producers_[edge.function.get()];
    if (producers.receiver.expired()) producers = {WeakNodePtr(edge.function), {}};
    producers.all.push_back(producer);
  }
}

const std::vector<Producer>* CheckState::producers_for(
    const torch::autograd::Node* receiver) const {
  const auto found = producers_.find(receiver);
  if (found == producers_.end() || found->second.receiver.expired()) return nullptr;
  return &found->second.all;
}

std::optional<Producer> CheckState::producer_of(const torch::autograd::Node& receiver) const {
  const std::lock_guard lock(mutex_);
  const auto* const producers = producers_for(&receiver);
  return producers == nullptr ? std::nullopt : std::optional(producers->back());
}

std::vector<Producer> CheckState::producers_beside(const torch::autograd::Node& node) const {
  const std::lock_guard lock(mutex_);
  std::vector<Producer> all;
  for (const torch::autograd::Edge& edge : node.next_edges()) {
    const auto* const producers = producers_for(edge.function.get());
    if (producers != nullptr) all.insert(all.end(), producers->begin(), producers->end());
  }
  return all;
}

void CheckState::add_known(const at::Tensor& tensor, Kinds kinds) {
  const std::lock_guard lock(mutex_);
  known_.add(tensor, kinds);
}

Kinds CheckState::known_kinds(const at::Tensor& tensor) const {
  const std::lock_guard lock(mutex_);
  return known_.find(tensor);
}

void CheckState::found(NonFiniteFinding finding) {
  const std::lock_guard lock(mutex_);
  if (finding_.has_value()) return;
  finding.step = step_;
  finding.rank = options_.rank();
  finding_ = std::move(finding);
  is_looking_ = false;
}

void CheckState::failed(const std::string& why) {
  const std::lock_guard lock(mutex_);
  if (!failure_.has_value()) failure_ = why;
  is_looking_ = false;
}

std::optional<NonFiniteFinding> CheckState::finding() const {
  const std::lock_guard lock(mutex_);
  return finding_;
}

std::optional<std::string> CheckState::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

}  // namespace semitone::report

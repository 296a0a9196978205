#include "src/recompute/surroundings.h"

#include "semitone/core/error.h"
#include "src/core/capture_scope.h"
#include "src/core/expanded.h"

#include <ATen/Context.h>
#include <c10/core/GradMode.h>
#include <c10/util/ScopeExit.h>
#include <c10/util/hash.h>

#include <algorithm>
#include <functional>
#include <mutex>
#include <string_view>

namespace semitone::nn {
namespace {

at::Tensor state_of(at::Generator generator) {
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

void set_state(at::Generator& generator, const at::Tensor& state) {
  const std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

// Elements of a buffer of which a copy is kept in any case: to compare those of a device, the host
// must wait for it.
constexpr std::int64_t kSmall = 1 << 16;

std::size_t hash_of(const at::Tensor& state) {
  return std::hash<std::string_view>()(
      {static_cast<const char*>(state.const_data_ptr()), state.nbytes()});
}

// Those that are known, and the places of parameters, and of their views, among the inputs.
std::shared_ptr<ReplicaParameters> with_places(const std::shared_ptr<ReplicaParameters>& known,
                                               std::span<const at::Tensor> inputs,
                                               std::span<const at::Tensor> places) {
  std::shared_ptr<ReplicaParameters> result;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i].defined() || places[i].is_same(inputs[i])) continue;
    const at::Tensor root = inputs[i].is_view() ? at::Tensor(inputs[i]._base()) : inputs[i];
    const bool is_copy = known != nullptr && known->originals.contains(root.unsafeGetTensorImpl());
    if (!root.is_leaf() && !is_copy) continue;
    if (result == nullptr) {
      result = known == nullptr ? std::make_shared<ReplicaParameters>()
                                : std::make_shared<ReplicaParameters>(*known);
    }
    result->originals[places[i].unsafeGetTensorImpl()] = result->original_of(root);
    result->copies.push_back(places[i]);
  }
  return result == nullptr ? known : result;
}

}  // namespace

AutocastRegions::AutocastRegions()
    : state_(amp::AutocastState::current().with_own_cache()),
      replica_(ReplicaParameters::current()) {
  for (const c10::DeviceType device : at::autocast::_AUTOCAST_SUPPORTED_DEVICES) {
    if (at::autocast::is_autocast_enabled(device) && !state_.has_region(device))
      libtorch_regions_.emplace_back(device, at::autocast::get_autocast_dtype(device));
  }
}

AutocastRegions::Scope::Scope(const AutocastRegions& regions, std::span<const at::Tensor> inputs,
                              std::span<const at::Tensor> places)
    : replica_(kReplicaState, with_places(regions.replica_, inputs, places)),
      regions_(regions.state_.enter()) {
  for (const auto& [device, dtype] : regions.libtorch_regions_) {
    enabled_.emplace_back(device, at::autocast::get_autocast_dtype(device));
    at::autocast::set_autocast_enabled(device, true);
    at::autocast::set_autocast_dtype(device, dtype);
  }
}

AutocastRegions::Scope::~Scope() {
  for (const auto& [device, dtype] : enabled_) {
    at::autocast::set_autocast_enabled(device, false);
    at::autocast::set_autocast_dtype(device, dtype);
  }
}

RngStates::RngStates(const std::vector<at::Tensor>& tensors) {
  std::vector<c10::Device> devices{c10::kCPU};
  for (const at::Tensor& tensor : tensors) {
    if (tensor.defined() && !tensor.is_meta() &&
        std::ranges::find(devices, tensor.device()) == devices.end())
      devices.push_back(tensor.device());
  }
  if (devices.size() > 1 && CaptureScope::is_active()) {
    throw Error("nn.checkpoint", "preserve_rng_state(false) in amp::CapturedStep",
                "true: a CUDA graph cannot copy the states of generators",
                "set it to false for functions without random numbers, or train without either");
  }
  for (const c10::Device device : devices) {
    at::Generator generator = at::globalContext().defaultGenerator(device);
    states_.emplace_back(generator, state_of(generator));
  }
}

bool RngStates::note_end() {
  bool drawn = false;
  for (const auto& [generator, state] : states_) {
    ends_.push_back(hash_of(state_of(generator)));
    drawn = drawn || ends_.back() != hash_of(state);
  }
  return drawn;
}

std::size_t RngStates::hash() const {
  std::size_t all = 0;
  for (const auto& [generator, state] : states_)
    all = c10::hash_combine(all, hash_of(state_of(generator)));
  return all;
}

bool RngStates::are_at_end() const {
  for (std::size_t i = 0; i < states_.size(); ++i) {
    if (hash_of(state_of(states_[i].first)) != ends_[i]) return false;
  }
  return true;
}

RngStates::Scope::Scope(const RngStates& states) : before_(states.states_) {
  for (auto& [generator, state] : before_) {
    const at::Tensor wanted = state;
    state = state_of(generator);
    set_state(generator, wanted);
  }
}

RngStates::Scope::~Scope() {
  for (auto& [generator, state] : before_) set_state(generator, state);
}

BufferValues::BufferValues(const std::vector<at::Tensor>& tensors) {
  const at::NoGradGuard no_grad;
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined()) continue;
    // Expanded: no operator can write to it, but perhaps to a tensor that has its memory too.
    if (is_expanded(tensor)) {
      if (!tensor.is_inference()) only_read_.emplace_back(tensor);
      continue;
    }
    const bool is_watched = tensor.numel() > kSmall && !tensor.is_inference();
    values_.push_back({tensor.unsafeGetTensorImpl(), tensor.variable_data(),
                       tensor.detach().clone(), tensor.unsafeGetTensorImpl()->version_counter(),
                       is_watched ? std::optional<SeenTensor>(tensor) : std::nullopt});
  }
}

void BufferValues::note_end() {
  const bool is_captured = CaptureScope::is_active();
  std::erase_if(only_read_, [](const SeenTensor& seen) { return seen.changed().has_value(); });
  std::erase_if(values_, [&](const Value& one) {
    // A graph cannot wait for the host.
    if (one.tensor.numel() <= kSmall || (is_captured && !one.tensor.is_cpu())) return false;
    if (one.original.has_value() && one.original->changed().has_value()) return false;
    if (!at::equal(one.tensor, one.value)) return false;
    if (one.original.has_value()) only_read_.push_back(*one.original);
    return true;
  });
}

namespace {

std::uint32_t version_in(const c10::VariableVersion& counter) {
  return counter.enabled() ? counter.current_version() : 0;  // inference tensors have none
}

BufferValues::Scope*& innermost_scope() {
  static thread_local BufferValues::Scope* scope = nullptr;
  return scope;
}

}  // namespace

BufferValues::Scope::Scope(const BufferValues& values) : enclosing_(innermost_scope()) {
  const at::NoGradGuard no_grad;
  auto undo = c10::make_scope_exit([this] { put_back(); });
  for (const Value& one : values.values_) {
    before_.push_back({one.identity, one.tensor, one.tensor.clone(), one.counter,
                       version_in(one.counter), std::nullopt});
    one.tensor.copy_(one.value);
  }
  undo.release();
  innermost_scope() = this;
}

void BufferValues::Scope::note_end_of_run() {
  for (Earlier& one : before_) {
    one.version = version_in(one.counter);
    for (Scope* outer = enclosing_; outer != nullptr; outer = outer->enclosing_)
      outer->note_inner_run(one.identity, *one.version - one.begun);
  }
}

void BufferValues::Scope::note_inner_run(const c10::TensorImpl* identity, std::uint32_t writes) {
  for (Earlier& one : before_)
    if (one.identity == identity && one.version.has_value()) *one.version += writes;
}

BufferValues::Scope::~Scope() {
  innermost_scope() = enclosing_;
  put_back();
}

void BufferValues::Scope::put_back() const {
  const at::NoGradGuard no_grad;
  // In reverse: of memory that is listed twice, the first entry has the value from before.
  for (auto one = before_.rbegin(); one != before_.rend(); ++one) {
    if (!one->version.has_value() || *one->version == version_in(one->counter))
      one->tensor.copy_(one->value);
  }
}

ModuleModes::ModuleModes(const std::shared_ptr<torch::nn::Module>& module) {
  if (module == nullptr) return;
  for (const auto& part : module->modules()) modes_.emplace_back(part, part->is_training());
}

bool ModuleModes::have_changed() const {
  return std::ranges::any_of(
      modes_, [](const auto& mode) { return mode.first->is_training() != mode.second; });
}

}  // namespace semitone::nn

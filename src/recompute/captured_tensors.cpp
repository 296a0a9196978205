#include "src/recompute/captured_tensors.h"

#include "src/core/fingerprint.h"
#include "src/core/operator_inputs.h"
#include "src/nn/kernel_reads.h"
#include "src/recompute/surroundings.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <unordered_map>
#include <utility>

namespace semitone::nn {
namespace {

thread_local CapturedTensors* innermost = nullptr;

template <typename Use>
void for_tensors(const c10::IValue& value, const Use& use) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) use(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) {
      if (tensor.defined()) use(tensor);
    }
  } else if (value.isList()) {  // of optional tensors
    for (const c10::IValue& element : value.toListRef()) for_tensors(element, use);
  }
}

// Whether an operator may draw random numbers. By the address of its name, which is that of its
// schema.
bool is_seeded(const at::RecordFunction& record) {
  thread_local std::unordered_map<const char*, bool> known;
  const auto [place, is_new] = known.try_emplace(record.name(), false);
  if (!is_new) return place->second;
  const auto name = record.operator_name();
  if (!name.has_value()) return false;
  const auto op = c10::Dispatcher::singleton().findOp(*name);
  place->second = op.has_value() && op->hasTag(at::Tag::nondeterministic_seeded);
  return place->second;
}

// The generators' states before an operator that may draw: dropout draws nothing in evaluation.
struct StatesBefore final : at::ObserverContext {
  explicit StatesBefore(std::size_t hash_) : hash(hash_) {}
  std::size_t hash;
};

}  // namespace

SeenTensor::SeenTensor(const at::Tensor& tensor)
    : tensor_(tensor.getIntrusivePtr()),
      version_(tensor._version()),
      fingerprint_(fingerprint_of(tensor)) {}

std::optional<at::Tensor> SeenTensor::changed() const {
  const auto alive = tensor_.lock();
  if (!alive) return std::nullopt;
  at::Tensor now(alive);
  if (now._version() == version_ && fingerprint_of(now) == fingerprint_) return std::nullopt;
  return now;
}

CapturedTensors::CapturedTensors(const std::vector<at::Tensor>& known, const RngStates* random)
    : outer_(std::exchange(innermost, this)), random_(random) {
  if (outer_ == nullptr) {
    handle_ = at::addThreadLocalCallback(at::RecordFunctionCallback(start, end)
                                             .needsInputs(true)
                                             .needsOutputs(true)
                                             .scopes({at::RecordScope::FUNCTION}));
    on_kernel_read() = read_by_kernel;
    on_kernel_draw() = drawn_by_kernel;
  }
  for (const at::Tensor& tensor : known) {
    if (tensor.defined()) see_result(tensor);
  }
}

CapturedTensors::~CapturedTensors() {
  if (outer_ == nullptr) {
    at::removeCallback(handle_);
    on_kernel_read() = nullptr;
    on_kernel_draw() = nullptr;
  }
  innermost = outer_;
}

std::vector<SeenTensor> CapturedTensors::unchanged() const {
  std::vector<SeenTensor> result;
  for (const auto& [address, seen] : captured_) {
    if (!known_.contains(address) && seen.exists() && !seen.changed().has_value())
      result.push_back(seen);
  }
  return result;
}

std::optional<at::Tensor> CapturedTensors::changed() const {
  for (const auto& [address, seen] : captured_) {
    if (known_.contains(address)) continue;
    if (auto tensor = seen.changed()) return tensor;
  }
  return std::nullopt;
}

std::unique_ptr<at::ObserverContext> CapturedTensors::start(const at::RecordFunction& record) {
  for (CapturedTensors* each = innermost; each != nullptr; each = each->outer_) {
    for (const c10::IValue& input : inputs_of(record))
      for_tensors(input, [&](const at::Tensor& tensor) { each->see_argument(tensor); });
  }
  if (innermost->draws_ || innermost->random_ == nullptr || !is_seeded(record)) return nullptr;
  return std::make_unique<StatesBefore>(innermost->random_->hash());
}

void CapturedTensors::end(const at::RecordFunction& record, at::ObserverContext* context) {
  const auto* const before = dynamic_cast<const StatesBefore*>(context);
  if (before != nullptr && innermost->random_ != nullptr &&
      before->hash != innermost->random_->hash())
    drawn_by_kernel();
  for (CapturedTensors* each = innermost; each != nullptr; each = each->outer_) {
    for (const c10::IValue& output : record.outputs())
      for_tensors(output, [&](const at::Tensor& tensor) { each->see_result(tensor); });
  }
}

void CapturedTensors::read_by_kernel(const at::Tensor& tensor) {
  for (CapturedTensors* each = innermost; each != nullptr; each = each->outer_)
    each->see_argument(tensor);
}

void CapturedTensors::drawn_by_kernel() {
  for (CapturedTensors* each = innermost; each != nullptr; each = each->outer_) each->draws_ = true;
}

void CapturedTensors::see_argument(const at::Tensor& tensor) {
  const c10::TensorImpl* const address = tensor.unsafeGetTensorImpl();
  if (known_.contains(address) || tensor.is_inference() || !tensor.has_storage()) return;
  captured_.emplace(address, tensor);
  if (!c10::GradMode::is_enabled() || !tensor.requires_grad() || !tensor.is_view()) return;
  const NodePtr& node = tensor.grad_fn();
  if (node != nullptr && std::ranges::find(nodes_of_views_, node) == nodes_of_views_.end())
    nodes_of_views_.push_back(node);
}

void CapturedTensors::see_result(const at::Tensor& tensor) {
  // Some operators return what they got, such as to().
  const auto captured = captured_.find(tensor.unsafeGetTensorImpl());
  if (captured != captured_.end() && !captured->second.changed().has_value()) return;
  known_.try_emplace(tensor.unsafeGetTensorImpl(), tensor.getIntrusivePtr());
}

}  // namespace semitone::nn

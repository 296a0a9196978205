#include "src/recompute/captured_tensors.h"

#include "src/core/fingerprint.h"
#include "src/core/operator_inputs.h"
#include "src/nn/kernel_reads.h"

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

CapturedTensors::CapturedTensors(const std::vector<at::Tensor>& known)
    : outer_(std::exchange(innermost, this)) {
  if (outer_ == nullptr) {
    handle_ = at::addThreadLocalCallback(at::RecordFunctionCallback(start, end)
                                             .needsInputs(true)
                                             .needsOutputs(true)
                                             .scopes({at::RecordScope::FUNCTION}));
    on_kernel_read() = read_by_kernel;
  }
  for (const at::Tensor& tensor : known) {
    if (tensor.defined()) see_result(tensor);
  }
}

CapturedTensors::~CapturedTensors() {
  if (outer_ == nullptr) {
    at::removeCallback(handle_);
    on_kernel_read() = nullptr;
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
  return nullptr;
}

void CapturedTensors::end(const at::RecordFunction& record, at::ObserverContext*) {
  for (CapturedTensors* each = innermost; each != nullptr; each = each->outer_) {
    for (const c10::IValue& output : record.outputs())
      for_tensors(output, [&](const at::Tensor& tensor) { each->see_result(tensor); });
  }
}

void CapturedTensors::read_by_kernel(const at::Tensor& tensor) {
  for (CapturedTensors* each = innermost; each != nullptr; each = each->outer_)
    each->see_argument(tensor);
}

void CapturedTensors::see_argument(const at::Tensor& tensor) {
  const c10::TensorImpl* const address = tensor.unsafeGetTensorImpl();
  if (known_.contains(address) || captured_.contains(address) || tensor.is_inference() ||
      !tensor.has_storage())
    return;
  captured_.emplace(address, tensor);
}

void CapturedTensors::see_result(const at::Tensor& tensor) {
  // Some operators return what they got, such as to().
  const auto captured = captured_.find(tensor.unsafeGetTensorImpl());
  if (captured != captured_.end() && !captured->second.changed().has_value()) return;
  known_.try_emplace(tensor.unsafeGetTensorImpl(), tensor.getIntrusivePtr());
}

}  // namespace semitone::nn

#include "src/checkpoint/archive.h"

#include "src/checkpoint/archive_code.h"
#include "src/core/state_mode.h"
#include "src/kernels/pinned.h"

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/jit/serialization/export.h>

#include <algorithm>
#include <utility>

namespace semitone::checkpoint {
namespace {

// An OutputArchive gives no access to what was written into it other than as a file, and making the
// file takes several times as long as copying its tensors. C++ allows an explicit instantiation to
// name a private member. If LibTorch renames it, this does not compile.
using ModuleOfArchive = torch::jit::Module torch::serialize::OutputArchive::*;
ModuleOfArchive module_member();

template <ModuleOfArchive member>
struct PrivateMember {
  friend ModuleOfArchive module_member() { return member; }
};
template struct PrivateMember<&torch::serialize::OutputArchive::module_>;

// Only a tensor with memory of its own can be copied as bytes.
bool has_plain_memory(const at::Tensor& tensor) {
  return tensor.layout() == c10::kStrided && !tensor.is_quantized() && tensor.has_storage() &&
         tensor.storage().data() != nullptr && !tensor.is_conj() && !tensor.is_neg();
}

// Copies a value with everything that it refers to. Nothing that the program may also refer to is
// changed.
class DeepCopy {
 public:
  using WhenOf = std::function<CopyBuffers::When(const c10::Storage&)>;

  DeepCopy(CopyBuffers& buffers, WhenOf when_of)
      : buffers_(buffers), when_of_(std::move(when_of)) {}

  torch::jit::ObjectPtr object(const torch::jit::ObjectPtr& original) {
    const auto [place, is_new] = objects_.try_emplace(original.get());
    if (!is_new) return place->second;
    torch::jit::ObjectPtr copy = original->copy();
    place->second = copy;
    for (std::size_t slot = 0; slot < copy->slots().size(); ++slot)
      copy->setSlot(slot, value(original->getSlot(slot)));
    return copy;
  }

 private:
  c10::IValue value(const c10::IValue& original) {
    if (original.isTensor()) return tensor(original.toTensor());
    if (original.isCustomClass()) return original.deepcopy();
    if (original.isObject()) return object(original.toObject());
    if (original.isList()) return list(original.toList());
    if (original.isGenericDict()) return dict(original.toGenericDict());
    if (original.isTuple()) return tuple(original.toTuple());
    return original.deepcopy();
  }

  at::Tensor tensor(const at::Tensor& original) {
    if (!original.defined()) return original;
    if (has_plain_memory(original)) return buffers_.copy_of(original, when_of_(original.storage()));
    return original.detach().to(c10::kCPU, /*non_blocking=*/false, /*copy=*/true);
  }

  c10::IValue list(const c10::List<c10::IValue>& original) {
    c10::impl::GenericList copy(original.elementType());
    copy.reserve(original.size());
    for (std::size_t i = 0; i < original.size(); ++i) copy.push_back(value(original.get(i)));
    return copy;
  }

  c10::IValue dict(const c10::impl::GenericDict& original) {
    c10::impl::GenericDict copy(original.keyType(), original.valueType());
    for (const auto& item : original) copy.insert(value(item.key()), value(item.value()));
    return copy;
  }

  c10::IValue tuple(const c10::intrusive_ptr<c10::ivalue::Tuple>& original) {
    std::vector<c10::IValue> elements;
    for (const c10::IValue& element : original->elements()) elements.push_back(value(element));
    return c10::ivalue::Tuple::createNamed(std::move(elements), original->type<c10::TupleType>());
  }

  CopyBuffers& buffers_;
  WhenOf when_of_;
  std::unordered_map<const void*, torch::jit::ObjectPtr> objects_;
};

}  // namespace

void CopyBuffers::finish() {
  now_.clear();
  later_.clear();
  for (auto& [address, copy] : copies_) used_.push_back(std::move(copy.bytes));
  copies_.clear();
}

void CopyBuffers::reuse() {
  finish();
  free_.clear();
  for (at::Tensor& bytes : used_) {
    const std::pair key(bytes.is_pinned(), bytes.numel());
    free_.emplace(key, std::move(bytes));
  }
  used_.clear();
}

at::Tensor CopyBuffers::take(std::int64_t size, c10::Device device) {
  const auto unused = free_.find({kernels::has_pinned_memory(device), size});
  if (unused == free_.end()) return kernels::empty_for_copy({size}, at::kByte, device);
  at::Tensor bytes = std::move(unused->second);
  free_.erase(unused);
  return bytes;
}

const at::Tensor& CopyBuffers::buffer_for(const at::Tensor& tensor, When when) {
  const c10::Storage& storage = tensor.storage();
  const c10::Device device = tensor.device();
  const auto size = static_cast<std::int64_t>(storage.nbytes());
  Copy& copy = copies_[storage.data()];
  // Changes of inference tensors are not counted.
  if (tensor.is_inference()) when = When::now;
  if (copy.bytes.defined() && copy.bytes.numel() >= size) {
    if (when == When::now) do_not_defer(copy.bytes);
    return copy.bytes;
  }
  if (copy.bytes.defined()) used_.push_back(std::move(copy.bytes));  // of a part of this memory
  copy.original = storage;
  const at::Tensor& bytes = copy.bytes = take(size, device);
  if (device.is_cpu()) {
    auto& copies = when == When::now ? now_ : later_;
    copies.push_back({storage, bytes, tensor.unsafeGetTensorImpl()->version_counter()});
  } else {
    const auto options = bytes.options().device(device).pinned_memory(false);
    bytes.copy_(at::empty({0}, options).set_(storage, 0, {size}, {1}));
  }
  return bytes;
}

at::Tensor CopyBuffers::copy_of(const at::Tensor& tensor, When when) {
  const StateMode mode;  // the memory is kept for other calls
  const at::Tensor& bytes = buffer_for(tensor, when);
  at::Tensor copy =
      at::empty({0}, tensor.options().device(c10::kCPU))
          .set_(bytes.storage(), tensor.storage_offset(), tensor.sizes(), tensor.strides());
  return copy.requires_grad_(tensor.requires_grad());
}

void CopyBuffers::do_not_defer(const at::Tensor& bytes) {
  const auto deferred = std::find_if(later_.begin(), later_.end(), [&](const PendingCopy& copy) {
    return copy.to.is_same(bytes);
  });
  if (deferred == later_.end()) return;
  now_.push_back(std::move(*deferred));
  later_.erase(deferred);
}

void CopyBuffers::copy_cpu_values() {
  copy_all(now_);
  now_.clear();
}

Archive::Archive(const torch::serialize::OutputArchive& archive)
    : module_(archive.*module_member()) {
  require_no_functions(module_);
}

void Archive::write(const Sink& sink) const {
  torch::jit::ExportModule(module_, sink);
}

Archive Archive::copied(CopyBuffers& buffers, CopyBuffers::When when_steady) const {
  const auto when_of = [&](const c10::Storage& storage) {
    return is_steady_ && is_steady_(storage) ? when_steady : CopyBuffers::When::now;
  };
  Archive copy(torch::jit::Module(DeepCopy(buffers, when_of).object(module_._ivalue())));
  buffers.copy_cpu_values();
  return copy;
}

}  // namespace semitone::checkpoint

#include "src/checkpoint/archive.h"

#include "src/kernels/copy_bytes.h"
#include "src/kernels/pinned.h"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/jit/serialization/export.h>

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
  return tensor.defined() && tensor.layout() == c10::kStrided && !tensor.is_quantized() &&
         tensor.has_storage() && tensor.storage().data() != nullptr && !tensor.is_conj() &&
         !tensor.is_neg();
}

// Replaces the values of an object that only the archive has.
void copy_values(const torch::jit::ObjectPtr& object, CopyBuffers& buffers) {
  for (std::size_t slot = 0; slot < object->slots().size(); ++slot) {
    const c10::IValue& value = object->getSlot(slot);
    if (value.isObject()) {
      copy_values(value.toObject(), buffers);
    } else if (value.isTensor() && has_plain_memory(value.toTensor())) {
      object->setSlot(slot, buffers.copy(value.toTensor()));
    } else if (!value.isTensor() || value.toTensor().defined()) {
      object->setSlot(slot, value.deepcopy());
    }
  }
}

}  // namespace

void CopyBuffers::begin() {
  free_.clear();
  for (auto& [address, copy] : copies_) free_.emplace(copy.bytes.numel(), std::move(copy.bytes));
  copies_.clear();
}

const at::Tensor& CopyBuffers::copy_of(const c10::Storage& storage, c10::Device device) {
  const auto [place, is_new] = copies_.try_emplace(storage.data(), Copy{storage, {}});
  at::Tensor& bytes = place->second.bytes;
  const auto size = static_cast<std::int64_t>(storage.nbytes());
  if (!is_new && bytes.numel() >= size) return bytes;
  const auto unused = free_.find(size);
  if (unused != free_.end()) {
    bytes = std::move(unused->second);
    free_.erase(unused);
  } else {
    bytes = kernels::empty_for_copy({size}, at::kByte, device);
  }
  if (device.is_cpu()) {
    kernels::copy_bytes(storage.data(), bytes.data_ptr(), size);
  } else {
    bytes.copy_(at::empty({0}, bytes.options().device(device)).set_(storage, 0, {size}, {1}));
  }
  return bytes;
}

at::Tensor CopyBuffers::copy(const at::Tensor& tensor) {
  const c10::NoGradGuard no_grad;
  const at::Tensor& bytes = copy_of(tensor.storage(), tensor.device());
  at::Tensor copy =
      at::empty({0}, tensor.options().device(c10::kCPU))
          .set_(bytes.storage(), tensor.storage_offset(), tensor.sizes(), tensor.strides());
  return copy.requires_grad_(tensor.requires_grad());
}

Archive::Archive(const torch::serialize::OutputArchive& archive)
    : module_(archive.*module_member()) {}

void Archive::write(const Sink& sink) const {
  torch::jit::ExportModule(module_, sink);
}

void Archive::copy_tensors(CopyBuffers& buffers) {
  if (is_script_) {
    module_ = module_.deepcopy();
  } else {
    copy_values(module_._ivalue(), buffers);
  }
}

}  // namespace semitone::checkpoint

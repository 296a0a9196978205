#pragma once

#include "src/checkpoint/deferred_copies.h"
#include "src/checkpoint/files.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/serialize/archive.h>

#include <cstdint>
#include <functional>
#include <map>
#include <unordered_map>
#include <utility>
#include <vector>

// What an entry saves, as LibTorch's archives.
namespace semitone::checkpoint {

// Copies of tensors in CPU memory, pinned if they come from a device. The memory is kept for the
// next checkpoint, since the first write to a new page takes longer than the copy.
class CopyBuffers {
 public:
  enum class When { now, later };

  // Returns a copy of a tensor. Tensors that share memory have copies that share memory. Values on
  // devices are copied at once. Values on the CPU are copied by the next copy_cpu_values(), all
  // together, so that threads are started once, or are among the next deferred(), if all tensors of
  // the memory may be copied later; until then the copy is uninitialised.
  at::Tensor copy_of(const at::Tensor& tensor, When when);
  void copy_cpu_values();
  std::vector<PendingCopy> deferred() { return std::exchange(later_, {}); }

  // Releases the tensors that were copied, which copy_of() keeps: another one could get their address.
  void finish();

  // Makes the memory of the last copies available, and frees what they had not used. No copy may be
  // in use.
  void reuse();

 private:
  struct Copy {
    c10::Storage original;
    at::Tensor bytes;
  };

  at::Tensor take(std::int64_t size, c10::Device device);
  const at::Tensor& buffer_for(const at::Tensor& tensor, When when);
  // Lets copy_cpu_values() make a copy that was to be made later.
  void do_not_defer(const at::Tensor& bytes);

  std::unordered_map<const void*, Copy> copies_;  // by the address of the original
  std::vector<PendingCopy> now_;
  std::vector<PendingCopy> later_;
  std::vector<at::Tensor> used_;
  std::multimap<std::pair<bool, std::int64_t>, at::Tensor> free_;  // by pinned and size
};

// The content of a file. It shares its tensors with the object that is saved.
class Archive {
 public:
  // Error if it has objects with functions, which resume() would refuse.
  explicit Archive(const torch::serialize::OutputArchive& archive);
  explicit Archive(torch::jit::Module script) : module_(std::move(script)) {}

  bool is_empty() const { return module_.type()->numAttributes() == 0; }

  // Says which storages only the step of an optimizer changes. By default none.
  using IsSteady = std::function<bool(const c10::Storage&)>;
  void set_steady(IsSteady is_steady) { is_steady_ = std::move(is_steady); }

  // Writes the bytes of a file that LibTorch's InputArchive or torch::jit::load reads.
  void write(const Sink& sink) const;

  // Returns the same content with copies of all tensors, on the CPU. `when_steady`: when storages
  // are copied that only the step of an optimizer changes. Others are copied now.
  Archive copied(CopyBuffers& buffers, CopyBuffers::When when_steady) const;

 private:
  torch::jit::Module module_;
  IsSteady is_steady_;
};

}  // namespace semitone::checkpoint

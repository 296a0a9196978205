#pragma once

#include "src/checkpoint/files.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/serialize/archive.h>

#include <cstdint>
#include <unordered_map>
#include <utility>

// The content of a file, before it is one.
namespace semitone::checkpoint {

// Copies of tensors in CPU memory, pinned if they come from a device. The memory is kept for the
// next checkpoint, since the first write to a new page takes longer than the copy.
class CopyBuffers {
 public:
  // Makes the memory of the last copies available for new ones, and frees what they did not use.
  // No copy may be in use.
  void begin();

  // Tensors that share memory have copies that share memory.
  at::Tensor copy(const at::Tensor& tensor);

 private:
  // Bytes with the values of a storage.
  const at::Tensor& copy_of(const c10::Storage& storage, c10::Device device);

  // By the address of the original's memory. The original is kept, so that no other one can get
  // that address meanwhile.
  struct Copy {
    c10::Storage original;
    at::Tensor bytes;
  };
  std::unordered_map<const void*, Copy> copies_;
  std::unordered_multimap<std::int64_t, at::Tensor> free_;  // by size
};

// What an entry saves.
class Archive {
 public:
  // Shares the tensors that were written into the archive.
  explicit Archive(const torch::serialize::OutputArchive& archive);
  // Shares the module's tensors.
  explicit Archive(torch::jit::Module script) : module_(std::move(script)), is_script_(true) {}

  // Writes the bytes of a file that LibTorch's InputArchive or torch::jit::load reads.
  void write(const Sink& sink) const;

  // Gives the archive copies of its tensors, which nobody else changes.
  void copy_tensors(CopyBuffers& buffers);

 private:
  torch::jit::Module module_;
  bool is_script_ = false;
};

}  // namespace semitone::checkpoint

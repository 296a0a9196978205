#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/DimVector.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>

namespace semitone::amp {

// What a weight was converted to.
enum class Conversion : std::uint8_t {
  fp16,
  bf16,
  fp32_by_fp16,  // rounded to fp16 and back: what emulated fp16 computes with
  fp32_by_bf16,
};

// The casts of weights in a region: each weight is converted once, however often it is used.
// Thread-safe. An entry is only as good as the weight that it was made from. It is used while the
// weight has the same version counter, storage and layout, and while nobody wrote to the converted
// tensor; and it is made anew with a gradient if it was made without one (under no_grad) and one is
// needed now.
//
// torch::optim::SGD writes through tensor.data(), which no counter shows. It needs a gradient for
// that. So a backward pass through any cast here forgets them all, and nothing is kept of a weight
// that has a gradient: the optimizer may step at any moment then. Gradients that come otherwise, by
// hand or from a backward pass with casts off, are gone again after zero_grad(); the weight shows
// it: on a CPU a fingerprint of some elements has to be the same, too.
class CastCache : public std::enable_shared_from_this<CastCache> {
 public:
  // Whether the casts of a tensor may be kept: a strided leaf without a gradient.
  static bool can_keep(const at::Tensor& tensor);

  // The cached conversion of a tensor that can_keep(), or convert(weight), which is then
  // remembered.
  template <typename Convert>
  at::Tensor get(const at::Tensor& weight, Conversion conversion, bool* hit, Convert&& convert) {
    at::Tensor found = find(weight, conversion);
    *hit = found.defined();
    if (*hit) return found;
    Entry entry = entry_for(weight);
    entry.converted = convert(weight);  // outside the lock: runs operators
    entry.converted_version = version_of(entry.converted);
    forget_after_backward(entry.converted);
    at::Tensor converted = entry.converted;
    insert({weight.unsafeGetTensorImpl(), conversion}, std::move(entry));
    return converted;
  }

  void clear();

 private:
  struct Key {
    const c10::TensorImpl* impl;
    Conversion conversion;
    bool operator==(const Key&) const = default;
  };
  struct Hash {
    std::size_t operator()(const Key& key) const {
      return std::hash<const void*>()(key.impl) ^ static_cast<std::size_t>(key.conversion);
    }
  };
  struct Entry {
    // Weak references: they free the weight's memory, but no other tensor or storage can appear at
    // the same addresses while they live.
    c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> weight;
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    const void* data;
    c10::DimVector sizes;
    c10::DimVector strides;
    std::int64_t version;
    std::uint64_t fingerprint;
    at::Tensor converted;
    std::optional<std::int64_t> converted_version;
  };

  static constexpr std::size_t kSweepAbove = 64;

  static std::optional<std::int64_t> version_of(const at::Tensor& tensor);
  static std::uint64_t fingerprint_of(const at::Tensor& weight);
  static Entry entry_for(const at::Tensor& weight);  // without the conversion
  void forget_after_backward(const at::Tensor& converted);
  at::Tensor find(const at::Tensor& weight, Conversion conversion);
  void insert(const Key& key, Entry entry);

  std::mutex mutex_;
  std::unordered_map<Key, Entry, Hash> entries_;
  std::size_t sweep_at_ = kSweepAbove;
};

}  // namespace semitone::amp

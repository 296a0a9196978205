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
#include <vector>

namespace semitone::amp {

// The dtype that a weight was converted to.
enum class Conversion : std::uint8_t {
  fp16,
  bf16,
  fp32_by_fp16,  // rounded to fp16 and back: what emulated fp16 computes with
  fp32_by_bf16,
};

// The casts of weights in a region. Each weight is converted once, however often it is used.
// Thread-safe. An entry is valid while the weight has the same version counter, storage and layout,
// and while the converted tensor has not been written to. An entry that was made under no_grad is
// made again when a gradient is needed.
//
// torch::optim::SGD writes through tensor.data(), which no counter shows. Three measures cover
// that. A backward pass through any cast drops all entries. The kernels of add_ and sub_, with
// which SGD steps, report the memory that they write to. On a CPU a fingerprint of some of the
// weight's elements must match. A weight may have a gradient: during gradient accumulation all of
// them do.
class CastCache : public std::enable_shared_from_this<CastCache> {
 public:
  // Whether the casts of a tensor may be kept: a strided leaf.
  static bool can_keep(const at::Tensor& tensor);

  // Returns the cached conversion of a tensor for which can_keep() holds. If there is none, it
  // calls convert(weight) and caches the result.
  template <typename Convert>
  at::Tensor get(const at::Tensor& weight, Conversion conversion, bool* hit, Convert&& convert) {
    at::Tensor found = find(weight, conversion);
    *hit = found.defined();
    if (*hit) return found;
    Entry entry = entry_for(weight);
    entry.converted = convert(weight);  // outside the lock: runs operators
    entry.converted_version = version_of(entry.converted);
    erase_after_backward(entry.converted);
    at::Tensor converted = entry.converted;
    insert({weight.unsafeGetTensorImpl(), conversion}, std::move(entry));
    return converted;
  }

  void clear();

  // Drops the casts of weights in the memory of a tensor that is written to. Costs nothing if there
  // are none.
  void erase_memory_of(const at::Tensor& written);

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
  static Entry entry_for(const at::Tensor& weight);  // without the conversion
  static bool is_unused(const Entry& entry);
  // Removes the entries for which a condition holds from the map.
  template <typename Condition>
  void erase_locked(const Condition& condition, std::vector<Entry>& erased) {
    for (auto entry = entries_.begin(); entry != entries_.end();) {
      if (!condition(entry->second)) {
        ++entry;
        continue;
      }
      erased.push_back(std::move(entry->second));
      entry = entries_.erase(entry);
    }
  }
  void erase_after_backward(const at::Tensor& converted);
  at::Tensor find(const at::Tensor& weight, Conversion conversion);
  void insert(const Key& key, Entry entry);

  std::mutex mutex_;
  std::unordered_map<Key, Entry, Hash> entries_;
  std::size_t sweep_at_ = kSweepAbove;
};

}  // namespace semitone::amp

#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <mutex>
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

// The casts of weights in a region: each weight is converted once, however often it is used. An
// entry is only as good as the weight that it was made from: it is used while the weight has the
// same version counter and memory, and made anew with a gradient if it was made without one (under
// no_grad) and one is needed now.
class CastCache {
 public:
  // The cached conversion of a leaf tensor, or convert(weight), which is then remembered.
  template <typename Convert>
  at::Tensor get(const at::Tensor& weight, Conversion conversion, bool* hit, Convert&& convert) {
    {
      const std::lock_guard lock(mutex_);
      if (const Entry* entry = find(weight, conversion)) {
        *hit = true;
        return entry->converted;
      }
    }
    *hit = false;
    Entry entry = entry_for(weight);
    entry.converted = convert(weight);  // outside the lock: runs operators
    const std::lock_guard lock(mutex_);
    return entries_
        .insert_or_assign(Key{weight.unsafeGetTensorImpl(), conversion}, std::move(entry))
        .first->second.converted;
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
    c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>
        weight;  // reserves the address
    std::uint32_t version;
    const void* data;
    at::Tensor converted;
  };

  const Entry* find(const at::Tensor& weight, Conversion conversion) const;
  static Entry entry_for(const at::Tensor& weight);  // without the conversion

  std::mutex mutex_;
  std::unordered_map<Key, Entry, Hash> entries_;
};

}  // namespace semitone::amp

#include "src/autocast/cast_cache.h"

#include "src/core/fingerprint.h"

#include <ATen/autocast_mode.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/UndefinedTensorImpl.h>

#include <algorithm>
#include <vector>

namespace semitone::amp {
bool CastCache::can_keep(const at::Tensor& tensor) {
  return tensor.is_leaf() && !tensor.is_view() && !tensor.is_inference() &&
         tensor.layout() == at::kStrided && tensor.has_storage();
}

std::optional<std::int64_t> CastCache::version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? std::nullopt : std::optional(tensor._version());
}

CastCache::Entry CastCache::entry_for(const at::Tensor& weight) {
  return {
      c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>(weight.getIntrusivePtr()),
      weight.storage().getWeakStorageImpl(),
      weight.const_data_ptr(),
      c10::DimVector(weight.sizes()),
      c10::DimVector(weight.strides()),
      weight._version(),
      fingerprint_of(weight),
      {},
      {}};
}

void CastCache::erase_after_backward(const at::Tensor& converted) {
  if (!converted.requires_grad()) return;
  converted.register_hook([cache = weak_from_this()](const at::Tensor&) {
    if (const auto alive = cache.lock()) alive->clear();
    at::autocast::clear_cache();
  });
}

at::Tensor CastCache::find(const at::Tensor& weight, Conversion conversion) {
  const std::lock_guard lock(mutex_);
  const auto found = entries_.find({weight.unsafeGetTensorImpl(), conversion});
  if (found == entries_.end()) return {};
  const Entry& entry = found->second;
  const bool weight_as_it_was =
      entry.version == weight._version() && entry.data == weight.const_data_ptr() &&
      entry.storage._unsafe_get_target() == weight.storage().unsafeGetStorageImpl() &&
      weight.sizes().equals(entry.sizes) && weight.strides().equals(entry.strides) &&
      entry.fingerprint == fingerprint_of(weight);
  if (!weight_as_it_was) return {};

  const at::Tensor& converted = entry.converted;
  if (entry.converted_version != version_of(converted)) return {};
  // A cast made in inference mode could not be saved for a backward pass.
  if (converted.is_inference() && !c10::InferenceMode::is_enabled()) return {};
  const bool needs_grad = c10::GradMode::is_enabled() && weight.requires_grad();
  if (needs_grad && !converted.requires_grad()) return {};
  // Conversely, a weight that was frozen since must not get a gradient through an old cast.
  if (!weight.requires_grad() && converted.requires_grad()) return {};
  return converted;
}

void CastCache::insert(const Key& key, Entry entry) {
  std::vector<Entry> erased;  // this and the entry replaced: destroyed after the lock is released
  const std::lock_guard lock(mutex_);
  const auto [place, added] = entries_.try_emplace(key, std::move(entry));
  if (!added) std::swap(place->second, entry);
  if (entries_.size() < sweep_at_) return;
  erase_locked(is_unused, erased);
  sweep_at_ = std::max(kSweepAbove, 2 * entries_.size());
}

// A cast with a gradient holds its weight through the node that accumulates the weight's gradient.
// If nothing but such casts holds the weight, and nothing but the cache holds this cast, the
// program can reach neither.
bool CastCache::is_unused(const Entry& entry) {
  const std::size_t weight_uses = entry.weight.use_count();
  return weight_uses == 0 ||
         (weight_uses == 1 && entry.converted.requires_grad() && entry.converted.use_count() == 1);
}

void CastCache::erase_memory_of(const at::Tensor& written) {
  if (!written.has_storage() || written.storage().use_count() == 1) return;
  const c10::StorageImpl* const storage = written.storage().unsafeGetStorageImpl();
  std::vector<Entry> erased;
  const std::lock_guard lock(mutex_);
  erase_locked(
      [storage](const Entry& entry) { return entry.storage._unsafe_get_target() == storage; },
      erased);
}

void CastCache::clear() {
  std::unordered_map<Key, Entry, Hash> erased;  // destroyed after the lock is released
  const std::lock_guard lock(mutex_);
  entries_.swap(erased);
}

}  // namespace semitone::amp

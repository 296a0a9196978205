#include "src/amp/cast_cache.h"

#include <c10/core/GradMode.h>
#include <c10/core/UndefinedTensorImpl.h>

namespace semitone::amp {

const CastCache::Entry* CastCache::find(const at::Tensor& weight, Conversion conversion) const {
  const auto found = entries_.find({weight.unsafeGetTensorImpl(), conversion});
  if (found == entries_.end()) return nullptr;
  const Entry& entry = found->second;
  if (entry.version != weight._version() || entry.data != weight.const_data_ptr()) return nullptr;
  const bool needs_grad = c10::GradMode::is_enabled() && weight.requires_grad();
  if (needs_grad && !entry.converted.requires_grad()) return nullptr;
  // The other way round, a weight frozen since must not get a gradient through an old cast.
  if (!weight.requires_grad() && entry.converted.requires_grad()) return nullptr;
  return &entry;
}

CastCache::Entry CastCache::entry_for(const at::Tensor& weight) {
  return {
      c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>(weight.getIntrusivePtr()),
      static_cast<std::uint32_t>(weight._version()),
      weight.const_data_ptr(),
      {}};
}

void CastCache::clear() {
  const std::lock_guard lock(mutex_);
  entries_.clear();
}

}  // namespace semitone::amp

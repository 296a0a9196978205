#include "src/optim/deferred_gradient.h"

#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

namespace semitone::optim {
namespace {

// The one number of a placeholder. A placeholder is recognised by the deleter of its memory, since
// the host cannot look for the NaN in another device's memory.
struct PlaceholderMemory {
  at::Tensor number;
  static void destroy(void* memory) {
    const std::unique_ptr<PlaceholderMemory> owned(static_cast<PlaceholderMemory*>(memory));
  }
};

at::Tensor make_placeholder(const at::Tensor& master) {
  auto memory = std::make_unique<PlaceholderMemory>(
      PlaceholderMemory{at::full({}, std::numeric_limits<float>::quiet_NaN(), master.options())});
  void* const number = memory->number.mutable_data_ptr();
  const std::vector<std::int64_t> strides(static_cast<std::size_t>(master.dim()), 0);
  return at::for_blob(number, master.sizes())
      .strides(strides)
      .context(memory.release(), &PlaceholderMemory::destroy)
      .options(master.options())
      .target_device(master.device())
      .make_tensor();
}

// Whether nothing has written to a placeholder. On the CPU that also covers writes which autograd's
// version counter does not show.
bool is_unfilled(const at::Tensor& placeholder) {
  return placeholder.is_cpu() ? std::isnan(*static_cast<const float*>(placeholder.storage().data()))
                              : placeholder._version() == 0;
}

}  // namespace

bool DeferredGradient::is_placeholder(const at::Tensor& grad) {
  return grad.has_storage() &&
         grad.storage().data_ptr().get_deleter() == &PlaceholderMemory::destroy &&
         is_unfilled(grad);
}

void DeferredGradient::defer(const at::Tensor& master, const at::Tensor& grad) {
  grad_ = grad;
  placeholder_ = make_placeholder(master);
  master.mutable_grad() = placeholder_;
}

bool DeferredGradient::counts(const at::Tensor& master) const {
  return grad_.defined() && master.grad().is_same(placeholder_) && is_unfilled(placeholder_);
}

at::Tensor DeferredGradient::take(const at::Tensor& master) {
  const bool still = counts(master);
  at::Tensor grad = std::exchange(grad_, {});
  const at::Tensor placeholder = std::exchange(placeholder_, {});
  if (still) {
    master.mutable_grad().reset();
    return grad;
  }
  if (placeholder.defined() && master.grad().is_same(placeholder))  // zeroed, or filled
    master.mutable_grad() = placeholder.contiguous();
  return {};
}

void DeferredGradient::drop() {
  grad_.reset();
  placeholder_.reset();
}

}  // namespace semitone::optim

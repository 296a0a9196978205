#include "src/autocast/attention_scores.h"

#include "semitone/core/dtype.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <optional>

namespace semitone::amp::attention_scores {
namespace {

using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

// Weak: the address stays reserved, the memory does not.
std::optional<WeakTensor>& last_product() {
  static thread_local std::optional<WeakTensor> product;
  return product;
}

}  // namespace

// Not set_data(), which drops the node of the product's gradient. Autograd casts the gradient that
// comes back to the dtype that the product had.
void widen(const at::Tensor& product) {
  const c10::InferenceMode as_the_product(product.is_inference());
  const at::NoGradGuard no_grad;
  const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
  product.unsafeGetTensorImpl()->shallow_copy_from(
      product.detach().to(at::kFloat).getIntrusivePtr());
}

// Queries are [queries, batch * heads, head size] in memory, and transposed.
bool may_follow(std::span<const c10::IValue> bmm_arguments) {
  if (!bmm_arguments[0].isTensor()) return false;
  const at::Tensor& queries = bmm_arguments[0].toTensor();
  if (queries.dim() != 3 || queries.layout() != at::kStrided) return false;
  const auto sizes = queries.sizes();
  const auto strides = queries.strides();
  const auto lies = [&](std::size_t dim, std::int64_t stride) {
    return sizes[dim] == 1 || strides[dim] == stride;
  };
  return lies(0, sizes[2]) && lies(1, sizes[0] * sizes[2]) && lies(2, 1);
}

void remember(const at::Tensor& product) {
  if (product.dim() == 3 && is_16bit(product.scalar_type()))
    last_product().emplace(product.getIntrusivePtr());
}

bool are_viewed(const at::Tensor& tensor, c10::SymIntArrayRef sizes) {
  if (sizes.size() != 4 || tensor.dim() != 3) return false;
  auto& last = last_product();
  if (!last.has_value() || last->_unsafe_get_target() != tensor.unsafeGetTensorImpl()) return false;
  const auto wanted = c10::asIntArrayRefSlowOpt(sizes);
  const auto given = tensor.sizes();
  const bool viewed = wanted.has_value() && (*wanted)[0] * (*wanted)[1] == given[0] &&
                      (*wanted)[2] == given[1] && (*wanted)[3] == given[2];
  if (viewed) last.reset();
  // Other tensors in its memory would keep the memory that it has now. Other holders of the tensor
  // may be nodes of the graph, whose derivatives need it in 16 bits. (Some are not: the handles of a
  // caller in another language. Its scores stay in 16 bits.)
  return viewed && tensor.use_count() == 1 && tensor.storage().use_count() == 1;
}

}  // namespace semitone::amp::attention_scores

#include "src/autocast/attention_scores.h"

#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "src/autocast/operator_arguments.h"

#include <c10/core/UndefinedTensorImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <optional>
#include <string_view>

namespace semitone::amp::attention_scores {
namespace {

using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

// Weak: the address stays reserved, the memory does not.
std::optional<WeakTensor>& last_product() {
  static thread_local std::optional<WeakTensor> product;
  return product;
}

// A tensor whose memory may be freed, and its version.
class Seen {
 public:
  explicit Seen(const at::Tensor& tensor)
      : tensor_(tensor.getIntrusivePtr()),
        version_(tensor.unsafeGetTensorImpl()->version_counter()),
        seen_(tensor.is_inference() ? 0 : version_.current_version()) {}

  bool is(const at::Tensor& tensor) const {
    return tensor_._unsafe_get_target() == tensor.unsafeGetTensorImpl();
  }
  bool has_changed() const { return version_.enabled() && version_.current_version() != seen_; }

 private:
  WeakTensor tensor_;
  c10::VariableVersion version_;
  std::uint32_t seen_;
};

struct Viewed {
  Seen product;
  Seen view;
};

std::optional<Viewed>& last_viewed() {
  static thread_local std::optional<Viewed> viewed;
  return viewed;
}

[[noreturn]] void refuse_lost_writes(std::string_view written) {
  throw Error(
      "amp.autocast",
      "the product of queries and keys and its view as [batch, heads, queries, keys] not to "
      "be used for one another, since the view is an fp32 copy",
      c10::str("the other one, after a write to the ", written),
      "go on with the tensor that was written to, or write into a new one, as masked_fill "
      "and + do");
}

}  // namespace

void remember_view(const at::Tensor& product, const at::Tensor& view) {
  last_viewed() = Viewed{Seen(product), Seen(view)};
}

void check_writes(const at::Tensor& argument) {
  const auto& viewed = last_viewed();
  if (!viewed.has_value() || !argument.defined()) return;
  if (viewed->product.is(argument) && viewed->view.has_changed()) refuse_lost_writes("view");
  if (viewed->view.is(argument) && viewed->product.has_changed()) refuse_lost_writes("product");
}

void check_writes(std::span<const c10::IValue> arguments) {
  if (!last_viewed().has_value()) return;
  for_each_tensor(arguments, [](const at::Tensor& tensor) { check_writes(tensor); });
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
  return viewed;
}

}  // namespace semitone::amp::attention_scores

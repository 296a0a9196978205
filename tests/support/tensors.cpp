#include "tests/support/tensors.h"

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/torch.h>

#include <gtest/gtest.h>

#include <string>

namespace semitone::test {
namespace {

bool same_kind(const at::Tensor& got, const at::Tensor& want) {
  if (!got.defined() || !want.defined()) {
    EXPECT_EQ(got.defined(), want.defined());
    return false;
  }
  EXPECT_EQ(got.scalar_type(), want.scalar_type());
  EXPECT_EQ(got.sizes(), want.sizes());
  return got.scalar_type() == want.scalar_type() && got.sizes() == want.sizes();
}

at::Tensor bits_of(const at::Tensor& tensor) {
  switch (tensor.element_size()) {
    case 1:
      return tensor.contiguous().view(torch::kUInt8);
    case 2:
      return tensor.contiguous().view(torch::kInt16);
    case 4:
      return tensor.contiguous().view(torch::kInt32);
    default:
      return tensor.contiguous().view(torch::kInt64);
  }
}

std::string first_difference(const at::Tensor& got, const at::Tensor& want, const at::Tensor& bad) {
  const auto where = bad.flatten().nonzero();
  const auto index = where.index({0, 0}).item<std::int64_t>();
  return c10::str(where.size(0), " of ", bad.numel(), " elements differ, the first at ", index,
                  ": got ", got.flatten()[index].item<double>(), ", want ",
                  want.flatten()[index].item<double>());
}

}  // namespace

void expect_bitwise_equal(const at::Tensor& got, const at::Tensor& want) {
  const at::NoGradGuard no_grad;
  const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
  if (!same_kind(got, want) || got.numel() == 0) return;
  at::Tensor bad = bits_of(got) != bits_of(want);
  if (got.is_floating_point())
    bad = bad.logical_and(got.isnan().logical_and(want.isnan()).logical_not());
  if (bad.any().item<bool>()) ADD_FAILURE() << first_difference(got, want, bad);
}

void expect_close(const at::Tensor& got, const at::Tensor& want, double relative) {
  const at::NoGradGuard no_grad;
  const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
  if (!same_kind(got, want) || got.numel() == 0) return;
  const at::Tensor g = got.to(torch::kDouble);
  const at::Tensor w = want.to(torch::kDouble);
  const at::Tensor finite = w.isfinite();
  const at::Tensor scale =
      at::where(finite, w.abs(), 0).sum() / finite.sum().clamp_min(1).to(torch::kDouble);
  const at::Tensor near = (g - w).abs() <= relative * at::maximum(w.abs(), scale);
  const at::Tensor same = (g == w).logical_or(g.isnan().logical_and(w.isnan()));
  const at::Tensor bad = at::where(finite, near, same).logical_not();
  if (bad.any().item<bool>())
    ADD_FAILURE() << first_difference(got, want, bad) << " (relative tolerance " << relative << ")";
}

}  // namespace semitone::test

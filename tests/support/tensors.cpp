#include "tests/support/tensors.h"

#include "semitone/core/dtype.h"

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/torch.h>

namespace semitone::test {
namespace {

using testing::AssertionFailure;
using testing::AssertionResult;
using testing::AssertionSuccess;

AssertionResult same_shape(const at::Tensor& got, const at::Tensor& want) {
  if (got.defined() != want.defined()) {
    return AssertionFailure() << (got.defined() ? "a tensor where none should be"
                                                : "no tensor where one should be");
  }
  if (got.defined() && got.sizes() != want.sizes()) {
    return AssertionFailure() << "got shape " << got.sizes() << ", want " << want.sizes();
  }
  return AssertionSuccess();
}

AssertionResult same_dtype(const at::Tensor& got, const at::Tensor& want) {
  if (!got.defined() || !want.defined() || got.scalar_type() == want.scalar_type()) {
    return AssertionSuccess();
  }
  return AssertionFailure() << "got " << dtype_name(got.scalar_type()) << ", want "
                            << dtype_name(want.scalar_type());
}

at::Tensor dense(const at::Tensor& tensor) {
  return tensor.detach().to_dense().cpu().contiguous();
}

at::Tensor bits_of(const at::Tensor& tensor) {
  switch (tensor.element_size()) {
    case 1:
      return tensor.view(torch::kUInt8);
    case 2:
      return tensor.view(torch::kInt16);
    case 4:
      return tensor.view(torch::kInt32);
    default:
      return tensor.view(torch::kInt64);
  }
}

at::Tensor both_nan(const at::Tensor& a, const at::Tensor& b) {
  return a.isnan().logical_and(b.isnan());
}

AssertionResult none_differ(const at::Tensor& got, const at::Tensor& want, const at::Tensor& bad) {
  if (!bad.any().item<bool>()) return AssertionSuccess();
  const auto where = bad.flatten().nonzero();
  const auto index = where.index({0, 0}).item<std::int64_t>();
  return AssertionFailure() << where.size(0) << " of " << bad.numel()
                            << " elements differ, the first at " << index << ": got "
                            << got.flatten()[index].item<double>() << ", want "
                            << want.flatten()[index].item<double>();
}

// compare(got[i], want[i]) for every i; the first failure, with its index.
template <typename Compare>
AssertionResult compare_each(const std::vector<at::Tensor>& got,
                             const std::vector<at::Tensor>& want, const Compare& compare) {
  if (got.size() != want.size()) {
    return AssertionFailure() << "got " << got.size() << " tensors, want " << want.size();
  }
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (AssertionResult result = compare(got[i], want[i]); !result) {
      return result << " (tensor " << i << ")";
    }
  }
  return AssertionSuccess();
}

}  // namespace

AssertionResult same_bits(const at::Tensor& got, const at::Tensor& want) {
  const at::NoGradGuard no_grad;
  const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
  if (auto shape = same_shape(got, want); !shape || !got.defined()) return shape;
  if (auto dtype = same_dtype(got, want); !dtype || got.numel() == 0) return dtype;
  const at::Tensor g = dense(got);
  const at::Tensor w = dense(want);
  at::Tensor bad = bits_of(g) != bits_of(w);
  if (g.is_floating_point()) bad = bad.logical_and(both_nan(g, w).logical_not());
  return none_differ(g, w, bad);
}

AssertionResult same_bits(const std::vector<at::Tensor>& got, const std::vector<at::Tensor>& want) {
  return compare_each(got, want, [](const at::Tensor& one, const at::Tensor& other) {
    return same_bits(one, other);
  });
}

AssertionResult near(const at::Tensor& got, const at::Tensor& want, double relative) {
  const at::NoGradGuard no_grad;
  const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
  if (!(relative <= kLargestTolerance)) {
    return AssertionFailure() << "a relative tolerance of " << relative << " is more than "
                              << kLargestTolerance
                              << ": compare with a result that is rounded as often, or a wider one";
  }
  if (auto shape = same_shape(got, want); !shape || !got.defined() || got.numel() == 0) {
    return shape;
  }
  const at::Tensor g = dense(got).to(torch::kDouble);
  const at::Tensor w = dense(want).to(torch::kDouble);
  const at::Tensor finite = w.isfinite();
  const at::Tensor mean =
      at::where(finite, w.abs(), 0).sum() / finite.sum().clamp_min(1).to(torch::kDouble);
  const at::Tensor close = (g - w).abs() <= relative * at::maximum(w.abs(), mean);
  const at::Tensor same = (g == w).logical_or(both_nan(g, w));
  AssertionResult result = none_differ(g, w, at::where(finite, close, same).logical_not());
  if (!result) result << " (relative tolerance " << relative << ")";
  return result;
}

AssertionResult near(const std::vector<at::Tensor>& got, const std::vector<at::Tensor>& want,
                     double relative) {
  return compare_each(got, want, [&](const at::Tensor& one, const at::Tensor& other) {
    return near(one, other, relative);
  });
}

void expect_bitwise_equal(const at::Tensor& got, const at::Tensor& want) {
  EXPECT_TRUE(same_bits(got, want));
}

void expect_bitwise_equal(const std::vector<at::Tensor>& got, const std::vector<at::Tensor>& want) {
  EXPECT_TRUE(same_bits(got, want));
}

void expect_close(const at::Tensor& got, const at::Tensor& want, double relative) {
  EXPECT_TRUE(same_dtype(got, want));
  EXPECT_TRUE(near(got, want, relative));
}

std::vector<at::Tensor> copies(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> result;
  for (const at::Tensor& tensor : tensors)
    result.push_back(tensor.defined() ? tensor.detach().clone() : tensor);
  return result;
}

std::vector<at::Tensor> gradients_of(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& parameter : parameters) gradients.push_back(parameter.grad());
  return gradients;
}

}  // namespace semitone::test

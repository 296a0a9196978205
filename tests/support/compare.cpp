#include "tests/support/compare.h"

#include "semitone/core/dtype.h"

#include <torch/types.h>

#include <cstring>

namespace semitone::test {
namespace {

testing::AssertionResult differ(const at::Tensor& got, const at::Tensor& want) {
  if (got.defined() != want.defined()) {
    return testing::AssertionFailure()
           << (got.defined() ? "a tensor where none should be" : "no tensor where one should be");
  }
  if (got.sizes() != want.sizes()) {
    return testing::AssertionFailure() << "shape " << got.sizes() << " for " << want.sizes();
  }
  return testing::AssertionSuccess();
}

at::Tensor dense(const at::Tensor& tensor) {
  return tensor.detach().to_dense().cpu().contiguous();
}

}  // namespace

testing::AssertionResult near(const at::Tensor& got, const at::Tensor& want, double relative) {
  if (auto shapes = differ(got, want); !shapes || !got.defined()) return shapes;
  if (got.numel() == 0) return testing::AssertionSuccess();
  const at::Tensor a = dense(got).to(at::kDouble);
  const at::Tensor b = dense(want).to(at::kDouble);
  const at::Tensor finite = b.isfinite();
  const at::Tensor same = (a == b).logical_or(a.isnan().logical_and(b.isnan()));
  const double size = at::where(finite, b.abs(), at::zeros_like(b)).max().item<double>();
  const at::Tensor close = same.logical_or(finite.logical_and((a - b).abs().le(relative * size)));
  if (close.all().item<bool>()) return testing::AssertionSuccess();
  const at::Tensor difference = (a - b).abs().masked_fill(close, 0);
  const auto worst = difference.nan_to_num(1e300, 1e300).argmax().item<std::int64_t>();
  return testing::AssertionFailure()
         << "element " << worst << " is " << a.flatten()[worst].item<double>() << " for "
         << b.flatten()[worst].item<double>() << ", allowed difference " << relative * size;
}

testing::AssertionResult same_bits(const at::Tensor& got, const at::Tensor& want) {
  if (auto shapes = differ(got, want); !shapes || !got.defined()) return shapes;
  if (got.scalar_type() != want.scalar_type()) {
    return testing::AssertionFailure()
           << dtype_name(got.scalar_type()) << " for " << dtype_name(want.scalar_type());
  }
  const at::Tensor a = dense(got);
  const at::Tensor b = dense(want);
  if (a.nbytes() == 0 || std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0) {
    return testing::AssertionSuccess();
  }
  auto result = near(got, want, 0);
  return result ? testing::AssertionFailure() << "equal, but not bit for bit" : result;
}

}  // namespace semitone::test

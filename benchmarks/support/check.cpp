#include "benchmarks/support/check.h"

#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "src/core/dtype_limits.h"

#include <torch/types.h>

#include <fmt/format.h>

#include <cstdint>

namespace semitone::bench {

void require_within(const at::Tensor& got, const at::Tensor& want, const Tolerance& tolerance,
                    const std::string& name) {
  const at::NoGradGuard no_grad;
  require(got.sizes() == want.sizes(), name + " in the shape of the exact result");
  const double half_unit = dtype_limits(got.scalar_type()).epsilon / 2;
  const at::Tensor size = want.abs();
  const at::Tensor far = got.to(at::kDouble).sub(want).abs_();
  const at::Tensor allowed = size.mul(half_unit * tolerance.roundings)
                                 .add_(size.max().item<double>() * tolerance.share_of_largest);
  const at::Tensor bad = far.le(allowed).logical_not_();
  if (!bad.any().item<bool>()) return;
  const auto first = bad.flatten().nonzero()[0].item<std::int64_t>();
  const auto at_first = [&](const at::Tensor& tensor) {
    return tensor.flatten()[first].item<double>();
  };
  throw Error("bench.check",
              fmt::format("{} within {:.3g} of the exact result", name, at_first(allowed)),
              fmt::format("{} of {} elements that are not: element {} is {:.9g} in place of {:.9g}",
                          bad.sum().item<std::int64_t>(), bad.numel(), first, at_first(got),
                          at_first(want)));
}

void require(bool holds, const std::string& name) {
  if (!holds) throw Error("bench.check", name, "something else");
}

}  // namespace semitone::bench

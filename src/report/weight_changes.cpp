#include "src/report/weight_changes.h"

#include "semitone/core/error.h"

#include <c10/util/StringUtil.h>
#include <torch/types.h>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace semitone::report {
namespace {

at::Tensor lost_in(at::ScalarType dtype, const at::Tensor& before, const at::Tensor& update,
                   const at::Tensor& changed) {
  const at::Tensor kept = before.to(dtype);
  return (changed & ((kept.to(at::kFloat) + update).to(dtype) == kept)).sum();
}

// Sums over a piece, as fp64: changed, lost in fp16, lost in bf16, the squares of the update and of
// the weight.
at::Tensor sums_of(const at::Tensor& before, const at::Tensor& after) {
  const at::Tensor update = after - before;
  const at::Tensor changed = (before != after) & ~(before.isnan() & after.isnan());
  return at::stack({changed.sum().to(at::kDouble),
                    lost_in(at::kHalf, before, update, changed).to(at::kDouble),
                    lost_in(at::kBFloat16, before, update, changed).to(at::kDouble),
                    update.to(at::kDouble).square().sum(), before.to(at::kDouble).square().sum()});
}

}  // namespace

WeightChange change_of(const at::Tensor& before, const at::Tensor& after) {
  constexpr std::int64_t kPiece = std::int64_t{1} << 18;  // which stays in the processor's cache
  if (before.sizes() != after.sizes())
    throw Error("report.recorder", fmt::format("a weight of shape {}", c10::str(before.sizes())),
                fmt::format("{} after the update", c10::str(after.sizes())));
  const at::Tensor old = before.reshape(-1);
  const at::Tensor now = after.reshape(-1);
  constexpr std::int64_t kSums = 5;
  at::Tensor sums = at::zeros({kSums}, old.options().dtype(at::kDouble));
  for (std::int64_t begin = 0; begin < old.numel(); begin += kPiece) {
    const std::int64_t end = std::min(begin + kPiece, old.numel());
    sums = sums + sums_of(old.slice(0, begin, end), now.slice(0, begin, end));
  }
  sums = sums.cpu();
  const double* const sum = sums.const_data_ptr<double>();
  WeightChange change;
  change.numel = old.numel();
  change.changed = static_cast<std::int64_t>(sum[0]);
  change.lost_in_half = static_cast<std::int64_t>(sum[1]);
  change.lost_in_bfloat16 = static_cast<std::int64_t>(sum[2]);
  change.ratio = sum[3] == 0 ? 0 : std::sqrt(sum[3] / sum[4]);
  return change;
}

}  // namespace semitone::report

#include "src/recompute/chunked_softmax.h"

#include <torch/types.h>

#include <limits>
#include <utility>

namespace semitone::nn {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr std::int64_t kIgnored = -1;

// Each row's target, as the kernels of whole rows need it.
struct TargetsOfChunk {
  TargetsOfChunk(const ChunkedTargets& targets, std::int64_t first, std::int64_t count)
      : ignored(targets.classes.eq(targets.ignore_index)) {
    const at::Tensor place = targets.classes.sub(first);
    inside = place.ge(0).logical_and_(place.lt(count)).logical_and_(ignored.logical_not());
    classes = place.mul(inside).masked_fill_(ignored, kIgnored);
    column = classes.clamp_min(0).unsqueeze_(1);
  }

  // The logit of each row's class, in fp64.
  at::Tensor logits_in(const at::Tensor& chunk) const {
    return chunk.gather(1, column).squeeze(1).to(at::kDouble);
  }

  at::Tensor ignored;
  at::Tensor inside;
  at::Tensor classes;  // the first one in rows whose target is elsewhere
  at::Tensor column;   // (N, 1), also in ignored rows
};

// exp(a - b), where b is at least a; 0 if both are -inf.
at::Tensor exp_of_difference(const at::Tensor& a, const at::Tensor& b) {
  return a.sub(b.masked_fill(b.eq(-kInfinity), 0)).exp_();
}

}  // namespace

ChunkedSoftmax::ChunkedSoftmax(ChunkedTargets targets) : targets_(std::move(targets)) {
  const auto fp64 = targets_.classes.options().dtype(at::kDouble);
  const at::IntArrayRef rows = targets_.classes.sizes();
  max_ = at::full(rows, -kInfinity, fp64);
  sum_ = at::zeros(rows, fp64);
  target_logit_ = at::full(rows, kNan, fp64);
  if (targets_.label_smoothing != 0) sum_of_logits_ = at::zeros(rows, fp64);
}

void ChunkedSoftmax::add(const at::Tensor& logits, std::int64_t first) {
  const TargetsOfChunk targets(targets_, first, logits.size(1));
  const kernels::RowLosses chunk = kernels::cross_entropy(logits, {targets.classes, kIgnored, 0});
  dtype_ = chunk.max.scalar_type();
  const at::Tensor max = chunk.max.to(at::kDouble);
  const at::Tensor sum = chunk.inv_sum.to(at::kDouble).reciprocal_();
  const at::Tensor larger = at::maximum(max_, max);
  sum_.mul_(exp_of_difference(max_, larger)).add_(sum.mul_(exp_of_difference(max, larger)));
  max_ = larger;
  target_logit_ = at::where(targets.inside, targets.logits_in(logits), target_logit_);
  if (sum_of_logits_.defined()) sum_of_logits_.add_(logits.sum(1, /*keepdim=*/false, dtype_));
}

kernels::RowLosses ChunkedSoftmax::losses() const {
  const at::Tensor log_sum = sum_.log();
  at::Tensor loss = max_.sub(target_logit_).add_(log_sum);
  if (const double smoothing = targets_.label_smoothing; smoothing != 0) {
    const at::Tensor mean = sum_of_logits_.div(targets_.number_of_classes);
    loss.mul_(1 - smoothing).add_(max_.sub(mean).add_(log_sum), smoothing);
  }
  loss.masked_fill_(targets_.classes.eq(targets_.ignore_index), 0);
  // NaN, like its loss, in a row with an invalid target.
  const at::Tensor max = at::where(target_logit_.isnan(), target_logit_, max_);
  return {loss.to(dtype_), max.to(dtype_), sum_.reciprocal().to(dtype_)};
}

at::Tensor gradient_of_chunk(const at::Tensor& logits, std::int64_t first,
                             const ChunkedTargets& all, const kernels::RowLosses& losses,
                             const at::Tensor& grad) {
  const TargetsOfChunk targets(all, first, logits.size(1));
  const double share = all.label_smoothing / static_cast<double>(all.number_of_classes);
  // The kernel takes each row's target for one of the chunk's classes. What it writes there is
  // replaced: only some rows have their target in the chunk.
  const at::Tensor probability =
      targets.logits_in(logits).sub(losses.max).exp_().mul_(losses.inv_sum);
  const at::Tensor wanted =
      targets.inside.to(at::kDouble).mul_(1 - all.label_smoothing).add_(share);
  const at::Tensor of_target = probability.sub(wanted).mul_(grad).masked_fill_(targets.ignored, 0);
  const double smoothing = share * static_cast<double>(logits.size(1));
  return kernels::cross_entropy_gradient(logits, {targets.classes, kIgnored, smoothing}, losses,
                                         grad, /*in_place=*/true)
      .scatter_(1, targets.column, of_target.to(logits.scalar_type()).unsqueeze(1));
}

}  // namespace semitone::nn

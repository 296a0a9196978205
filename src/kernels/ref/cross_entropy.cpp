#include "src/kernels/cross_entropy.h"

#include "src/kernels/ref/wide.h"

#include <ATen/OpMathType.h>
#include <torch/types.h>

namespace semitone::kernels::ref {
namespace {

at::Tensor ignored_rows(const ClassTargets& targets) {
  return targets.classes.eq(targets.ignore_index).unsqueeze(1);
}

// (N, 1), some class in rows that are ignored.
at::Tensor index_of(const ClassTargets& targets) {
  return targets.classes.unsqueeze(1).masked_fill(ignored_rows(targets), 0);
}

}  // namespace

RowLosses cross_entropy(const at::Tensor& logits, const ClassTargets& targets) {
  const at::Tensor x = wide(logits);
  if (x.numel() == 0) {  // no rows, or no classes and so only rows that are ignored
    const at::Tensor zeros = at::zeros({x.size(0)}, x.options());
    return {zeros, zeros, zeros};
  }
  const at::Tensor max = x.amax(1, /*keepdim=*/true);
  // All logits of a row may be -inf, as in a chunk of classes that are masked out.
  const at::Tensor away = x.sub(max.masked_fill(max.isneginf(), 0));
  const at::Tensor sum = away.exp().sum(1, /*keepdim=*/true);
  at::Tensor loss =
      sum.log().sub(away.gather(1, index_of(targets)).mul(1 - targets.label_smoothing));
  if (targets.label_smoothing != 0)
    loss.sub_(away.mean(1, /*keepdim=*/true).mul(targets.label_smoothing));
  loss.masked_fill_(ignored_rows(targets), 0);
  return {loss.squeeze(1), max.squeeze(1), sum.reciprocal().squeeze(1)};
}

at::Tensor cross_entropy_gradient(const at::Tensor& logits, const ClassTargets& targets,
                                  const RowLosses& losses, const at::Tensor& grad) {
  const at::Tensor x = wide(logits);
  if (x.numel() == 0) return at::zeros_like(logits);
  const at::Tensor softmax =
      x.sub(losses.max.unsqueeze(1)).exp_().mul_(losses.inv_sum.unsqueeze(1));
  at::Tensor target_probability =
      at::full_like(x, targets.label_smoothing / static_cast<double>(x.size(1)));
  const at::Tensor index = index_of(targets);
  target_probability.scatter_add_(1, index,
                                  at::full_like(index, 1 - targets.label_smoothing, x.options()));
  const at::Tensor grads = grad.dim() == 0 ? grad : grad.unsqueeze(1);
  return softmax.sub(target_probability)
      .mul_(grads)
      .masked_fill_(ignored_rows(targets), 0)
      .to(logits.scalar_type());
}

}  // namespace semitone::kernels::ref

#include "src/kernels/cross_entropy.h"

#include "src/kernels/cross_entropy_kernel.h"
#include "src/kernels/flat.h"
#include "src/kernels/on_cuda.h"
#include "src/kernels/parallel_rows.h"

#include <torch/types.h>

#include <cstddef>
#include <cstdint>

namespace semitone::kernels {
namespace {

bool has_kernel(const at::Tensor& logits, const ClassTargets& targets) {
  return has_kernels(logits) && format_of(logits.scalar_type()).has_value() && logits.numel() > 0 &&
         same_device(targets.classes, logits);
}

// Whether each row has no gaps, and no two rows overlap.
bool has_rows(const at::Tensor& logits) {
  return !logits.is_neg() && (logits.stride(1) == 1 || logits.size(1) == 1) &&
         (logits.stride(0) >= logits.size(1) || logits.size(0) == 1);
}

at::Tensor with_rows(const at::Tensor& logits) {
  return has_rows(logits) ? logits : logits.resolve_neg().contiguous();
}

CrossEntropyRows rows_of(const at::Tensor& logits, const at::Tensor& classes,
                         const ClassTargets& targets) {
  return {.logits = logits.const_data_ptr(),
          .format = *format_of(logits.scalar_type()),
          .stride = static_cast<std::size_t>(logits.stride(0)),
          .classes = static_cast<std::size_t>(logits.size(1)),
          .target = classes.const_data_ptr<std::int64_t>(),
          .ignore_index = targets.ignore_index,
          .label_smoothing = targets.label_smoothing};
}

}  // namespace

RowLosses cross_entropy(const at::Tensor& logits, const ClassTargets& targets) {
  if (!has_kernel(logits, targets)) return ref::cross_entropy(logits, targets);
  const at::Tensor from = with_rows(logits);
  const at::Tensor classes = targets.classes.contiguous();
  const auto fp32 = logits.options().dtype(at::kFloat);
  const RowLosses losses{at::empty({logits.size(0)}, fp32), at::empty({logits.size(0)}, fp32),
                         at::empty({logits.size(0)}, fp32)};
  const CrossEntropyRows rows = rows_of(from, classes, targets);
  const CrossEntropyResults results{losses.loss.mutable_data_ptr<float>(),
                                    losses.max.mutable_data_ptr<float>(),
                                    losses.inv_sum.mutable_data_ptr<float>()};
  if (runs_on_cuda(from)) {
    cross_entropy_cuda(rows, results, static_cast<std::size_t>(from.size(0)),
                       CurrentCuda(from).stream());
    return losses;
  }
  for_all_rows(from.size(0), from.size(1), [&](std::size_t begin, std::size_t end) {
    cross_entropy_rows(rows, results, begin, end);
  });
  return losses;
}

at::Tensor cross_entropy_gradient(const at::Tensor& logits, const ClassTargets& targets,
                                  const RowLosses& losses, const at::Tensor& grad, bool in_place) {
  if (!has_kernel(logits, targets) || !same_device(grad, logits))
    return ref::cross_entropy_gradient(logits, targets, losses, grad);
  const at::Tensor from = with_rows(logits);
  const at::Tensor classes = targets.classes.contiguous();
  const at::Tensor grads = grad.resolve_neg().contiguous();
  const at::Tensor output = in_place ? from : at::empty(logits.sizes(), logits.options());
  const CrossEntropyRows rows = rows_of(from, classes, targets);
  const CrossEntropyGradient work{.max = losses.max.const_data_ptr<float>(),
                                  .inv_sum = losses.inv_sum.const_data_ptr<float>(),
                                  .grad = grads.const_data_ptr<float>(),
                                  .grad_step = grads.dim() == 0 ? 0U : 1U,
                                  .output = written_data(output),
                                  .stride = static_cast<std::size_t>(output.stride(0))};
  if (runs_on_cuda(from)) {
    cross_entropy_gradient_cuda(rows, work, static_cast<std::size_t>(from.size(0)),
                                CurrentCuda(from).stream());
    return output;
  }
  for_all_rows(from.size(0), from.size(1), [&](std::size_t begin, std::size_t end) {
    cross_entropy_gradient_rows(rows, work, begin, end);
  });
  return output;
}

}  // namespace semitone::kernels

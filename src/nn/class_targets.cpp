#include "src/nn/class_targets.h"

#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "src/kernels/on_cuda.h"

#include <ATen/core/Reduction.h>
#include <torch/types.h>

#include <string>

namespace semitone::nn {
namespace {

at::Tensor number(double value) {
  return at::full({}, value, at::kDouble);
}

bool is_on_device(const at::Tensor& tensor) {
  return !tensor.is_cpu() || kernels::runs_on_cuda(tensor);
}

at::Tensor sum_of(const at::Tensor& values) {
  if (is_on_device(values)) return values.sum(at::kDouble);
  const at::Tensor fp64 = values.to(at::kDouble);
  const auto* const data = fp64.const_data_ptr<double>();
  double sum = 0;
  for (std::int64_t i = 0; i < fp64.numel(); ++i) sum += data[i];
  return number(sum);
}

}  // namespace

void check_defined(const char* component, const at::Tensor& tensor, const char* what) {
  if (!tensor.defined()) throw Error(component, c10::str(what, " as a tensor"), "an undefined one");
}

void check_label_smoothing(const char* component, double label_smoothing) {
  if (!(label_smoothing >= 0 && label_smoothing <= 1))
    throw Error(component, "a label_smoothing in [0, 1]", std::to_string(label_smoothing));
}

void check_targets(const char* component, const at::Tensor& target, const at::Tensor& values,
                   const char* whose) {
  if (target.scalar_type() != at::kLong && target.scalar_type() != at::kByte) {
    throw Error(component, "int64 targets", dtype_name(target.scalar_type()),
                "call target.to(torch::kLong)");
  }
  if (target.device() != values.device()) {
    throw Error(component, c10::str("targets on the ", whose, " device ", values.device()),
                c10::str("some on ", target.device()));
  }
}

at::Tensor count_rows(const char* component, const at::Tensor& target, std::int64_t classes,
                      std::int64_t ignore_index) {
  if (is_on_device(target)) return target.ne(ignore_index).sum(at::kDouble);
  const at::Tensor contiguous = target.contiguous();
  const auto* const data = contiguous.const_data_ptr<std::int64_t>();
  std::int64_t count = 0;
  for (std::int64_t row = 0; row < contiguous.numel(); ++row) {
    if (data[row] == ignore_index) continue;
    if (data[row] < 0 || data[row] >= classes) {
      throw Error(component,
                  c10::str("targets in [0, ", classes, "), or ignore_index ", ignore_index),
                  c10::str(data[row], " in row ", row));
    }
    ++count;
  }
  return number(static_cast<double>(count));
}

at::Tensor reduced(const at::Tensor& losses, const at::Tensor& count, std::int64_t reduction) {
  if (reduction == at::Reduction::None) return losses;
  const at::Tensor sum = sum_of(losses);
  return (reduction == at::Reduction::Mean ? sum.div(count) : sum).to(losses.scalar_type());
}

}  // namespace semitone::nn

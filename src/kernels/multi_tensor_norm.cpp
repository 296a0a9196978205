#include "src/kernels/multi_tensor_norm.h"

#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "src/kernels/flat.h"
#include "src/kernels/on_cuda.h"

#include <torch/types.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace semitone::kernels {
namespace {

constexpr auto kNorms = "kernels.multi_tensor_norms";

void check(const at::Tensor& tensor) {
  if (!tensor.defined()) throw Error(kNorms, "defined tensors", "an undefined one");
  if (!tensor.is_floating_point() || tensor.layout() != at::kStrided) {
    throw Error(kNorms, "dense floating tensors",
                c10::str(dtype_name(tensor.scalar_type()), ", ", tensor.layout()));
  }
}

bool fits_kernel(const at::Tensor& tensor, double p) {
  return has_kernels(tensor) && format_of(tensor.scalar_type()).has_value() &&
         tensor.is_non_overlapping_and_dense() && (p == 2 || std::isinf(p));
}

// Combines the results of two parts: a sum of squares, or the maximum, NaN if one is NaN.
double joined(double a, double b, double p) {
  if (!std::isinf(p)) return a + b;
  return b > a || std::isnan(b) ? b : a;
}

void run_on_cpu(std::span<const at::Tensor> tensors, const std::vector<std::size_t>& which,
                double p, std::vector<double>& norms) {
  struct Part {
    std::size_t tensor;
    const char* data;
    Format format;
    std::size_t size;
    double result;
  };
  std::vector<Part> parts;
  Chunks chunks;
  for (const std::size_t index : which) {
    const Format format = *format_of(tensors[index].scalar_type());
    const auto* data = static_cast<const char*>(tensors[index].const_data_ptr());
    const auto numel = static_cast<std::size_t>(tensors[index].numel());
    for (std::size_t begin = 0; begin < numel; begin += kChunk) {
      const auto size = std::min<std::size_t>(kChunk, numel - begin);
      parts.push_back({index, data + begin * bytes_of(format), format, size, 0});
      chunks.add(size);
    }
  }
  chunks.for_each([&](std::size_t i) {
    Part& part = parts[i];
    part.result = p == 2 ? sum_of_squares(part.data, part.format, part.size)
                         : static_cast<double>(max_magnitude(part.data, part.format, part.size));
  });
  for (const Part& part : parts) norms[part.tensor] = joined(norms[part.tensor], part.result, p);
  if (p != 2) return;
  for (const std::size_t index : which) norms[index] = std::sqrt(norms[index]);
}

// In (tensors, 1) numbers on their device.
at::Tensor run_on_cuda(std::span<const at::Tensor> tensors, const std::vector<std::size_t>& which,
                       double p) {
  std::vector<NormSpan> spans;
  std::size_t parts = 0;
  for (const std::size_t index : which) {
    const at::Tensor& tensor = tensors[index];
    spans.push_back({.in = tensor.const_data_ptr(),
                     .format = *format_of(tensor.scalar_type()),
                     .size = static_cast<std::size_t>(tensor.numel())});
    parts += cuda_blocks(spans.back().size);
  }
  const at::Tensor& first = tensors[which.front()];
  const auto fp64 = at::TensorOptions(first.device()).dtype(at::kDouble);
  const at::Tensor memory = at::empty({static_cast<std::int64_t>(parts)}, fp64);
  at::Tensor results = at::empty({static_cast<std::int64_t>(which.size()), 1}, fp64);
  (p == 2 ? sums_of_squares_cuda : max_magnitudes_cuda)(spans, memory.mutable_data_ptr<double>(),
                                                        results.mutable_data_ptr<double>(),
                                                        CurrentCuda(first).stream());
  return p == 2 ? results.sqrt_() : results;
}

}  // namespace

std::vector<double> multi_tensor_norms(std::span<const at::Tensor> tensors, double p) {
  if (!(p > 0)) throw Error(kNorms, "a norm of positive order", std::to_string(p));
  std::vector<double> norms(tensors.size(), 0.0);
  std::vector<std::size_t> flat;
  std::map<std::string, std::vector<std::size_t>> on_cuda;  // by device
  ReadOnce others;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    check(tensors[i]);
    if (!fits_kernel(tensors[i], p)) {
      others.add(i, ref::norm(tensors[i], p));
    } else if (runs_on_cuda(tensors[i])) {
      on_cuda[tensors[i].device().str()].push_back(i);
    } else {
      flat.push_back(i);
    }
  }
  for (const auto& [device, which] : on_cuda) others.add(which, run_on_cuda(tensors, which, p));
  run_on_cpu(tensors, flat, p, norms);
  others.for_each([&](std::size_t i, const double* norm) { norms[i] = *norm; });
  return norms;
}

at::Tensor multi_tensor_norms_on_device(std::span<const at::Tensor> tensors, double p) {
  if (!(p > 0)) throw Error(kNorms, "a norm of positive order", std::to_string(p));
  const at::NoGradGuard no_grad;
  if (!tensors.empty() && tensors.front().is_cpu())
    return at::tensor(multi_tensor_norms(tensors, p), at::kDouble);
  std::vector<at::Tensor> norms(tensors.size());
  std::vector<std::size_t> on_cuda;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    check(tensors[i]);
    if (fits_kernel(tensors[i], p)) {
      on_cuda.push_back(i);
    } else {
      norms[i] = ref::norm(tensors[i], p);
    }
  }
  if (!on_cuda.empty()) {
    const at::Tensor results = run_on_cuda(tensors, on_cuda, p).view({-1});
    if (on_cuda.size() == tensors.size()) return results;
    for (std::size_t k = 0; k < on_cuda.size(); ++k)
      norms[on_cuda[k]] = results.select(0, static_cast<std::int64_t>(k));
  }
  return at::stack(norms);
}

at::Tensor total_norm_on_device(const at::Tensor& norms, double p) {
  const at::NoGradGuard no_grad;
  if (norms.is_cpu()) {
    const auto size = static_cast<std::size_t>(norms.numel());
    return at::scalar_tensor(total_norm({norms.const_data_ptr<double>(), size}, p), at::kDouble);
  }
  if (std::isinf(p)) return norms.numel() == 0 ? at::zeros({}, norms.options()) : norms.amax();
  if (p == 2) return norms.square().sum().sqrt();
  return norms.pow(p).sum().pow(1 / p);
}

double total_norm(std::span<const double> norms, double p) {
  double total = 0;
  for (const double norm : norms)
    total = joined(total, std::isinf(p) ? norm : std::pow(norm, p), p);
  return std::isinf(p) ? total : std::pow(total, 1 / p);
}

}  // namespace semitone::kernels

#include "src/kernels/multi_tensor_lamb.h"

#include "src/kernels/flat.h"
#include "src/kernels/update_launches.h"

#include <torch/types.h>

#include <cmath>
#include <cstdint>

namespace semitone::kernels {

std::vector<LambNorms> multi_tensor_lamb_moments(std::span<const Update> items,
                                                 std::span<const LambRule> rules) {
  check_updates(items, rules);
  std::vector<LambNorms> norms(items.size());
  CpuLaunches<LambRule> on_cpu;
  CudaLaunches<LambRule> on_cuda;
  std::vector<std::size_t> item_of_part;
  ReadOnce others;
  for (std::size_t i = 0; i < items.size(); ++i) {
    if (!fits_kernel(items[i])) {
      others.add(i, ref::lamb_moments(items[i], rules[i]));
      continue;
    }
    Update moments = items[i];
    moments.copy = at::Tensor();  // written by the second pass
    if (runs_on_cuda(items[i].param)) {
      on_cuda.add(i, moments, rules[i]);
      continue;
    }
    on_cpu.add(moments, rules[i]);
    item_of_part.resize(on_cpu.parts(), i);
  }
  on_cuda.for_each([&](const at::Tensor& param, const std::vector<std::size_t>& numbers,
                       const CudaStep<LambRule>& step, CudaStream stream) {
    std::size_t blocks = 0;
    for (const UpdateSpan& span : step.spans) blocks += cuda_blocks(span.size);
    const auto fp64 = at::TensorOptions(param.device()).dtype(at::kDouble);
    const at::Tensor memory = at::empty({static_cast<std::int64_t>(blocks), 2}, fp64);
    const at::Tensor sums = at::empty({static_cast<std::int64_t>(numbers.size()), 2}, fp64);
    lamb_moments_cuda(step, memory.mutable_data_ptr<double>(), sums.mutable_data_ptr<double>(),
                      stream);
    others.add(numbers, sums.sqrt());
  });
  std::vector<LambSquares> squares(on_cpu.parts());
  on_cpu.for_each([&](std::size_t part, const UpdateSpan& span, const LambRule& rule) {
    squares[part] = lamb_moments(span, rule);
  });
  // In the order of the parts, independently of the threads.
  for (std::size_t part = 0; part < on_cpu.parts(); ++part) {
    norms[item_of_part[part]].param += squares[part].param;
    norms[item_of_part[part]].update += squares[part].update;
  }
  for (LambNorms& norm : norms) norm = {std::sqrt(norm.param), std::sqrt(norm.update)};
  others.for_each([&](std::size_t i, const double* read) { norms[i] = {read[0], read[1]}; });
  return norms;
}

}  // namespace semitone::kernels

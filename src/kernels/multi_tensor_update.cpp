#include "src/kernels/multi_tensor_update.h"

#include "src/kernels/update_launches.h"

namespace semitone::kernels {
namespace {

template <typename Rule>
void run(std::span<const Update> items, std::span<const Rule> rules) {
  check_updates(items, rules);
  CpuLaunches<Rule> on_cpu;
  CudaLaunches<Rule> on_cuda;
  for (std::size_t i = 0; i < items.size(); ++i) {
    if (!fits_kernel(items[i])) {
      ref::update(items[i], rules[i]);
    } else if (runs_on_cuda(items[i].param)) {
      on_cuda.add(i, items[i], rules[i]);
    } else {
      on_cpu.add(items[i], rules[i]);
    }
  }
  on_cuda.for_each([](const at::Tensor&, const std::vector<std::size_t>&,
                      const CudaStep<Rule>& step,
                      CudaStream stream) { update_cuda(step, stream); });
  on_cpu.for_each(
      [](std::size_t, const UpdateSpan& span, const Rule& rule) { update(span, rule); });
}

}  // namespace

void multi_tensor_update(std::span<const Update> items, const Rules& rules) {
  std::visit([&]<typename Rule>(
                 const std::vector<Rule>& list) { run(items, std::span<const Rule>(list)); },
             rules);
}

}  // namespace semitone::kernels

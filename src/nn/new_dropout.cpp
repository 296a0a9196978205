#include "src/nn/new_dropout.h"

#include "src/nn/kernel_reads.h"

#include <ATen/CPUGeneratorImpl.h>

#include <mutex>

namespace semitone::nn {

kernels::Dropout new_dropout(double p) {
  if (const OnKernelDraw callback = on_kernel_draw()) callback();
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  const std::scoped_lock lock(generator.mutex());
  return {p, {.seed = generator.get<at::CPUGeneratorImpl>()->random64()}};
}

}  // namespace semitone::nn

// Linked in place of src/kernels/on_cuda.cpp: the pretend accelerator has the CUDA kernels, which
// run by cuda_runtime.h in this folder. Only kernels may use its memory, and only while they run.

#include "src/kernels/on_cuda.h"
#include "tests/support/accelerator/accelerator.h"
#include "tests/support/accelerator/machine.h"
#include "tests/support/cuda_on_cpu/cuda_runtime.h"

namespace semitone {
namespace {

using test::accelerator::Machine;

[[maybe_unused]] const bool kSet = [] {
  cuda_on_cpu::set_around_kernels(
      [] {
        Machine::instance().mutex().lock();
        Machine::instance().memory().let_kernels_in(true);
      },
      [] {
        Machine::instance().memory().let_kernels_in(false);
        Machine::instance().mutex().unlock();
      });
  return true;
}();

}  // namespace

namespace kernels {

bool runs_on_cuda(const at::Tensor& tensor) {
  return tensor.device().type() == test::accelerator::kType;
}

CurrentCuda::CurrentCuda(const at::Tensor& tensor) : guard_(tensor.device()), stream_{nullptr} {}

}  // namespace kernels
}  // namespace semitone

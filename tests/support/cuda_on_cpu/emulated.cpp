#include "tests/support/cuda_on_cpu/emulated.h"

#include "src/kernels/on_cuda.h"

#include <hwy/targets.h>

namespace semitone {
namespace {

bool& emulated() {
  static thread_local bool value = true;
  return value;
}

// Tests that go through all of the CPU's instruction sets have one only.
[[maybe_unused]] const bool kOneInstructionSet = [] {
  hwy::DisableTargets(~hwy::SupportedAndGeneratedTargets().front());
  return true;
}();

}  // namespace

namespace test {

WithoutEmulatedCuda::WithoutEmulatedCuda() : before_(emulated()) {
  emulated() = false;
}

WithoutEmulatedCuda::~WithoutEmulatedCuda() {
  emulated() = before_;
}

}  // namespace test

namespace kernels {

bool runs_on_cuda(const at::Tensor& tensor) {
  return tensor.is_cpu() && emulated();
}

CurrentCuda::CurrentCuda(const at::Tensor& tensor) : guard_(tensor.device()), stream_{nullptr} {}

}  // namespace kernels
}  // namespace semitone

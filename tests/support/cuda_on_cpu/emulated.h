#pragma once

// Linked in place of src/kernels/on_cuda.cpp: tensors on the CPU are given to the CUDA kernels,
// which run there by cuda_runtime.h in this folder.
namespace semitone::test {

// While it lives, this thread's tensors take the CPU's own kernels.
class WithoutEmulatedCuda {
 public:
  WithoutEmulatedCuda();
  ~WithoutEmulatedCuda();
  WithoutEmulatedCuda(const WithoutEmulatedCuda&) = delete;
  WithoutEmulatedCuda& operator=(const WithoutEmulatedCuda&) = delete;

 private:
  bool before_;
};

}  // namespace semitone::test

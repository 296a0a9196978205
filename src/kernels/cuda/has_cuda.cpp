#include "src/kernels/cuda/cuda_kernels.h"

namespace semitone::kernels {

bool has_cuda_kernels() {
  return true;
}

}  // namespace semitone::kernels

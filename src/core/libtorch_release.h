#pragma once

#include <torch/version.h>

// 1 if LibTorch's release is this one or a newer one, otherwise 0, for #if.
#define SEMITONE_LIBTORCH_SINCE(major, minor) \
  (TORCH_VERSION_MAJOR > (major) ||           \
   (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))

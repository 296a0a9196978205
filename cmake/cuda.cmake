# Decides SEMITONE_WITH_CUDA: the CUDA kernels are built where nvcc is, and needed nowhere.
# There are none so far: CUDA tensors take the definitions in src/kernels/ref, which are composed of ATen operators.
set(SEMITONE_WITH_CUDA OFF)
if(NOT SEMITONE_CUDA STREQUAL OFF)
  include(CheckLanguage)
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    # Ampere, Hopper, and PTX of the latter for what comes after.
    set(CMAKE_CUDA_ARCHITECTURES 80-real 90-real 90-virtual)
  endif()
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    enable_language(CUDA)
    find_package(CUDAToolkit REQUIRED)
    set(CMAKE_CUDA_STANDARD 17)
    set(SEMITONE_WITH_CUDA ON)
  elseif(SEMITONE_CUDA STREQUAL ON)
    message(FATAL_ERROR "[cmake.cuda] expected nvcc because SEMITONE_CUDA=ON, got none — "
      "install the CUDA toolkit or configure with -DSEMITONE_CUDA=AUTO")
  endif()
endif()
message(STATUS "LibTorch ${LibTorch_VERSION} (CUDA: ${LibTorch_HAS_CUDA}) from ${LibTorch_ROOT_DIR}; CUDA kernels: ${SEMITONE_WITH_CUDA}")

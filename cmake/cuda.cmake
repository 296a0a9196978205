# Decides SEMITONE_WITH_CUDA: the CUDA kernels (src/kernels/cuda) can be compiled, since there is an nvcc; and
# SEMITONE_LINKS_CUDA: the library contains them, since LibTorch has CUDA too. With a LibTorch for CPUs no tensor could
# reach them, and users of the library would need the CUDA toolkit for nothing; then only tests compile them
# (semitone_kernels_cuda). The kernels are never required: without them, CUDA tensors use the reference implementations in
# src/kernels/ref, which are composed of ATen operators. The kernels link the static CUDA runtime, which looks for a driver
# when it is first used, so a program with them starts without a driver.
set(SEMITONE_WITH_CUDA OFF)
if(NOT SEMITONE_CUDA STREQUAL OFF)
  include(CheckLanguage)
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    # Ampere, Hopper, and PTX of the latter for later devices.
    set(CMAKE_CUDA_ARCHITECTURES 80-real 90-real 90-virtual)
  endif()
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    enable_language(CUDA)
    # C++20, and kernels with more than 4 KiB of arguments.
    if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.1)
      find_package(CUDAToolkit REQUIRED)
      set(CMAKE_CUDA_STANDARD 20)
      set(CMAKE_CUDA_EXTENSIONS OFF)
      set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)  # CMake 3.25 does not know that nvcc has it
      set(SEMITONE_WITH_CUDA ON)
    endif()
  endif()
  if(SEMITONE_CUDA STREQUAL ON AND NOT SEMITONE_WITH_CUDA)
    message(FATAL_ERROR "[cmake.cuda] expected nvcc 12.1 or newer because SEMITONE_CUDA=ON, got "
      "'${CMAKE_CUDA_COMPILER}' ${CMAKE_CUDA_COMPILER_VERSION} — "
      "install the CUDA toolkit or configure with -DSEMITONE_CUDA=AUTO")
  endif()
endif()
set(SEMITONE_LINKS_CUDA OFF)
if(SEMITONE_WITH_CUDA AND LibTorch_HAS_CUDA)
  set(SEMITONE_LINKS_CUDA ON)
endif()
message(STATUS "LibTorch ${LibTorch_VERSION} (CUDA: ${LibTorch_HAS_CUDA}) from ${LibTorch_ROOT_DIR}; CUDA kernels: ${SEMITONE_LINKS_CUDA}")

# Decides what of CUDA the library contains:
#
#   SEMITONE_WITH_NVCC      there is an nvcc that can compile the CUDA kernels (src/kernels/cuda)
#   SEMITONE_LINKS_KERNELS  the library contains them: there is an nvcc, and LibTorch has CUDA. With a LibTorch for CPUs no
#                           tensor could reach them; then only tests compile them (semitone_kernels_cuda)
#   SEMITONE_KERNEL_ARCHITECTURES   what they are compiled for
#   SEMITONE_LINKS_CUDA     the library contains what calls LibTorch's CUDA functions: CUDA graphs, and NCCL. No nvcc is
#                           needed, only headers of CUDA (SEMITONE_CUDA_INCLUDE_DIRS), which the Python packages that
#                           LibTorch links contain too
#   SEMITONE_CUDA_RUNTIME   what code that calls the CUDA runtime links, also through LibTorch's headers
#
# Nothing of it is ever required: without the kernels, CUDA tensors use the reference implementations in src/kernels/ref, which
# are composed of ATen operators. The kernels link the static CUDA runtime, which looks for a driver when it is first used, so a
# program with them starts without a driver.
set(SEMITONE_WITH_NVCC OFF)
# Without tests and with a LibTorch for CPUs, nothing would be compiled with it.
if(SEMITONE_CUDA STREQUAL ON OR (SEMITONE_CUDA STREQUAL AUTO AND (LibTorch_HAS_CUDA OR SEMITONE_TESTS)))
  include(CheckLanguage)
  # Ampere, Hopper, and PTX of the latter for later devices. With a LibTorch for CPUs the kernels are only compiled, for one.
  if(LibTorch_HAS_CUDA)
    set(SEMITONE_KERNEL_ARCHITECTURES 80-real 90-real 90-virtual)
  else()
    set(SEMITONE_KERNEL_ARCHITECTURES 90)
  endif()
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES AND "$ENV{CUDAARCHS}" STREQUAL "")  # which CMake reads
    set(CMAKE_CUDA_ARCHITECTURES ${SEMITONE_KERNEL_ARCHITECTURES})
  endif()
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    enable_language(CUDA)
    # A parent's is no choice for Semitone: it may be the oldest GPU that nvcc knows, or OFF, which find_package(Torch) sets.
    if(NOT SEMITONE_CUDA_ARCHITECTURES STREQUAL "")
      set(SEMITONE_KERNEL_ARCHITECTURES ${SEMITONE_CUDA_ARCHITECTURES})
    elseif(PROJECT_IS_TOP_LEVEL)
      set(SEMITONE_KERNEL_ARCHITECTURES ${CMAKE_CUDA_ARCHITECTURES})
    endif()
    # C++20. clang, which may be CMake's compiler for CUDA, does not know nvcc's flags.
    if(CMAKE_CUDA_COMPILER_ID STREQUAL NVIDIA AND CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.1)
      find_package(CUDAToolkit REQUIRED)
      set(CMAKE_CUDA_STANDARD 20)
      set(CMAKE_CUDA_EXTENSIONS OFF)
      set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)  # CMake 3.25 does not know that nvcc has it
      set(SEMITONE_WITH_NVCC ON)
    endif()
  endif()
  if(SEMITONE_CUDA STREQUAL ON AND NOT SEMITONE_WITH_NVCC)
    message(FATAL_ERROR "[cmake.cuda] expected nvcc 12.1 or newer because SEMITONE_CUDA=ON, got "
      "'${CMAKE_CUDA_COMPILER}' ${CMAKE_CUDA_COMPILER_VERSION} — "
      "install the CUDA toolkit or configure with -DSEMITONE_CUDA=AUTO")
  endif()
endif()
set(SEMITONE_LINKS_CUDA OFF)
set(SEMITONE_LINKS_KERNELS OFF)
# Older releases do not tell the driver's handle of a stream, and have no pools of pinned memory for CUDA graphs.
set(LibTorch_WITH_STREAM_HANDLES 2.11)
if(LibTorch_HAS_CUDA AND NOT SEMITONE_CUDA STREQUAL OFF AND LibTorch_VERSION VERSION_LESS LibTorch_WITH_STREAM_HANDLES)
  message(WARNING "[cmake.cuda] expected LibTorch ${LibTorch_WITH_STREAM_HANDLES} or newer for GPUs, got ${LibTorch_VERSION}: GPUs run "
    "without Semitone's kernels, CUDA graphs and NCCL")
elseif(LibTorch_HAS_CUDA AND NOT SEMITONE_CUDA STREQUAL OFF)
  # Not those of another LibTorch that this folder was configured with before.
  if(NOT "${SEMITONE_CUDA_HEADERS_OF}" STREQUAL "${LibTorch_ROOT_DIR}")
    if(SEMITONE_CUDA_HEADERS_OF)
      unset(SEMITONE_CUDA_INCLUDE_DIR CACHE)
      unset(SEMITONE_NCCL_INCLUDE_DIR CACHE)
    endif()
    set(SEMITONE_CUDA_HEADERS_OF ${LibTorch_ROOT_DIR} CACHE INTERNAL "the LibTorch of the CUDA headers that were found")
  endif()
  # LibTorch's own headers first: they have the release that it was built with.
  find_path(SEMITONE_CUDA_INCLUDE_DIR cuda_runtime_api.h
    PATHS ${LibTorch_ROOT_DIR}/../nvidia/cu13/include ${LibTorch_ROOT_DIR}/../nvidia/cuda_runtime/include NO_DEFAULT_PATH)
  find_path(SEMITONE_CUDA_INCLUDE_DIR cuda_runtime_api.h PATHS ${CUDAToolkit_INCLUDE_DIRS})
  # The Python packages of CUDA 12 have a folder for each of CUDA's libraries. LibTorch's own headers include cusparse.h.
  set(SEMITONE_CUDA_INCLUDE_DIRS ${SEMITONE_CUDA_INCLUDE_DIR})
  if(SEMITONE_CUDA_INCLUDE_DIR AND NOT EXISTS ${SEMITONE_CUDA_INCLUDE_DIR}/cusparse.h)
    file(GLOB folders ${LibTorch_ROOT_DIR}/../nvidia/*/include)
    list(APPEND SEMITONE_CUDA_INCLUDE_DIRS ${folders})
  endif()
  foreach(folder ${SEMITONE_CUDA_INCLUDE_DIRS})
    if(EXISTS ${folder}/cusparse.h)
      set(SEMITONE_LINKS_CUDA ON)
      set(SEMITONE_LINKS_KERNELS ${SEMITONE_WITH_NVCC})
    endif()
  endforeach()
  if(NOT SEMITONE_LINKS_CUDA)
    message(WARNING "[cmake.cuda] LibTorch has CUDA, but cuda_runtime_api.h and cusparse.h were not found: GPUs run without "
      "Semitone's kernels, CUDA graphs and NCCL. Install the CUDA toolkit, or set SEMITONE_CUDA_INCLUDE_DIR to the folder of CUDA's "
      "headers")
  endif()
endif()
# One runtime for the whole library. The kernels need that of their nvcc, which may be another release than LibTorch's.
# The package has a copy of it, so that users of the library need no CUDA toolkit: package.cmake.
if(SEMITONE_LINKS_KERNELS)
  set(SEMITONE_CUDA_RUNTIME $<BUILD_INTERFACE:CUDA::cudart_static> $<INSTALL_INTERFACE:semitone::cudart_static>)
else()
  set(SEMITONE_CUDA_RUNTIME LibTorch::cudart)
endif()
message(STATUS "LibTorch ${LibTorch_VERSION} from ${LibTorch_ROOT_DIR}; CUDA: ${LibTorch_HAS_CUDA}, "
  "NCCL: ${SEMITONE_LINKS_CUDA}, CUDA kernels and graphs: ${SEMITONE_LINKS_KERNELS}")

# Finds LibTorch without a CUDA toolkit and without a GPU, and makes the target LibTorch::LibTorch.
#
# LibTorch's own package file in the Python wheel requires the CUDA toolkit of its build and links NVSHMEM. This module
# uses libtorch_cpu and libc10 directly. It searches these places, and the first hit counts:
#   1. SEMITONE_LIBTORCH (CMake or environment): the folder that holds include/ and lib/
#   2. Torch_DIR, then Torch_ROOT and CMAKE_PREFIX_PATH (each of CMake, then of the environment): an unpacked LibTorch, a
#      site-packages/torch, or torch.utils.cmake_prefix_path of Python
#   3. .deps/libtorch-<version>/torch, where tools/setup.sh puts it; one for CPUs before one with CUDA
#   4. LibTorch_BUILT_WITH, which the package file of an installed Semitone sets
#   5. the torch package of python3
#
# Semitone is tested with the releases from LibTorch_FIRST_TESTED to LibTorch_LAST_TESTED. Newer ones give a warning, and
# older ones an error. An installed Semitone accepts the release that it was built with: semitoneConfig.cmake.in.
# Result: LibTorch_ROOT_DIR, LibTorch_VERSION, LibTorch_HAS_CUDA.
include(FindPackageHandleStandardArgs)
set(LibTorch_FIRST_TESTED 2.9)
set(LibTorch_LAST_TESTED 2.15)

# A relative folder of the command line is one of the folder that cmake was called in, in installed packages too.
if(DEFINED CACHE{SEMITONE_LIBTORCH})
  set(SEMITONE_LIBTORCH "" CACHE PATH "The LibTorch to use: the folder that holds include/ and lib/")
endif()
set(_candidates ${SEMITONE_LIBTORCH} $ENV{SEMITONE_LIBTORCH})
set(_library "")
if(NOT _candidates)
  # A prefix with the headers alone is not one: Debian's libtorch-dev has its libraries in a folder of the processor.
  set(_library lib/libtorch_cpu.so)
  if(Torch_DIR)
    list(APPEND _candidates ${Torch_DIR}/../../..)
  endif()
  cmake_path(CONVERT "$ENV{CMAKE_PREFIX_PATH}" TO_CMAKE_PATH_LIST _prefixes)
  foreach(_prefix ${Torch_ROOT} $ENV{Torch_ROOT} ${CMAKE_PREFIX_PATH} ${_prefixes})
    list(APPEND _candidates ${_prefix} ${_prefix}/torch)
    if(EXISTS ${_prefix}/Torch/TorchConfig.cmake)  # <LibTorch>/share/cmake
      list(APPEND _candidates ${_prefix}/../..)
    endif()
  endforeach()
  # What was interrupted lacks the file `complete`.
  file(GLOB _deps ${PROJECT_SOURCE_DIR}/.deps/libtorch-*/complete)
  list(TRANSFORM _deps REPLACE "complete$" "torch")
  set(_deps_with_cuda ${_deps})
  list(FILTER _deps EXCLUDE REGEX "-cuda/torch$")
  list(FILTER _deps_with_cuda INCLUDE REGEX "-cuda/torch$")
  list(APPEND _candidates ${_deps} ${_deps_with_cuda} ${LibTorch_BUILT_WITH})
endif()

# Each release has one of these.
set(_version_headers torch/headeronly/version.h torch/version.h torch/csrc/api/include/torch/version.h)
set(LibTorch_ROOT_DIR "")
foreach(_candidate ${_candidates})
  foreach(_header ${_version_headers})
    if(NOT LibTorch_ROOT_DIR AND EXISTS ${_candidate}/include/${_header} AND EXISTS ${_candidate}/${_library})
      file(REAL_PATH ${_candidate} LibTorch_ROOT_DIR)
    endif()
  endforeach()
endforeach()
if(NOT LibTorch_ROOT_DIR AND "${SEMITONE_LIBTORCH}$ENV{SEMITONE_LIBTORCH}" STREQUAL "")
  find_package(Python3 COMPONENTS Interpreter QUIET)
  if(Python3_FOUND)
    execute_process(
      COMMAND ${Python3_EXECUTABLE} -c
        "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
      OUTPUT_VARIABLE LibTorch_ROOT_DIR OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  endif()
endif()

# Not those of an earlier call that found another LibTorch, and refused it.
foreach(_name VERSION CPU_LIBRARY C10_LIBRARY CUDA_LIBRARY C10_CUDA_LIBRARY)
  unset(LibTorch_${_name})
endforeach()
find_library(LibTorch_CPU_LIBRARY torch_cpu PATHS ${LibTorch_ROOT_DIR}/lib NO_DEFAULT_PATH NO_CMAKE_FIND_ROOT_PATH NO_CACHE)
find_library(LibTorch_C10_LIBRARY c10 PATHS ${LibTorch_ROOT_DIR}/lib NO_DEFAULT_PATH NO_CMAKE_FIND_ROOT_PATH NO_CACHE)
find_library(LibTorch_CUDA_LIBRARY torch_cuda PATHS ${LibTorch_ROOT_DIR}/lib NO_DEFAULT_PATH NO_CMAKE_FIND_ROOT_PATH NO_CACHE)
find_library(LibTorch_C10_CUDA_LIBRARY c10_cuda PATHS ${LibTorch_ROOT_DIR}/lib NO_DEFAULT_PATH NO_CMAKE_FIND_ROOT_PATH NO_CACHE)
set(LibTorch_HAS_CUDA OFF)
if(LibTorch_CUDA_LIBRARY AND LibTorch_C10_CUDA_LIBRARY)
  set(LibTorch_HAS_CUDA ON)
endif()

foreach(_header ${_version_headers})
  if(EXISTS ${LibTorch_ROOT_DIR}/include/${_header})
    file(READ ${LibTorch_ROOT_DIR}/include/${_header} _text)
    string(REGEX MATCH "define TORCH_VERSION_MAJOR ([0-9]+)" _ "${_text}")
    set(_major ${CMAKE_MATCH_1})
    string(REGEX MATCH "define TORCH_VERSION_MINOR ([0-9]+)" _ "${_text}")
    set(_minor ${CMAKE_MATCH_1})
    string(REGEX MATCH "define TORCH_VERSION_PATCH ([0-9]+)" _ "${_text}")
    if(NOT _major STREQUAL "" AND NOT "${CMAKE_MATCH_1}" STREQUAL "")
      set(LibTorch_VERSION ${_major}.${_minor}.${CMAKE_MATCH_1})
      break()
    endif()
  endif()
endforeach()

if(LibTorch_VERSION AND NOT LibTorch_BUILT_WITH)
  string(REGEX MATCH "^[0-9]+[.][0-9]+" _release ${LibTorch_VERSION})
  if(_release VERSION_LESS LibTorch_FIRST_TESTED)
    message(FATAL_ERROR "[cmake.libtorch] expected LibTorch ${LibTorch_FIRST_TESTED} or newer, got ${LibTorch_VERSION} in "
      "${LibTorch_ROOT_DIR} — run 'make setup', or give -DSEMITONE_LIBTORCH=<folder with include/ and lib/> of a newer one")
  elseif(_release VERSION_GREATER LibTorch_LAST_TESTED)
    message(WARNING "[cmake.libtorch] expected LibTorch ${LibTorch_FIRST_TESTED} to ${LibTorch_LAST_TESTED}, with which Semitone is "
      "tested, got ${LibTorch_VERSION} in ${LibTorch_ROOT_DIR} — run Semitone's tests before you rely on it")
  endif()
endif()

if(NOT LibTorch_REMEDY)
  set(LibTorch_REMEDY "run 'make setup', or give -DSEMITONE_LIBTORCH=<folder with include/ and lib/>")
endif()
find_package_handle_standard_args(LibTorch
  REQUIRED_VARS LibTorch_ROOT_DIR LibTorch_CPU_LIBRARY LibTorch_C10_LIBRARY
  VERSION_VAR LibTorch_VERSION
  HANDLE_VERSION_RANGE
  REASON_FAILURE_MESSAGE "${LibTorch_REMEDY}")

if(LibTorch_FOUND AND NOT TARGET LibTorch::LibTorch)
  add_library(LibTorch::c10 SHARED IMPORTED)
  set_target_properties(LibTorch::c10 PROPERTIES IMPORTED_LOCATION ${LibTorch_C10_LIBRARY})
  add_library(LibTorch::LibTorch SHARED IMPORTED)
  set_target_properties(LibTorch::LibTorch PROPERTIES IMPORTED_LOCATION ${LibTorch_CPU_LIBRARY})
  target_link_libraries(LibTorch::LibTorch INTERFACE LibTorch::c10)
  # LibTorch's include folder contains other libraries too (fmt 12 among them). -idirafter searches it last, so that
  # the system's own fmt, which spdlog is built with, is not hidden; its headers still count as system headers.
  target_compile_options(LibTorch::LibTorch INTERFACE
    "$<$<COMPILE_LANGUAGE:CXX>:SHELL:-idirafter \"${LibTorch_ROOT_DIR}/include\">"
    "$<$<COMPILE_LANGUAGE:CXX>:SHELL:-idirafter \"${LibTorch_ROOT_DIR}/include/torch/csrc/api/include\">")
  # Debian's libtorch-dev, or a LibTorch in /usr/local, has other headers of the same names among the system's. A folder
  # with links to LibTorch's own headers comes before them; the other libraries in its include folder still come last.
  if(NOT LibTorch_SYSTEM_INCLUDE_DIRS)
    set(LibTorch_SYSTEM_INCLUDE_DIRS /usr/include /usr/local/include)
  endif()
  set(_other_headers OFF)
  foreach(_folder ${LibTorch_SYSTEM_INCLUDE_DIRS})
    if(EXISTS ${_folder}/torch OR EXISTS ${_folder}/ATen)
      set(_other_headers ON)
    endif()
  endforeach()
  if(_other_headers)
    set(_own ${CMAKE_BINARY_DIR}/libtorch_headers)
    file(REMOVE_RECURSE ${_own})
    file(MAKE_DIRECTORY ${_own})
    foreach(_folder ATen c10 caffe2 torch)
      file(CREATE_LINK ${LibTorch_ROOT_DIR}/include/${_folder} ${_own}/${_folder} SYMBOLIC)
    endforeach()
    target_compile_options(LibTorch::LibTorch INTERFACE
      "$<$<COMPILE_LANGUAGE:CXX>:SHELL:-isystem \"${_own}\">"
      "$<$<COMPILE_LANGUAGE:CXX>:SHELL:-isystem \"${_own}/torch/csrc/api/include\">")
  endif()
  # at::parallel_for is a template. If LibTorch's threads are OpenMP's, its callers must be compiled for OpenMP too;
  # otherwise it silently runs on one thread. They must link LibTorch's own copy of the runtime: two copies would have
  # two pools of threads that compete for the cores. clang therefore gets no flag: -fopenmp links its own runtime,
  # libomp, and -fopenmp=libgomp compiles nothing for OpenMP. Semitone's own loops call LibTorch's runtime without the
  # flag (src/core/parallel_for.h). With it and both runtimes, at::parallel_for asks one of them for the number of threads
  # and runs in the other's, each of which does all of the work.
  file(STRINGS ${LibTorch_ROOT_DIR}/include/ATen/Config.h _openmp REGEX "define AT_PARALLEL_OPENMP 1")
  if(_openmp)
    file(GLOB _gomp ${LibTorch_ROOT_DIR}/lib/libgomp*.so*)
    list(APPEND _gomp gomp)  # where it has none, the system's
    list(GET _gomp 0 _gomp)  # which may have several names
    target_compile_options(LibTorch::LibTorch INTERFACE
      $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CXX_COMPILER_ID:GNU>>:-fopenmp>)
    target_link_libraries(LibTorch::LibTorch INTERFACE ${_gomp})
    if(CMAKE_CXX_COMPILER_ID MATCHES Clang AND CMAKE_CXX_FLAGS MATCHES "-fopenmp( |$|=libi?omp)")
      message(WARNING "[cmake.libtorch] expected clang without -fopenmp, got CMAKE_CXX_FLAGS='${CMAKE_CXX_FLAGS}': with a second OpenMP "
        "runtime, at::parallel_for in your own sources does its work once in each thread — leave the flag out: docs/using.md")
    endif()
  endif()
  # libtorch_cpu needs libcudart and libcupti, which it finds by its own RPATH, without the linker.
  target_link_options(LibTorch::LibTorch INTERFACE -Wl,--allow-shlib-undefined)
  if(LibTorch_HAS_CUDA)
    add_library(LibTorch::cuda SHARED IMPORTED)
    set_target_properties(LibTorch::cuda PROPERTIES IMPORTED_LOCATION ${LibTorch_CUDA_LIBRARY})
    add_library(LibTorch::c10_cuda SHARED IMPORTED)
    set_target_properties(LibTorch::c10_cuda PROPERTIES IMPORTED_LOCATION ${LibTorch_C10_CUDA_LIBRARY})
    target_link_libraries(LibTorch::cuda INTERFACE LibTorch::c10_cuda LibTorch::LibTorch)
    # The CUDA runtime that LibTorch loads: beside it, or in a Python package of its own. A LibTorch that was built on
    # this machine has that of the toolkit.
    file(GLOB _cudart ${LibTorch_ROOT_DIR}/lib/libcudart*.so* ${LibTorch_ROOT_DIR}/../nvidia/*/lib/libcudart.so*)
    list(APPEND _cudart cudart)
    list(GET _cudart 0 _cudart)
    add_library(LibTorch::cudart INTERFACE IMPORTED)
    target_link_libraries(LibTorch::cudart INTERFACE ${_cudart})
    # Loading it registers LibTorch's CUDA devices. A program calls no function of it, so the linker would drop it, and
    # LibTorch would find no device. One word, which CMake neither reorders nor merges with other flags.
    string(JOIN "," _needed -Wl,--push-state,--no-as-needed
      "\"${LibTorch_CUDA_LIBRARY}\"" "\"${LibTorch_C10_CUDA_LIBRARY}\"" --pop-state)
    target_link_libraries(LibTorch::LibTorch INTERFACE ${_needed})
  endif()
endif()

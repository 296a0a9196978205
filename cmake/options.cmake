# Every build option, with a description. An invalid value stops the configuration.
include(CMakeDependentOption)
include(GNUInstallDirs)

# As a subproject (add_subdirectory, FetchContent), only the library is built. BUILD_TESTING=OFF means no tests, as elsewhere.
set(tests_default ${PROJECT_IS_TOP_LEVEL})
if(DEFINED BUILD_TESTING AND NOT BUILD_TESTING)
  set(tests_default OFF)
endif()
option(SEMITONE_APPS "Build the program semitone" ${PROJECT_IS_TOP_LEVEL})
cmake_dependent_option(SEMITONE_TESTS "Build the tests" ${tests_default} SEMITONE_APPS OFF)
option(SEMITONE_BENCHMARKS "Build the benchmarks" ${PROJECT_IS_TOP_LEVEL})
cmake_dependent_option(SEMITONE_EXAMPLES "Build the examples" ${PROJECT_IS_TOP_LEVEL} SEMITONE_APPS OFF)
option(SEMITONE_C "Build the C interface, libsemitone_c" ${PROJECT_IS_TOP_LEVEL})
option(SEMITONE_INSTALL "Make the target install" ${PROJECT_IS_TOP_LEVEL})
set(SEMITONE_INSTALL_RPATH BUILD CACHE STRING
    "Where installed programs and libraries search LibTorch: BUILD (the folder of the build's), a folder, or empty (the loader's places)")
option(SEMITONE_WERROR "Warnings are errors" ${PROJECT_IS_TOP_LEVEL})

# As for libraries without a type, BUILD_SHARED_LIBS decides.
if(BUILD_SHARED_LIBS)
  set(default_library SHARED)
else()
  set(default_library STATIC)
endif()
set(SEMITONE_LIBRARY ${default_library} CACHE STRING
    "What semitone::semitone is: STATIC (one archive per room), SHARED (libsemitone.so), BOTH (static unless a project asks for shared)")
set_property(CACHE SEMITONE_LIBRARY PROPERTY STRINGS STATIC SHARED BOTH)
if(NOT SEMITONE_LIBRARY MATCHES "^(STATIC|SHARED|BOTH)$")
  message(FATAL_ERROR "[cmake.options] expected SEMITONE_LIBRARY to be STATIC, SHARED or BOTH, got '${SEMITONE_LIBRARY}'")
endif()

set(SEMITONE_CUDA AUTO CACHE STRING "CUDA kernels: AUTO (where nvcc is found), ON (required), OFF")
set_property(CACHE SEMITONE_CUDA PROPERTY STRINGS AUTO ON OFF)
if(NOT SEMITONE_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "[cmake.options] expected SEMITONE_CUDA to be AUTO, ON or OFF, got '${SEMITONE_CUDA}'")
endif()

set(SEMITONE_CUDA_ARCHITECTURES "" CACHE STRING
    "What the CUDA kernels are compiled for, in the words of CMAKE_CUDA_ARCHITECTURES. Empty: cmake/cuda.cmake chooses")

set(SEMITONE_SANITIZE "" CACHE STRING "Sanitizers: empty, 'address,undefined' or 'thread'")
if(NOT SEMITONE_SANITIZE MATCHES "^(|address,undefined|thread)$")
  message(FATAL_ERROR
    "[cmake.options] expected SEMITONE_SANITIZE to be empty, 'address,undefined' or 'thread', got '${SEMITONE_SANITIZE}'")
endif()

option(SEMITONE_FUZZ "Build the fuzzers (make fuzz); needs clang, with libFuzzer" OFF)
if(SEMITONE_FUZZ AND NOT CMAKE_CXX_COMPILER_ID MATCHES "Clang")
  message(FATAL_ERROR "[cmake.options] expected clang for SEMITONE_FUZZ, got ${CMAKE_CXX_COMPILER_ID} — install clang, or use the preset fuzz")
endif()

set(SEMITONE_LIBTORCH "" CACHE PATH
    "The LibTorch to use: the folder that holds include/ and lib/. Empty: search (cmake/FindLibTorch.cmake)")

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  if(PROJECT_IS_TOP_LEVEL)
    set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
  elseif(NOT CMAKE_CXX_FLAGS MATCHES "-O")
    message(WARNING "[cmake.options] expected a build type, got none: the compiler does not optimise, and Semitone's kernels are many "
      "times slower — configure with -DCMAKE_BUILD_TYPE=Release")
  endif()
endif()

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
# A parent's settings that would change or break this library. Its flags come first, so that these count.
if(NOT PROJECT_IS_TOP_LEVEL)
  # Results must not depend on them, and checks for inf and NaN would be removed.
  add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:-fno-fast-math;-fno-unsafe-math-optimizations;-fno-finite-math-only>")
  # Larger units than those of the presets have helpers of the same names.
  set(CMAKE_UNITY_BUILD_BATCH_SIZE 16)
  # Folders of sources hold headers with the names of the system's, and a parent may have headers with the names of ours, or
  # other releases of fmt (LibTorch's folder does): they would come before our own. Libraries bring such folders too.
  set(CMAKE_INCLUDE_CURRENT_DIR OFF)
  set_property(DIRECTORY PROPERTY INCLUDE_DIRECTORIES "")
  set_property(DIRECTORY PROPERTY LINK_LIBRARIES "")
  foreach(linter CLANG_TIDY CPPCHECK CPPLINT INCLUDE_WHAT_YOU_USE)
    set(CMAKE_CXX_${linter} "")
  endforeach()
endif()
if(NOT SEMITONE_LIBRARY STREQUAL STATIC)  # src/exports.map chooses among visible names
  set(CMAKE_CXX_VISIBILITY_PRESET default)
  set(CMAKE_VISIBILITY_INLINES_HIDDEN OFF)
  if(NOT PROJECT_IS_TOP_LEVEL)  # the variables' flags come before a parent's
    add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:-fvisibility=default;-fno-visibility-inlines-hidden>")
  endif()
endif()
# The same flag for libraries and programs, so that all share one precompiled header.
add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fPIC>)
# A multiplication and an addition are rounded separately, for the same numbers on every processor. GCC would fuse them
# wherever the instruction set allows, even across Highway's intrinsics.
add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-ffp-contract=off>)

# Libraries that tools/setup.sh unpacked where packages cannot be installed (no root).
if(EXISTS ${PROJECT_SOURCE_DIR}/.deps/prefix/usr)
  list(APPEND CMAKE_PREFIX_PATH ${PROJECT_SOURCE_DIR}/.deps/prefix/usr)
  include_directories(AFTER SYSTEM ${PROJECT_SOURCE_DIR}/.deps/prefix/usr/include)  # Gloo's headers have no package file
endif()

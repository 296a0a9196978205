# What a build has of CUDA, with folders that look like those of a LibTorch with CUDA, and without a device. Included by
# options.cmake. Nothing is compiled for a CPU, and one source of the kernels for GPUs, where there is an nvcc.
file(REMOVE_RECURSE ${WORK}/cuda)
# A clone that tools/setup.sh filled: the packages of CUDA 12, which have a folder for each library, and libraries without root.
foreach(name CMakeLists.txt LICENSE THIRD_PARTY.md apps cmake include src)
  file(MAKE_DIRECTORY ${WORK}/cuda/clone)
  file(CREATE_LINK ${SOURCE}/${name} ${WORK}/cuda/clone/${name} SYMBOLIC)
endforeach()
set(deps ${WORK}/cuda/clone/.deps)
set(libtorch ${deps}/libtorch-2.11.0-cuda/torch)
set(nvidia ${deps}/libtorch-2.11.0-cuda/nvidia)
file(WRITE ${libtorch}/include/torch/headeronly/version.h
  "#define TORCH_VERSION_MAJOR 2\n#define TORCH_VERSION_MINOR 11\n#define TORCH_VERSION_PATCH 0\n")
file(WRITE ${libtorch}/include/ATen/Config.h "")
foreach(name torch_cpu c10 torch_cuda c10_cuda)
  file(WRITE ${libtorch}/lib/lib${name}.so "")
endforeach()
foreach(file cuda_runtime/include/cuda_runtime_api.h cuda_runtime/lib/libcudart.so.12 cublas/include/cublas_v2.h
    cusparse/include/cusparse.h nccl/include/nccl.h)
  file(WRITE ${nvidia}/${file} "")
endforeach()
file(TOUCH ${deps}/libtorch-2.11.0-cuda/complete)
execute_process(COMMAND ${COMPILER} -print-multiarch OUTPUT_VARIABLE architecture OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
file(MAKE_DIRECTORY ${deps}/prefix/usr/lib/${architecture})

# Sets `output`. Without an nvcc: one that is already known, as an empty name, is not searched.
function(configure_clone)
  execute_process(COMMAND ${CMAKE_COMMAND} -E env --unset=SEMITONE_LIBTORCH
      ${CMAKE_COMMAND} -S ${WORK}/cuda/clone -B ${WORK}/cuda/build -G Ninja "-DCMAKE_PREFIX_PATH=${PREFIX_PATH}" -DCMAKE_CXX_COMPILER=${COMPILER}
      -DCMAKE_CUDA_COMPILER= -DCMAKE_EXPORT_COMPILE_COMMANDS=ON -DSEMITONE_LIBRARY=SHARED -DSEMITONE_TESTS=OFF -DSEMITONE_EXAMPLES=OFF
      -DSEMITONE_BENCHMARKS=OFF
    OUTPUT_VARIABLE output ERROR_VARIABLE output COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX REPLACE "[ \n]+" " " output "${output}")
  set(output "${output}" PARENT_SCOPE)
endfunction()
configure_clone()
file(READ ${WORK}/cuda/build/compile_commands.json commands)
foreach(object semitone_amp.dir/cuda_step_graph.cpp.o semitone_comm.dir/nccl.cpp.o)
  foreach(name cuda_runtime cublas cusparse)
    if(NOT commands MATCHES "-isystem [^ ]*/nvidia/${name}/include[^\n]*/${object} ")
      message(FATAL_ERROR "expected the headers in nvidia/${name} for ${object}, see ${WORK}/cuda/build/compile_commands.json")
    endif()
  endforeach()
endforeach()
file(READ ${WORK}/cuda/build/cmake_install.cmake install)
foreach(folder ${libtorch}/lib ${nvidia}/cuda_runtime/lib ${deps}/prefix/usr/lib/${architecture})
  string(REGEX MATCHALL "RPATH \"[^\"]*${folder}[:\"]" found "${install}")
  list(LENGTH found number)
  if(number LESS 6)  # checked and set for libsemitone.so, libsemitone_c.so and the program
    message(FATAL_ERROR "expected that installed programs and libraries search ${folder}, see ${WORK}/cuda/build/cmake_install.cmake")
  endif()
endforeach()
file(REMOVE ${nvidia}/cusparse/include/cusparse.h)
configure_clone()
if(NOT output MATCHES "cuda_runtime_api.h and cusparse.h were not found" OR NOT output MATCHES "NCCL: OFF")
  message(FATAL_ERROR "expected no CUDA without cusparse.h, got:\n${output}")
endif()
file(WRITE ${nvidia}/cusparse/include/cusparse.h "")

# clang as the compiler for CUDA. The project has it already.
file(WRITE ${WORK}/cuda/clang/CMakeLists.txt "
cmake_minimum_required(VERSION 3.25)
project(parent LANGUAGES NONE)
macro(enable_language)
endmacro()
set(CMAKE_CUDA_COMPILER clang++)
set(CMAKE_CUDA_COMPILER_ID Clang)
set(CMAKE_CUDA_COMPILER_VERSION 19.1.0)
set(SEMITONE_TESTS ON)
include(${SOURCE}/cmake/cuda.cmake)
if(SEMITONE_WITH_NVCC)
  message(FATAL_ERROR \"clang is taken for an nvcc\")
endif()
")
execute_process(COMMAND ${CMAKE_COMMAND} -S ${WORK}/cuda/clang -B ${WORK}/cuda/clang/build -DSEMITONE_CUDA=AUTO
  OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND ${CMAKE_COMMAND} -S ${WORK}/cuda/clang -B ${WORK}/cuda/clang/build -DSEMITONE_CUDA=ON
  OUTPUT_QUIET ERROR_VARIABLE output RESULT_VARIABLE result)
if(result EQUAL 0 OR NOT output MATCHES "expected nvcc 12.1 or newer")
  message(FATAL_ERROR "expected that clang is refused with SEMITONE_CUDA=ON, got ${result} and:\n${output}")
endif()

# A parent with CUDA, and options, flags and architectures of its own, which are not for the kernels.
file(WRITE ${WORK}/cuda/parent/CMakeLists.txt "
cmake_minimum_required(VERSION 3.25)
project(parent LANGUAGES CXX)
include(CheckLanguage)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  return()
endif()
set(CMAKE_CUDA_ARCHITECTURES 86)
enable_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER_ID STREQUAL NVIDIA OR CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.1)
  return()
endif()
set(CMAKE_CUDA_FLAGS \"--use_fast_math -ftz=true\")
add_compile_options(-Wall \$<\$<COMPILE_LANGUAGE:CUDA>:--fmad=true>)
add_subdirectory(${SOURCE} semitone)
if(NOT CMAKE_CUDA_FLAGS MATCHES use_fast_math OR NOT CMAKE_CUDA_ARCHITECTURES EQUAL 86)
  message(FATAL_ERROR \"the parent's variables were changed\")
endif()
file(TOUCH \${CMAKE_BINARY_DIR}/nvcc)
")
# Sets `command` to that of one of the kernels' sources, or to nothing without an nvcc.
function(configure_parent)
  execute_process(COMMAND ${CMAKE_COMMAND} -S ${WORK}/cuda/parent -B ${WORK}/cuda/parent/build -G Ninja -DCMAKE_EXPORT_COMPILE_COMMANDS=ON
      -DSEMITONE_LIBTORCH=${libtorch} "-DCMAKE_PREFIX_PATH=${PREFIX_PATH}" -DCMAKE_CXX_COMPILER=${COMPILER} -DCMAKE_BUILD_TYPE=Release ${ARGN}
    OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)
  set(command "")
  if(EXISTS ${WORK}/cuda/parent/build/nvcc)
    file(READ ${WORK}/cuda/parent/build/compile_commands.json commands)
    string(REGEX MATCH "[^\n]*/has_cuda.cu.o[^\n]*" command "${commands}")
    if(NOT command MATCHES "-fmad=false" OR command MATCHES "use_fast_math|-fmad=true|ftz=true.*ftz=true"
        OR command MATCHES "-Wall " OR NOT command MATCHES "-ftz=false.*-prec-div=true.*-prec-sqrt=true")
      message(FATAL_ERROR "expected none of the parent's options and flags for the kernels, got:\n${command}")
    endif()
  endif()
  set(command "${command}" PARENT_SCOPE)
endfunction()
configure_parent()
if(command)
  if(command MATCHES "compute_86" OR NOT command MATCHES "CUDA_PTX=900.*code=.sm_80.*code=.sm_90.*code=.compute_90.")
    message(FATAL_ERROR "expected the kernels' own architectures, got:\n${command}")
  endif()
  configure_parent(-DSEMITONE_CUDA_ARCHITECTURES=90-virtual)
  if(command MATCHES "sm_80" OR NOT command MATCHES "compute_90")
    message(FATAL_ERROR "expected the chosen architecture, got:\n${command}")
  endif()
  execute_process(COMMAND ${CMAKE_COMMAND} --build ${WORK}/cuda/parent/build --target
      semitone/src/kernels/CMakeFiles/semitone_kernels_cuda.dir/cuda/has_cuda.cu.o
    COMMAND_ERROR_IS_FATAL ANY)
endif()

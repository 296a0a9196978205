# Compiles a program with LibTorch where the system has headers of another LibTorch, as Debian's package libtorch-dev does, in one of
# several folders.
#   cmake -D SOURCE=<Semitone> -D WORK=<a folder of the test's own> -D LIBTORCH=… -D COMPILER=… -P libtorch_dev.cmake
cmake_minimum_required(VERSION 3.25)
file(REMOVE_RECURSE ${WORK})
foreach(header c10/macros/Macros.h torch/headeronly/macros/Macros.h torch/cuda.h)
  file(WRITE ${WORK}/usr/${header} "#error another LibTorch\n")
endforeach()
file(WRITE ${WORK}/usr/fmt/core.h "#define FMT_OF_THE_SYSTEM\n")
# The second is in torch/csrc/api/include.
file(WRITE ${WORK}/main.cpp "
#include <c10/macros/Macros.h>
#include <torch/cuda.h>
#include <fmt/core.h>
#ifndef FMT_OF_THE_SYSTEM
#error fmt of LibTorch
#endif
int main() {}
")
file(WRITE ${WORK}/CMakeLists.txt "
cmake_minimum_required(VERSION 3.25)
project(parent LANGUAGES CXX)
set(CMAKE_CXX_STANDARD 20)
set(LibTorch_SYSTEM_INCLUDE_DIRS \${CMAKE_SOURCE_DIR}/none \${CMAKE_SOURCE_DIR}/usr)
list(APPEND CMAKE_MODULE_PATH ${SOURCE}/cmake)
find_package(LibTorch REQUIRED)
add_library(app OBJECT main.cpp)
target_link_libraries(app PRIVATE LibTorch::LibTorch)
")
# The compiler searches these folders after those of -isystem and before those of -idirafter, as it does with /usr/include.
set(ENV{CPLUS_INCLUDE_PATH} ${WORK}/usr)
foreach(run first second)  # a second configuration finds the links of the first
  execute_process(COMMAND ${CMAKE_COMMAND} -S ${WORK} -B ${WORK}/build -G Ninja -DSEMITONE_LIBTORCH=${LIBTORCH} -DCMAKE_CXX_COMPILER=${COMPILER}
    OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)
endforeach()
execute_process(COMMAND ${CMAKE_COMMAND} --build ${WORK}/build COMMAND_ERROR_IS_FATAL ANY)

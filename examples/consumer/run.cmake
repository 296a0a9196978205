# Installs Semitone into WORK/prefix, then configures, builds and runs this project against it: what a user does.
function(run)
  execute_process(COMMAND ${ARGV} COMMAND_ECHO STDOUT COMMAND_ERROR_IS_FATAL ANY)
endfunction()
function(expect text pattern)
  if(NOT text MATCHES "${pattern}")
    message(FATAL_ERROR "expected '${pattern}' in:\n${text}")
  endif()
endfunction()
file(REMOVE_RECURSE ${WORK})
run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${WORK}/prefix)
run(${WORK}/prefix/bin/semitone --version)
set(installed doc/semitone/LICENSE doc/semitone/THIRD_PARTY.md)
if(EXISTS ${BUILD}/apps/pages)  # not in a build with sanitizers
  list(APPEND installed man/man1/semitone.1 man/man1/semitone-train.1 bash-completion/completions/semitone
    zsh/site-functions/_semitone fish/vendor_completions.d/semitone.fish)
endif()
if(EXISTS /usr/share/doc/nlohmann-json3-dev/copyright)
  list(APPEND installed doc/semitone/licences/nlohmann-json3-dev)
endif()
foreach(name ${installed})
  if(NOT EXISTS ${WORK}/prefix/share/${name})
    message(FATAL_ERROR "expected ${name} in ${WORK}/prefix/share")
  endif()
endforeach()
set(ENV{SEMITONE_LIBTORCH})
# In the environment, since a list in an argument becomes several arguments.
set(prefixes ${WORK}/prefix ${PREFIX_PATH})
list(JOIN prefixes ":" prefix_path)
set(ENV{CMAKE_PREFIX_PATH} ${prefix_path})
set(configure ${CMAKE_COMMAND} -DCMAKE_CXX_COMPILER=${COMPILER} -DCMAKE_BUILD_TYPE=Release)

# No LibTorch where one is said to be: a consumer's remedy, not that of Semitone's own Makefile.
execute_process(COMMAND ${configure} -S ${SOURCE} -B ${WORK}/without -DSEMITONE_LIBTORCH=${WORK}/none RESULT_VARIABLE code
  ERROR_VARIABLE message OUTPUT_QUIET)
string(REGEX REPLACE "[ \n]+" " " message "${message}")
expect("${code}" "^[1-9]")
expect("${message}" "give -DSEMITONE_LIBTORCH=<folder with include/ and lib/> of a LibTorch [0-9.]+")
if(message MATCHES "make setup")
  message(FATAL_ERROR "expected no 'make setup' in:\n${message}")
endif()

# A library that does not exist.
execute_process(COMMAND ${configure} -S ${SOURCE} -B ${WORK}/without -DSEMITONE_LIBTORCH= -DKIND=dynamic RESULT_VARIABLE code
  ERROR_VARIABLE message OUTPUT_QUIET)
string(REGEX REPLACE "[ \n]+" " " message "${message}")
expect("${code}" "^[1-9]")
expect("${message}" "expected COMPONENTS static or COMPONENTS shared, got 'dynamic'")

# A project of an older CMake hears nothing of policies.
file(WRITE ${WORK}/old/CMakeLists.txt
  "cmake_minimum_required(VERSION 3.10)\nproject(old LANGUAGES C CXX)\nfind_package(semitone REQUIRED)\n")
execute_process(COMMAND ${configure} -S ${WORK}/old -B ${WORK}/old/build -DZLIB_ROOT=${WORK}/none
  RESULT_VARIABLE code ERROR_VARIABLE message OUTPUT_QUIET)
if(NOT code EQUAL 0 OR message MATCHES "CMP0074")
  message(FATAL_ERROR "expected a configuration without warnings, got:\n${message}")
endif()

# None is named: the one that Semitone was built with.
run(${configure} -S ${SOURCE} -B ${WORK}/build)
run(${CMAKE_COMMAND} --build ${WORK}/build)
run(${WORK}/build/consumer)
if(EXISTS ${WORK}/build/scale)
  run(${WORK}/build/scale)
endif()

# The shared library, without compiling main.cpp again: the flags are the same.
file(GLOB_RECURSE shared ${WORK}/prefix/*/libsemitone.so)
if(shared)
  run(${configure} -S ${SOURCE} -B ${WORK}/build -DKIND=shared)
  run(${CMAKE_COMMAND} --build ${WORK}/build)
  file(STRINGS ${WORK}/build/consumer needed REGEX "libsemitone[.]so[.][0-9]+[.][0-9]+$")
  if(NOT needed)
    message(FATAL_ERROR "expected a program that needs libsemitone.so")
  endif()
  run(${WORK}/build/consumer)
endif()

# Without CMake, from a moved installation: pkg-config alone. It does not know libraries that were unpacked without root.
find_program(pkg_config pkg-config)
set(known 1)
if(pkg_config)
  execute_process(COMMAND ${pkg_config} --exists fmt spdlog zlib libpng libjpeg libhwy RESULT_VARIABLE known)
endif()
if(NOT known EQUAL 0)
  message(STATUS "semitone.pc was not tested: expected pkg-config, and fmt, spdlog, zlib, libpng, libjpeg and libhwy in its path")
else()
  file(RENAME ${WORK}/prefix ${WORK}/moved)
  file(GLOB_RECURSE pc ${WORK}/moved/semitone.pc)
  get_filename_component(pc_folder ${pc} DIRECTORY)
  set(ENV{PKG_CONFIG_PATH} ${pc_folder})
  execute_process(COMMAND ${pkg_config} --cflags semitone OUTPUT_VARIABLE flags COMMAND_ERROR_IS_FATAL ANY)
  separate_arguments(flags UNIX_COMMAND "${flags}")
  file(WRITE ${WORK}/flags.cpp "
#include <semitone/core/version.h>
#include <c10/macros/Macros.h>
#include <torch/cuda.h>
static_assert(__cplusplus >= 202002L);
")
  run(${COMPILER} -fsyntax-only ${WORK}/flags.cpp ${flags})
  # main.cpp takes long to compile, so its object is that of the CMake project.
  file(GLOB packages RELATIVE ${pc_folder} ${pc_folder}/semitone.pc ${pc_folder}/semitone_shared.pc)
  list(TRANSFORM packages REPLACE ".pc$" "")
  foreach(package ${packages})
    execute_process(COMMAND ${pkg_config} --libs ${package} OUTPUT_VARIABLE flags COMMAND_ERROR_IS_FATAL ANY)
    separate_arguments(flags UNIX_COMMAND "${flags}")
    run(${COMPILER} ${WORK}/build/CMakeFiles/consumer.dir/main.cpp.o -o ${WORK}/by_pkg_config_${package} ${flags})
    run(${WORK}/by_pkg_config_${package})
  endforeach()
  find_program(c_compiler cc)
  execute_process(COMMAND ${pkg_config} --cflags --libs semitone_c OUTPUT_VARIABLE flags RESULT_VARIABLE code ERROR_QUIET)
  if(code EQUAL 0 AND c_compiler)
    separate_arguments(flags UNIX_COMMAND "${flags}")
    run(${c_compiler} -std=c99 ${SOURCE}/scale.c -o ${WORK}/scale_by_pkg_config ${flags})
    run(${WORK}/scale_by_pkg_config)
  endif()
endif()

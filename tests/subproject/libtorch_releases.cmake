# What FindLibTorch.cmake and an installed Semitone say about LibTorch releases, with folders that look like LibTorch's.
#   cmake -D SOURCE=<Semitone> -D CONFIG=<semitoneConfig.cmake> -D BUILT_WITH=<release> -D WORK=<a folder of the test's own> -P …
cmake_minimum_required(VERSION 3.25)
file(REMOVE_RECURSE ${WORK})
file(WRITE ${WORK}/CMakeLists.txt "
cmake_minimum_required(VERSION 3.25)
project(parent LANGUAGES NONE)
set(CMAKE_FIND_LIBRARY_PREFIXES lib)
set(CMAKE_FIND_LIBRARY_SUFFIXES .so)
if(INSTALLED)
  foreach(name fmt spdlog ZLIB PNG JPEG hwy Threads)
    set(\${name}_FOUND ON)
    file(WRITE \${CMAKE_BINARY_DIR}/modules/Find\${name}.cmake \"set(\${name}_FOUND ON)\")
  endforeach()
  set(CMAKE_MODULE_PATH \${CMAKE_BINARY_DIR}/modules)
  find_package(semitone REQUIRED PATHS \${CMAKE_SOURCE_DIR}/installed NO_DEFAULT_PATH)
else()
  list(APPEND CMAKE_MODULE_PATH ${SOURCE}/cmake)
  find_package(LibTorch REQUIRED)
endif()
if(DEFINED FOLDER AND NOT LibTorch_ROOT_DIR STREQUAL FOLDER)
  message(FATAL_ERROR \"expected \${FOLDER}, got \${LibTorch_ROOT_DIR}\")
endif()
get_target_property(links LibTorch::LibTorch INTERFACE_LINK_LIBRARIES)
list(FILTER links INCLUDE REGEX gomp)
if(NOT links STREQUAL GOMP)
  message(FATAL_ERROR \"libgomp: expected '\${GOMP}', got '\${links}'\")
endif()
")
# As it would be in lib/cmake/semitone; without targets.
set(package ${WORK}/installed/lib/cmake/semitone)
file(COPY ${CONFIG} ${SOURCE}/cmake/FindLibTorch.cmake DESTINATION ${package})
file(WRITE ${package}/semitone-static.cmake "")
# Its library is not there: of another component.
file(WRITE ${package}/semitone-c.cmake "message(FATAL_ERROR no)")

# `message`: a regular expression for standard error, or empty if nothing may be there. Further arguments: the names of
# LibTorch's OpenMP runtime, of which one is linked.
function(expect release installed code message)
  set(libtorch ${WORK}/libtorch-${release})
  string(REPLACE "." ";" numbers ${release})
  list(GET numbers 0 major)
  list(GET numbers 1 minor)
  list(GET numbers 2 patch)
  set(header headeronly/version.h)
  if(release VERSION_LESS 2.11)
    set(header csrc/api/include/torch/version.h)
  endif()
  file(WRITE ${libtorch}/include/torch/${header}
    "#define TORCH_VERSION_MAJOR ${major}\n#define TORCH_VERSION_MINOR ${minor}\n#define TORCH_VERSION_PATCH ${patch}\n")
  file(WRITE ${libtorch}/include/ATen/Config.h "#define AT_PARALLEL_OPENMP 1\n")
  set(gomp gomp)  # the system's
  foreach(name ${ARGN})
    file(WRITE ${libtorch}/lib/${name} "")
    set(gomp ${libtorch}/lib/libgomp.so)
  endforeach()
  foreach(name torch_cpu c10 torch_cuda c10_cuda)
    file(WRITE ${libtorch}/lib/lib${name}.so "")
  endforeach()
  execute_process(COMMAND ${CMAKE_COMMAND} -S ${WORK} -B ${WORK}/build-${release}-${installed} -DSEMITONE_LIBTORCH=${libtorch}
      -DINSTALLED=${installed} -DGOMP=${gomp}
    RESULT_VARIABLE result ERROR_VARIABLE text OUTPUT_QUIET)
  string(REGEX REPLACE "[ \n]+" " " text "${text}")
  if(NOT result EQUAL code OR (message AND NOT text MATCHES "${message}") OR (NOT message AND text))
    message(FATAL_ERROR "LibTorch ${release}: expected exit code ${code} and '${message}', got ${result} and:\n${text}")
  endif()
endfunction()
expect(2.8.0 OFF 1 "expected LibTorch 2.9 or newer, got 2.8.0 in [^ ]*libtorch-2.8.0")
expect(2.9.0 OFF 0 "")
expect(2.11.0 OFF 0 "")
expect(2.15.9 OFF 0 "" libgomp.so libgomp.so.1 libgomp.so.1.0.0)
expect(2.16.0 OFF 0 "expected LibTorch 2.9 to 2.15, with which Semitone is tested, got 2.16.0")

string(REGEX MATCH "^([0-9]+)[.]([0-9]+)[.]([0-9]+)" _ ${BUILT_WITH})
math(EXPR next_minor "${CMAKE_MATCH_2} + 1")
math(EXPR next_patch "${CMAKE_MATCH_3} + 1")
expect(${BUILT_WITH} ON 0 "")
expect(${CMAKE_MATCH_1}.${CMAKE_MATCH_2}.${next_patch} ON 0 "expected LibTorch ${BUILT_WITH}, which Semitone was built with")
expect(${CMAKE_MATCH_1}.${next_minor}.0 ON 1 "Another release needs a Semitone that was built with it")

# Where the installed Semitone is optional, another release is a message, and the project keeps its own settings.
file(WRITE ${WORK}/optional/CMakeLists.txt "
cmake_minimum_required(VERSION 3.25)
project(parent LANGUAGES NONE)
set(CMAKE_FIND_LIBRARY_PREFIXES lib)
set(CMAKE_FIND_LIBRARY_SUFFIXES .so)
set(CMAKE_MODULE_PATH own)
find_package(semitone QUIET PATHS ${WORK}/installed NO_DEFAULT_PATH)
if(semitone_FOUND OR NOT semitone_NOT_FOUND_MESSAGE MATCHES \"got '${CMAKE_MATCH_1}[.]${next_minor}[.]0'\")
  message(FATAL_ERROR \"found: \${semitone_FOUND}, \${semitone_NOT_FOUND_MESSAGE}\")
endif()
if(NOT CMAKE_MODULE_PATH STREQUAL own OR DEFINED LibTorch_BUILT_WITH OR DEFINED LibTorch_REMEDY)
  message(FATAL_ERROR \"left: \${CMAKE_MODULE_PATH}, \${LibTorch_BUILT_WITH}, \${LibTorch_REMEDY}\")
endif()
# Another call finds the libraries of its own LibTorch.
list(APPEND CMAKE_MODULE_PATH ${SOURCE}/cmake)
set(SEMITONE_LIBTORCH ${WORK}/libtorch-2.9.0)
find_package(LibTorch REQUIRED)
get_target_property(location LibTorch::LibTorch IMPORTED_LOCATION)
if(NOT location STREQUAL \"${WORK}/libtorch-2.9.0/lib/libtorch_cpu.so\" OR NOT LibTorch_VERSION STREQUAL 2.9.0)
  message(FATAL_ERROR \"expected LibTorch 2.9.0, got \${LibTorch_VERSION} and \${location}\")
endif()
")
execute_process(COMMAND ${CMAKE_COMMAND} -S ${WORK}/optional -B ${WORK}/optional/build
  -DSEMITONE_LIBTORCH=${WORK}/libtorch-${CMAKE_MATCH_1}.${next_minor}.0 OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)

# A prefix that has LibTorch's headers alone, as /usr with Debian's libtorch-dev, is passed over, also in the environment.
set(header include/torch/headeronly/version.h)
file(COPY ${WORK}/libtorch-2.11.0/${header} DESTINATION ${WORK}/headers/include/torch/headeronly)
function(expect_second_prefix prefix_of_environment prefix_of_cmake)
  file(REMOVE_RECURSE ${WORK}/build-prefix)
  execute_process(COMMAND ${CMAKE_COMMAND} -E env --unset=SEMITONE_LIBTORCH CMAKE_PREFIX_PATH=${prefix_of_environment}
      ${CMAKE_COMMAND} -S ${WORK} -B ${WORK}/build-prefix -DGOMP=gomp "-DCMAKE_PREFIX_PATH=${prefix_of_cmake}"
    OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)
endfunction()
expect_second_prefix("" "${WORK}/headers;${WORK}/libtorch-2.11.0")
expect_second_prefix(${WORK}/headers:${WORK}/libtorch-2.11.0 "")
# torch.utils.cmake_prefix_path of Python is the folder of LibTorch's own package file.
file(WRITE ${WORK}/libtorch-2.11.0/share/cmake/Torch/TorchConfig.cmake "")
expect_second_prefix("" "${WORK}/headers;${WORK}/libtorch-2.11.0/share/cmake")

# Configures the parent in `folder`, which has a .deps, and expects the LibTorch in `expected`.
function(expect_folder folder expected)
  file(REMOVE_RECURSE ${WORK}/build-folder)
  execute_process(COMMAND ${CMAKE_COMMAND} -E env --unset=SEMITONE_LIBTORCH --unset=CMAKE_PREFIX_PATH
      ${CMAKE_COMMAND} -S ${folder} -B ${WORK}/build-folder -DGOMP=gomp -DFOLDER=${expected} ${ARGN}
    WORKING_DIRECTORY ${WORK}/headers OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)
endfunction()
expect_folder(${WORK} ${WORK}/libtorch-2.11.0 -DTorch_ROOT=${WORK}/libtorch-2.11.0)
expect_folder(${WORK} ${WORK}/libtorch-2.11.0 -DSEMITONE_LIBTORCH=../libtorch-2.11.0)
# Of the clone's own: what was interrupted does not count, and one with CUDA counts last.
file(COPY ${WORK}/CMakeLists.txt DESTINATION ${WORK}/clone)
foreach(name libtorch-2.11.0-cuda.partial libtorch-2.11.0-cuda libtorch-2.11.0)
  file(COPY ${WORK}/libtorch-2.11.0/ DESTINATION ${WORK}/clone/.deps/${name}/torch)
endforeach()
file(TOUCH ${WORK}/clone/.deps/libtorch-2.11.0-cuda/complete)
expect_folder(${WORK}/clone ${WORK}/clone/.deps/libtorch-2.11.0-cuda/torch)
file(TOUCH ${WORK}/clone/.deps/libtorch-2.11.0/complete)
expect_folder(${WORK}/clone ${WORK}/clone/.deps/libtorch-2.11.0/torch)

# A folder that is not there is an error, also from the environment: LibTorch is not taken from elsewhere.
execute_process(COMMAND ${CMAKE_COMMAND} -E env SEMITONE_LIBTORCH=${WORK}/none ${CMAKE_COMMAND} -S ${WORK} -B ${WORK}/build-none
  RESULT_VARIABLE result ERROR_VARIABLE text OUTPUT_QUIET)
if(result EQUAL 0 OR NOT text MATCHES "Could NOT find LibTorch")
  message(FATAL_ERROR "expected no LibTorch in a folder that is not there, got ${result} and:\n${text}")
endif()

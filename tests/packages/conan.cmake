# Packages a built Semitone with the recipe in packaging/conan, as docs/packages.md says, and builds and runs examples/consumer with
# the package. Nothing is downloaded: the other libraries are those of the system.
#   cmake -D SOURCE=<Semitone> -D BUILD=<build folder> -D WORK=<a folder of the test's own> -D VERSION=… -D LIBTORCH=… -D COMPILER=…
#     -D CONAN=… -P conan.cmake
cmake_minimum_required(VERSION 3.25)
function(run)
  execute_process(COMMAND ${ARGV} WORKING_DIRECTORY ${WORK}/source COMMAND_ECHO STDOUT COMMAND_ERROR_IS_FATAL ANY)
endfunction()
file(REMOVE_RECURSE ${WORK})
# The recipe expects the build of the sources that it is in: build/release. Conan writes beside it.
file(COPY ${SOURCE}/CMakeLists.txt ${SOURCE}/LICENSE ${SOURCE}/THIRD_PARTY.md ${SOURCE}/apps ${SOURCE}/cmake ${SOURCE}/include ${SOURCE}/src
  DESTINATION ${WORK}/source)
file(COPY ${SOURCE}/packaging/conan DESTINATION ${WORK}/source/packaging)
file(COPY ${SOURCE}/examples/consumer DESTINATION ${WORK}/source/examples)
file(MAKE_DIRECTORY ${WORK}/source/build)
file(CREATE_LINK ${BUILD} ${WORK}/source/build/release SYMBOLIC)

set(ENV{CONAN_HOME} ${WORK}/conan)
set(ENV{SEMITONE_LIBTORCH} ${LIBTORCH})
set(ENV{CXX} ${COMPILER})
run(${CONAN} profile detect)
set(settings --no-remote -s build_type=Release -s compiler.cppstd=20)
function(package_and_test)
  run(${CONAN} export-pkg packaging/conan ${settings} ${ARGV} --test-folder=)  # the next command tests it
  run(${CONAN} test packaging/conan/test_package semitone/${VERSION} ${settings} ${ARGV})
  # Conan's package, and no other installation of Semitone.
  file(STRINGS ${WORK}/source/build/conan/consumer/CMakeCache.txt found REGEX "^semitone_DIR:")
  if(NOT found MATCHES "=${WORK}/conan/")
    message(FATAL_ERROR "expected the package in ${WORK}/conan, got ${found}")
  endif()
  string(REGEX REPLACE ".*=(.*)/lib/cmake/semitone" "\\1" package "${found}")
  set(package ${package} PARENT_SCOPE)
endfunction()
package_and_test(-o "semitone/*:system_libraries=True")

# The shared library alone, of a build that has both.
file(REMOVE_RECURSE ${WORK}/source/build/conan)
package_and_test(-o "semitone/*:system_libraries=True" -o "semitone/*:shared=True")
file(GLOB static ${package}/lib/libsemitone*.a ${package}/lib/cmake/semitone/semitone-static*.cmake)
file(READ ${package}/lib/pkgconfig/semitone.pc pc)
if(static OR NOT EXISTS ${package}/lib/libsemitone.so OR NOT pc MATCHES "-lsemitone ")
  message(FATAL_ERROR "expected the shared library alone in ${package}, got ${static} and:\n${pc}")
endif()

# With stand-ins for Conan's libraries: their names for CMake, and the order of requirements (of two releases of fmt, spdlog takes
# one). hwy-config.cmake must not be the system's.
foreach(library fmt/9.1.0 fmt/12.0.0 spdlog/1.15.0 highway/1.2.0 libjpeg-turbo/3.1.0 libpng/1.6.50 zlib/1.3.1 nlohmann_json/3.12.0)
  string(REPLACE "/" ";" library ${library})
  list(GET library 0 name)
  list(GET library 1 release)
  run(${CONAN} create ${CMAKE_CURRENT_LIST_DIR}/stand_in --no-remote --name=${name} --version=${release})
endforeach()
file(REMOVE_RECURSE ${WORK}/source/build/conan)
package_and_test()
file(STRINGS ${WORK}/source/build/conan/consumer/CMakeCache.txt found REGEX "^hwy_DIR:")
if(NOT found MATCHES "=${WORK}/conan/")
  message(FATAL_ERROR "expected hwy-config.cmake of the package, got ${found}")
endif()

# Another LibTorch is another package.
file(COPY ${LIBTORCH}/include/torch/headeronly/version.h DESTINATION ${WORK}/libtorch/include/torch/headeronly)
file(READ ${WORK}/libtorch/include/torch/headeronly/version.h text)
string(REGEX REPLACE "VERSION_MINOR [0-9]+" "VERSION_MINOR 99" text "${text}")
file(WRITE ${WORK}/libtorch/include/torch/headeronly/version.h "${text}")
set(ENV{SEMITONE_LIBTORCH} ${WORK}/libtorch)
execute_process(COMMAND ${CONAN} install --no-remote --requires=semitone/${VERSION} ${settings} -o "semitone/*:system_libraries=True"
  WORKING_DIRECTORY ${WORK}/source RESULT_VARIABLE code ERROR_VARIABLE message OUTPUT_QUIET)
if(code EQUAL 0 OR NOT message MATCHES "libtorch=2[.]99" OR NOT message MATCHES "Missing (prebuilt|binary)")
  message(FATAL_ERROR "expected no package for another LibTorch, got ${code} and:\n${message}")
endif()

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
set(settings --no-remote -s build_type=Release -s compiler.cppstd=20 -o "semitone/*:system_libraries=True")
run(${CONAN} export-pkg packaging/conan ${settings} --test-folder=)  # the next command tests it
run(${CONAN} test packaging/conan/test_package semitone/${VERSION} ${settings})
# Conan's package, and no other installation of Semitone.
file(STRINGS ${WORK}/source/build/conan/consumer/CMakeCache.txt found REGEX "^semitone_DIR:")
if(NOT found MATCHES "=${WORK}/conan/")
  message(FATAL_ERROR "expected the package in ${WORK}/conan, got ${found}")
endif()

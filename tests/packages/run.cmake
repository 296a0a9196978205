# Makes the packages, unpacks them into a folder, and builds and runs a project outside of the repository with them.
#   cmake -D BUILD=<build folder> -D WORK=<a folder of the test's own> -D CONSUMER=<examples/consumer> -D VERSION=… -D LIBTORCH=…
#     -D PREFIX_PATH=… -D COMPILER=… -D CPACK=… -D DPKG_DEB=… -P run.cmake
cmake_minimum_required(VERSION 3.25)
function(run)
  execute_process(COMMAND ${ARGV} COMMAND_ECHO STDOUT COMMAND_ERROR_IS_FATAL ANY)
endfunction()
file(REMOVE_RECURSE ${WORK})
set(ENV{SEMITONE_LIBTORCH})
run(${CPACK} --config ${BUILD}/CPackConfig.cmake -B ${WORK}/packages)

file(GLOB packages ${WORK}/packages/*.deb)
foreach(package ${packages})
  run(${DPKG_DEB} -x ${package} ${WORK}/root)
  execute_process(COMMAND ${DPKG_DEB} -f ${package} Package Version Depends OUTPUT_VARIABLE fields COMMAND_ERROR_IS_FATAL ANY)
  if(NOT fields MATCHES "Version: ${VERSION}\n" OR NOT fields MATCHES "Depends: [^\n]*libfmt[^\n]*zlib1g")
    message(FATAL_ERROR "expected version ${VERSION} and the libraries that Semitone links, got:\n${fields}")
  endif()
  string(APPEND all_fields "${fields}")
endforeach()
foreach(name libsemitone-dev libsemitone[0-9.]+ semitone)
  if(NOT all_fields MATCHES "Package: ${name}\n")
    message(FATAL_ERROR "expected a package ${name}, got:\n${all_fields}")
  endif()
endforeach()

# The archive has the same files, and the licences once.
file(GLOB archive ${WORK}/packages/*.tar.gz)
file(ARCHIVE_EXTRACT INPUT ${archive} DESTINATION ${WORK}/archive)
file(GLOB top ${WORK}/archive/*)
file(GLOB_RECURSE in_archive RELATIVE ${top} ${top}/*)
file(GLOB_RECURSE in_packages RELATIVE ${WORK}/root/usr ${WORK}/root/usr/*)
list(FILTER in_packages EXCLUDE REGEX "share/doc/semitone-(runtime|tools)/")
list(SORT in_archive)
list(SORT in_packages)
if(NOT in_archive STREQUAL in_packages OR NOT "share/doc/semitone/LICENSE" IN_LIST in_archive)
  message(FATAL_ERROR "expected the same files, got in the archive:\n${in_archive}\nand in the packages:\n${in_packages}")
endif()

# One project has one kind of library.
file(WRITE ${WORK}/kinds/CMakeLists.txt "
cmake_minimum_required(VERSION 3.25)
project(kinds LANGUAGES C CXX)
find_package(semitone REQUIRED COMPONENTS shared)
find_package(semitone REQUIRED)
get_target_property(type semitone::semitone TYPE)
find_package(semitone QUIET COMPONENTS static)
if(semitone_FOUND OR NOT type STREQUAL SHARED_LIBRARY)
  message(FATAL_ERROR \"expected libsemitone.so alone, got \${type}, and then: \${semitone_FOUND}\")
endif()
")
# In the environment, since a list in an argument becomes several arguments.
set(prefixes ${WORK}/root/usr ${PREFIX_PATH})
list(JOIN prefixes ":" prefix_path)
set(ENV{CMAKE_PREFIX_PATH} ${prefix_path})
run(${CMAKE_COMMAND} -S ${WORK}/kinds -B ${WORK}/kinds/build -DSEMITONE_LIBTORCH=${LIBTORCH}
  -DCMAKE_CXX_COMPILER=${COMPILER})

run(${WORK}/root/usr/bin/semitone --version)
file(COPY ${CONSUMER}/CMakeLists.txt ${CONSUMER}/main.cpp ${CONSUMER}/scale.c DESTINATION ${WORK}/app)
run(${CMAKE_COMMAND} -S ${WORK}/app -B ${WORK}/app/build -DKIND=shared -DSEMITONE_LIBTORCH=${LIBTORCH}
  -DCMAKE_CXX_COMPILER=${COMPILER} -DCMAKE_BUILD_TYPE=Release)
run(${CMAKE_COMMAND} --build ${WORK}/app/build)
run(${WORK}/app/build/consumer)
run(${WORK}/app/build/scale)

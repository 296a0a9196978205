# Configures Semitone as packagers do: without the program, and with a shared library by CMake's own variable.
#   cmake -D SOURCE=<Semitone> -D WORK=<a folder of the test's own> -D LIBTORCH=… -D PREFIX_PATH=… -D COMPILER=… -P options.cmake
cmake_minimum_required(VERSION 3.25)
file(REMOVE_RECURSE ${WORK})
execute_process(COMMAND ${CMAKE_COMMAND} -S ${SOURCE} -B ${WORK} -G Ninja -DSEMITONE_LIBTORCH=${LIBTORCH}
    "-DCMAKE_PREFIX_PATH=${PREFIX_PATH}" -DCMAKE_CXX_COMPILER=${COMPILER} -DSEMITONE_CUDA=OFF
    -DSEMITONE_APPS=OFF -DBUILD_SHARED_LIBS=ON -DSEMITONE_INSTALL_RPATH= -DCMAKE_INSTALL_LIBDIR=lib64 -DCMAKE_INSTALL_INCLUDEDIR=include/abi
  OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)
file(READ ${WORK}/semitone.pc pc)
file(READ ${WORK}/cmake_install.cmake install)
file(READ ${WORK}/CPackConfig.cmake packages)
if(NOT pc MATCHES "-lsemitone " OR pc MATCHES "-lsemitone_core" OR NOT pc MATCHES "includedir=[^\n]*/include/abi\n")
  message(FATAL_ERROR "expected libsemitone.so and the chosen folders in semitone.pc, got:\n${pc}")
endif()
if(NOT install MATCHES "lib64/libsemitone[.]so" OR install MATCHES "libsemitone_core[.]a" OR install MATCHES "NEW_RPATH \"[^\"]")
  message(FATAL_ERROR "expected libsemitone.so without archives and without a place of LibTorch, see ${WORK}/cmake_install.cmake")
endif()
if(NOT packages MATCHES "CPACK_COMPONENTS_ALL \"Development;Runtime\"" OR packages MATCHES "libfmt-dev")
  message(FATAL_ERROR "expected packages without the program and the static library's dependencies, got:\n${packages}")
endif()
file(READ ${WORK}/build.ninja build)
if(build MATCHES "semitone_cli|core_test" OR NOT build MATCHES "semitone_benchmarks")
  message(FATAL_ERROR "expected benchmarks, but no program and no tests")
endif()

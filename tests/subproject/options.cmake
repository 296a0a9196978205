# Configures Semitone as packagers do: without the program, and with a shared library by CMake's own variable. Then with several
# configurations, with tests on a machine that lacks programs that some of them need, and with CUDA.
#   cmake -D SOURCE=<Semitone> -D WORK=<a folder of the test's own> -D LIBTORCH=… -D PREFIX_PATH=… -D COMPILER=… -P options.cmake
cmake_minimum_required(VERSION 3.25)
file(REMOVE_RECURSE ${WORK})
set(configure ${CMAKE_COMMAND} -S ${SOURCE} -G Ninja -DSEMITONE_LIBTORCH=${LIBTORCH} "-DCMAKE_PREFIX_PATH=${PREFIX_PATH}"
  -DCMAKE_CXX_COMPILER=${COMPILER} -DSEMITONE_CUDA=OFF)
execute_process(COMMAND ${configure} -B ${WORK}
    -DSEMITONE_APPS=OFF -DBUILD_SHARED_LIBS=ON -DSEMITONE_INSTALL_RPATH= -DCMAKE_INSTALL_LIBDIR=lib64 -DCMAKE_INSTALL_INCLUDEDIR=include/abi
  OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)
file(READ ${WORK}/semitone.pc pc)
file(GLOB compiler ${WORK}/CMakeFiles/*/CMakeCXXCompiler.cmake)
file(READ ${compiler} compiler)
file(READ ${WORK}/cmake_install.cmake install)
file(READ ${WORK}/CPackConfig.cmake packages)
# OpenMP's flag is for GCC: clang would link a second runtime.
string(REGEX MATCH "CMAKE_CXX_COMPILER_ID \"([A-Za-z]+)\"" _ "${compiler}")
set(openmp "")
if(CMAKE_MATCH_1 STREQUAL GNU)
  set(openmp -fopenmp)
endif()
if(pc MATCHES "gomp" AND NOT pc MATCHES "\nopenmp=${openmp}\n")
  message(FATAL_ERROR "expected openmp=${openmp} for ${COMPILER} in semitone.pc, got:\n${pc}")
endif()
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

# Several configurations. Release has the packages' dependencies, and without it there is no .deb.
list(TRANSFORM configure REPLACE "^Ninja$" "Ninja Multi-Config" OUTPUT_VARIABLE configure_multi)
foreach(types "Debug;Release" "Debug;RelWithDebInfo")
  execute_process(COMMAND ${configure_multi} -B ${WORK}/multi "-DCMAKE_CONFIGURATION_TYPES=${types}" -DSEMITONE_APPS=OFF
      -DSEMITONE_BENCHMARKS=OFF -DCPACK_PACKAGE_CONTACT=nobody
    OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)
  file(READ ${WORK}/multi/CPackConfig.cmake packages)
  string(REGEX MATCH "set[(]CPACK_PROJECT_CONFIG_FILE \"([^\"]*)\"" _ "${packages}")
  set(file "${CMAKE_MATCH_1}")
  if(types MATCHES Release AND NOT EXISTS "${file}" OR NOT types MATCHES Release AND (file OR packages MATCHES "CPACK_GENERATOR \"[^\"]*DEB"))
    message(FATAL_ERROR "expected the packages' dependencies of Release alone, got '${file}' for ${types}")
  endif()
endforeach()

# Programs that are already known, as an empty name, are not searched.
set(names "completion_test[.]zsh" "completion_test[.]fish" "completion_test[.]groff" packages conan report_page_test "launched_test[.]torchrun"
  "launched_test[.]mpirun" multi_host_test "example[.]bindings[.]rust" "example[.]bindings[.]csharp"
  "example[.]bindings[.]java")
foreach(program SEMITONE_zsh SEMITONE_fish SEMITONE_groff DPKG_SHLIBDEPS_PROGRAM CONAN_PROGRAM CHROMIUM_PROGRAM TORCHRUN_PROGRAM
    MPIRUN_PROGRAM IP_PROGRAM RUSTC_PROGRAM MCS_PROGRAM JAVAC_PROGRAM)
  list(APPEND hidden -D${program}=)
endforeach()
# With absolute folders for libraries and headers, as some packagers pass them.
execute_process(COMMAND ${configure} -B ${WORK}/tests -DSEMITONE_LIBRARY=BOTH ${hidden}
    -DCMAKE_INSTALL_LIBDIR=/elsewhere/lib -DCMAKE_INSTALL_INCLUDEDIR=/elsewhere/include
  OUTPUT_VARIABLE output COMMAND_ERROR_IS_FATAL ANY)
file(READ ${WORK}/tests/semitone.pc pc)
file(READ ${WORK}/tests/semitoneConfig.cmake config)
if(NOT pc MATCHES "\nlibdir=/elsewhere/lib\nincludedir=/elsewhere/include\n" OR NOT config MATCHES "_LIBRARY_DIR /elsewhere/lib\\)")
  message(FATAL_ERROR "expected absolute folders as they were given, got:\n${pc}\n${config}")
endif()
execute_process(COMMAND ${CMAKE_CTEST_COMMAND} --test-dir ${WORK}/tests -N OUTPUT_VARIABLE tests COMMAND_ERROR_IS_FATAL ANY)
file(READ ${WORK}/tests/missing_tests.txt missing)
foreach(name ${names})
  foreach(text output missing)
    if(NOT ${text} MATCHES "Test not registered: ${name}, which needs [^\n]")
      message(FATAL_ERROR "expected a line that says what ${name} needs, got:\n${${text}}")
    endif()
  endforeach()
  if(tests MATCHES ": ${name}\n")
    message(FATAL_ERROR "expected no ${name}, got:\n${tests}")
  endif()
endforeach()

include(${CMAKE_CURRENT_LIST_DIR}/cuda.cmake)

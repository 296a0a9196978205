# The environment of tests, from make or from ctest: OpenMP's threads sleep while they wait, since several tests run at
# once, and the options of each sanitizer.
set(SEMITONE_TEST_ENVIRONMENT "OMP_WAIT_POLICY=PASSIVE")
set(SEMITONE_TEST_TIMEOUT 900)  # seconds, of a test that a hang would stop
if(CMAKE_CROSSCOMPILING)
  set(SEMITONE_TEST_TIMEOUT 7200)  # in an emulator
endif()
if(SEMITONE_SANITIZE)
  set(SEMITONE_TEST_TIMEOUT 3600)
  add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${SEMITONE_SANITIZE};-fno-omit-frame-pointer>"
    # GCC sees ghosts behind the sanitizers' checks.
    $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CXX_COMPILER_ID:GNU>>:-Wno-maybe-uninitialized>)
  add_link_options(-fsanitize=${SEMITONE_SANITIZE})
  set(tools ${PROJECT_SOURCE_DIR}/tools)
  if(SEMITONE_SANITIZE STREQUAL thread)
    # ThreadSanitizer does not see how libgomp's threads wait for one another. LLVM's libomp has the same functions, and
    # tells it through its tool Archer.
    file(GLOB llvm_folders LIST_DIRECTORIES true /usr/lib/llvm-*/lib)
    find_library(SEMITONE_ARCHER archer PATHS ${llvm_folders})
    cmake_path(GET SEMITONE_ARCHER PARENT_PATH llvm_folder)  # both of one version
    find_library(SEMITONE_LIBOMP omp PATHS ${llvm_folder} NO_DEFAULT_PATH)
    mark_as_advanced(SEMITONE_ARCHER SEMITONE_LIBOMP)
    if(NOT SEMITONE_ARCHER OR NOT SEMITONE_LIBOMP)
      message(FATAL_ERROR "[cmake.sanitizers] expected LLVM's libomp.so and libarcher.so for ThreadSanitizer, found "
        "'${SEMITONE_LIBOMP}' and '${SEMITONE_ARCHER}' — install libomp-dev, or set SEMITONE_LIBOMP and SEMITONE_ARCHER")
    endif()
    # Without this option Archer warns on stderr, where tests compare what programs write. With it ThreadSanitizer would not
    # see the locks of LibTorch, which is not instrumented. The value `no` turns it off again: Archer only reads numbers.
    set(option ignore_noninstrumented_modules)
    list(APPEND SEMITONE_TEST_ENVIRONMENT
      "TSAN_OPTIONS=${option}=1:${option}=no:suppressions=${tools}/tsan.supp:halt_on_error=1"
      "LD_PRELOAD=${SEMITONE_LIBOMP}" "OMP_TOOL_LIBRARIES=${SEMITONE_ARCHER}" "OMP_NUM_THREADS=1")
  else()
    list(APPEND SEMITONE_TEST_ENVIRONMENT
      "ASAN_OPTIONS=detect_leaks=1:strict_string_checks=1"
      "LSAN_OPTIONS=suppressions=${tools}/lsan.supp:print_suppressions=0"
      "UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1:suppressions=${tools}/ubsan.supp")
  endif()
endif()
# The same for interpreters, which are built without the sanitizer: its library must be loaded before any other, and with it
# libstdc++, whose functions for exceptions it looks up at the start. What they still hold when they end is no leak of a test.
set(SEMITONE_PRELOADED_TEST_ENVIRONMENT "${SEMITONE_TEST_ENVIRONMENT}")
if(SEMITONE_SANITIZE AND CMAKE_CXX_COMPILER_ID STREQUAL GNU)
  string(REGEX REPLACE "^(.)[^,]*.*" "lib\\1san.so" sanitizer_library ${SEMITONE_SANITIZE})  # libasan.so, libtsan.so
  set(preloaded "")
  foreach(library ${sanitizer_library} libstdc++.so.6)
    execute_process(COMMAND ${CMAKE_CXX_COMPILER} -print-file-name=${library} OUTPUT_VARIABLE library
      OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
    list(APPEND preloaded ${library})
  endforeach()
  if(SEMITONE_SANITIZE STREQUAL thread)
    list(APPEND preloaded ${SEMITONE_LIBOMP})
  endif()
  list(JOIN preloaded ":" preloaded)
  list(FILTER SEMITONE_PRELOADED_TEST_ENVIRONMENT EXCLUDE REGEX "^LD_PRELOAD=")
  list(TRANSFORM SEMITONE_PRELOADED_TEST_ENVIRONMENT REPLACE "detect_leaks=1" "detect_leaks=0")
  list(APPEND SEMITONE_PRELOADED_TEST_ENVIRONMENT "LD_PRELOAD=${preloaded}")
endif()
# Counters of the code that an input reaches. Conversions of numbers that do not fit are not among clang's `undefined`.
if(SEMITONE_FUZZ)
  add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:-fsanitize=fuzzer-no-link,float-cast-overflow;-fno-sanitize-recover=all>")
endif()

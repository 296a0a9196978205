# The environment of tests, from make or from ctest: OpenMP's threads sleep while they wait, since several tests run at
# once, and the options of each sanitizer.
set(SEMITONE_TEST_ENVIRONMENT "OMP_WAIT_POLICY=PASSIVE")
if(SEMITONE_SANITIZE)
  add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${SEMITONE_SANITIZE};-fno-omit-frame-pointer>"
    # GCC sees ghosts behind the sanitizers' checks.
    $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CXX_COMPILER_ID:GNU>>:-Wno-maybe-uninitialized>)
  add_link_options(-fsanitize=${SEMITONE_SANITIZE})
  set(tools ${PROJECT_SOURCE_DIR}/tools)
  if(SEMITONE_SANITIZE STREQUAL thread)
    list(APPEND SEMITONE_TEST_ENVIRONMENT "TSAN_OPTIONS=suppressions=${tools}/tsan.supp:halt_on_error=1" "OMP_NUM_THREADS=1")
  else()
    list(APPEND SEMITONE_TEST_ENVIRONMENT
      "ASAN_OPTIONS=detect_leaks=1:strict_string_checks=1"
      "LSAN_OPTIONS=suppressions=${tools}/lsan.supp:print_suppressions=0"
      "UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1:suppressions=${tools}/ubsan.supp")
  endif()
endif()
# Counters of the code that an input reaches. Conversions of numbers that do not fit are not among clang's `undefined`.
if(SEMITONE_FUZZ)
  add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:-fsanitize=fuzzer-no-link,float-cast-overflow;-fno-sanitize-recover=all>")
endif()

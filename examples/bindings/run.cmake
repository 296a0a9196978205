# Compiles and runs one of the programs here, which must learn y = 3x + 1:
#   cmake -D LANGUAGE=rust|csharp|java -D LIBRARY=<libsemitone_c.so> -D WORK=<a folder of the test's own>
#         -D COMPILER=… [-D RUNNER=…] [-D JNA=<jna.jar>] -P run.cmake
get_filename_component(folder ${LIBRARY} DIRECTORY)
set(source ${CMAKE_CURRENT_LIST_DIR}/${LANGUAGE})
file(REMOVE_RECURSE ${WORK})
file(MAKE_DIRECTORY ${WORK})
set(ENV{LD_LIBRARY_PATH} "${folder}:$ENV{LD_LIBRARY_PATH}")
if(LANGUAGE STREQUAL rust)
  set(compile ${COMPILER} --edition 2021 -D warnings ${source}/linear.rs -o ${WORK}/linear -L ${folder} -l semitone_c
    -C link-arg=-Wl,--allow-shlib-undefined)
  set(run ${WORK}/linear)
elseif(LANGUAGE STREQUAL csharp)
  set(compile ${COMPILER} -warnaserror ${source}/Semitone.cs ${source}/Linear.cs -out:${WORK}/linear.exe)
  set(run ${RUNNER} ${WORK}/linear.exe)
else()
  set(compile ${COMPILER} -Xlint:all,-try -Werror -cp ${JNA} -d ${WORK} ${source}/Semitone.java ${source}/Linear.java)
  # Debian's JNA has its native part in the system's folders.
  set(run ${RUNNER} -Djna.nosys=false -cp ${JNA}:${WORK} Linear)
endif()
execute_process(COMMAND ${compile} COMMAND_ECHO STDOUT COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND ${run} OUTPUT_VARIABLE output COMMAND_ECHO STDOUT COMMAND_ERROR_IS_FATAL ANY)
if(NOT output MATCHES "^y = 3[.,]00 x [+] 1[.,]00, [1-9][0-9]* steps skipped")
  message(FATAL_ERROR "expected y = 3.00 x + 1.00 and some skipped steps, got:\n${output}")
endif()

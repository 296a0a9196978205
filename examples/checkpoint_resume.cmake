# Runs the example at once, in two parts, and ended by SIGTERM. All end with the same weights.
function(run result directory steps)
  execute_process(COMMAND ${PROGRAM} ${WORK}/${directory} ${steps} ${DATA} OUTPUT_VARIABLE output COMMAND_ECHO STDOUT
    COMMAND_ERROR_IS_FATAL ANY)
  message("${output}")
  string(REGEX MATCH "sum of all weights' magnitudes [^\n]+" sum "${output}")
  set(${result} "${sum}" PARENT_SCOPE)
endfunction()
file(REMOVE_RECURSE ${WORK})
run(whole whole 200)
run(first parts 20)
run(parts parts 200)
if(NOT whole OR NOT whole STREQUAL parts OR whole STREQUAL first)
  message(FATAL_ERROR "expected '${whole}', got '${parts}' after '${first}'")
endif()

# The signal comes after the first checkpoint. The program saves another one before it ends.
set(preempt [[
"$1" "$2" 200 "$3" & program=$!
while kill -0 $program && [ ! -d "$2/step-00000010" ]; do sleep 0.02; done
kill -TERM $program
wait $program]])
execute_process(COMMAND sh -c "${preempt}" sh ${PROGRAM} ${WORK}/preempted ${DATA} RESULT_VARIABLE code)
if(NOT code EQUAL 143)
  message(FATAL_ERROR "expected exit code 143 after SIGTERM, got ${code}")
endif()
run(preempted preempted 200)
if(NOT whole STREQUAL preempted)
  message(FATAL_ERROR "expected '${whole}', got '${preempted}' after SIGTERM")
endif()

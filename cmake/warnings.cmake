# Warnings for our own code; LibTorch and other libraries come in as system headers.
add_library(semitone_warnings INTERFACE)
target_compile_options(semitone_warnings INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wpedantic -Wconversion -Wsign-conversion -Wshadow -Wold-style-cast
    -Wnon-virtual-dtor -Woverloaded-virtual -Wcast-align -Wunused -Wnull-dereference -Wdouble-promotion
    -Wformat=2 -Wimplicit-fallthrough -Wmissing-declarations>
  $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CXX_COMPILER_ID:GNU>>:-Wduplicated-cond -Wlogical-op -Wuseless-cast>
  $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<BOOL:${SEMITONE_WERROR}>>:-Werror>)

# Warnings for Semitone's code; headers of LibTorch and other libraries are system headers.
add_library(semitone_warnings INTERFACE)
if(NOT PROJECT_IS_TOP_LEVEL AND NOT SEMITONE_WERROR)
  # A parent's -Werror and its choice of warnings are for its own code.
  target_compile_options(semitone_warnings INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-w>)
  return()
endif()
target_compile_options(semitone_warnings INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wpedantic -Wconversion -Wsign-conversion -Wshadow -Wold-style-cast
    -Wnon-virtual-dtor -Woverloaded-virtual -Wcast-align -Wunused -Wdouble-promotion
    -Wformat=2 -Wimplicit-fallthrough -Wmissing-declarations>
  $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CXX_COMPILER_ID:GNU>>:-Wduplicated-cond -Wlogical-op -Wuseless-cast>
  # This warning takes sources that are compiled together (CMAKE_UNITY_BUILD) for headers.
  $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CXX_COMPILER_ID:GNU>,$<BOOL:${CMAKE_UNITY_BUILD}>>:-Wno-subobject-linkage>
  # At -O3 GCC 12 sees overflows in every std::string concatenation (gcc bug 105651). GCC 14 sees them in the std::vector<bool>
  # of torch::autograd::Function::apply, and values that are not initialized in the iterators of LibTorch's data loaders. GCC 13
  # takes a function that finds an object by a temporary name for one that returns a part of the name.
  $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CXX_COMPILER_ID:GNU>>:-Wno-stringop-overflow -Wno-array-bounds -Wno-restrict>
  $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CXX_COMPILER_ID:GNU>,$<VERSION_GREATER_EQUAL:$<CXX_COMPILER_VERSION>,13>>:-Wno-maybe-uninitialized
    -Wno-dangling-reference>
  # clang 14 takes double{x} for an implicit conversion of a float.
  $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CXX_COMPILER_ID:Clang>,$<VERSION_LESS:$<CXX_COMPILER_VERSION>,18>>:-Wno-double-promotion>
  $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<BOOL:${SEMITONE_WERROR}>>:-Werror>)

# semitone_room(NAME [PROGRAM] [WITHOUT_PCH] [SOURCES file...] [EXCEPT file...] [LIBRARIES target...])
#
# A room is one folder of src/ and its headers in include/semitone/, built as one static library of all .cpp files in the
# folder, without those after EXCEPT and with those after SOURCES. src/rooms.txt lists the rooms that it may include; it links
# these and no others. tools/check_house.py checks the #include lines against the same
# table, so that a wrong arrow fails a test even if the linker does not notice it.
# WITHOUT_PCH: without the precompiled header of LibTorch, for a room that does not include it.
# PROGRAM: a room of the program alone. It is not part of the library `semitone`, not installed, and only built for targets
# that link it.
add_library(semitone INTERFACE)
set_property(GLOBAL PROPERTY semitone_rooms "")
file(STRINGS ${PROJECT_SOURCE_DIR}/src/rooms.txt semitone_room_names REGEX "^[a-z]+:")
list(TRANSFORM semitone_room_names REPLACE ":.*" "")

# The libraries of the rooms that a room may include.
function(semitone_arrows name result)
  set(table ${PROJECT_SOURCE_DIR}/src/rooms.txt)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${table})
  file(STRINGS ${table} line REGEX "^${name}:")
  if(NOT line)
    message(FATAL_ERROR "semitone_room: expected a room of src/rooms.txt, got '${name}' — add it there")
  endif()
  string(REGEX REPLACE "^${name}: *" "" arrows "${line}")
  string(REGEX REPLACE " *[|].*" "" arrows "${arrows}")
  string(REPLACE " " ";" arrows "${arrows}")
  list(TRANSFORM arrows PREPEND semitone::)
  set(${result} "${arrows}" PARENT_SCOPE)
endfunction()

function(semitone_room name)
  cmake_parse_arguments(arg "PROGRAM;WITHOUT_PCH" "" "SOURCES;EXCEPT;LIBRARIES" ${ARGN})
  set(target semitone_${name})
  file(GLOB_RECURSE sources RELATIVE ${CMAKE_CURRENT_SOURCE_DIR} CONFIGURE_DEPENDS *.cpp)
  list(REMOVE_ITEM sources ${arg_EXCEPT})
  semitone_arrows(${name} arrows)
  add_library(${target} STATIC ${sources} ${arg_SOURCES})
  add_library(semitone::${name} ALIAS ${target})
  set_target_properties(${target} PROPERTIES EXPORT_NAME ${name})
  if(NOT PROJECT_IS_TOP_LEVEL)  # a parent's warnings do not apply to these headers
    set_target_properties(${target} PROPERTIES SYSTEM ON)
  endif()
  target_include_directories(${target}
    PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include> $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>
    PRIVATE ${PROJECT_SOURCE_DIR})
  target_link_libraries(${target}
    PUBLIC ${arrows} LibTorch::LibTorch
    PRIVATE $<BUILD_INTERFACE:semitone_warnings> ${arg_LIBRARIES})
  target_compile_features(${target} PUBLIC cxx_std_20)
  if(NOT arg_WITHOUT_PCH)
    semitone_use_pch(${target})
  endif()
  if(arg_PROGRAM)
    set_target_properties(${target} PROPERTIES EXCLUDE_FROM_ALL ON)
    return()
  endif()
  target_link_libraries(semitone INTERFACE semitone::${name})
  set_property(GLOBAL APPEND PROPERTY semitone_rooms ${target})
endfunction()

# Sources that are compiled alone, and without assertions in debug builds too, where they cannot use the precompiled header.
function(semitone_without_assertions)
  set_source_files_properties(${ARGN} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
  string(TOUPPER "${CMAKE_BUILD_TYPE}" type)
  if(NOT "${CMAKE_CXX_FLAGS} ${CMAKE_CXX_FLAGS_${type}} " MATCHES "-DNDEBUG ")
    set_source_files_properties(${ARGN} PROPERTIES COMPILE_DEFINITIONS NDEBUG SKIP_PRECOMPILE_HEADERS ON)
  endif()
endfunction()

# LibTorch's headers take about 15 s a translation unit; precompiled once, they take about 6 s, most of it templates that
# the compiler instantiates again each time. So the presets also compile the sources of a room together
# (CMAKE_UNITY_BUILD): the program takes 5 minutes on 2 cores instead of 14.
function(semitone_use_pch target)
  if(NOT TARGET semitone_pch)
    # Written only if it differs, so that another configuration recompiles nothing.
    file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/pch.cpp CONTENT "// Holds the precompiled header.\n")
    add_library(semitone_pch OBJECT ${PROJECT_BINARY_DIR}/pch.cpp)
    target_precompile_headers(semitone_pch PRIVATE <torch/torch.h>)
    # The flags must equal those of the users: -Wpedantic, for one, changes predefined macros.
    target_link_libraries(semitone_pch PRIVATE LibTorch::LibTorch semitone_warnings)
  endif()
  target_precompile_headers(${target} REUSE_FROM semitone_pch)
  # The precompiled header has 700 MB, which GCC's collector would go through again and again: an eighth of the time. 2 GiB in KiB,
  # where each core has memory for it.
  cmake_host_system_information(RESULT cores QUERY NUMBER_OF_LOGICAL_CORES)
  cmake_host_system_information(RESULT mebibytes QUERY TOTAL_PHYSICAL_MEMORY)
  math(EXPR mebibytes_of_core "${mebibytes} / ${cores}")
  if(NOT CMAKE_DISABLE_PRECOMPILE_HEADERS AND mebibytes_of_core GREATER 4000)
    target_compile_options(${target} PRIVATE
      $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CXX_COMPILER_ID:GNU>>:--param=ggc-min-heapsize=2097152>)
  endif()
endfunction()

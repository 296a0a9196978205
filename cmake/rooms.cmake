# semitone_room(NAME SOURCES file... [ROOMS room...] [LIBRARIES target...])
#
# A room is one folder of src/ and its headers in include/semitone/, built as one static library. ROOMS are the
# arrows: the rooms that it may include. The same list is checked against the #include lines by
# tools/check_house.py, so a forgotten arrow fails a test and not only the link.
add_library(semitone INTERFACE)
add_library(semitone::semitone ALIAS semitone)
set_property(GLOBAL PROPERTY semitone_rooms "")

function(semitone_room name)
  cmake_parse_arguments(arg "" "" "SOURCES;ROOMS;LIBRARIES" ${ARGN})
  set(target semitone_${name})
  add_library(${target} STATIC ${arg_SOURCES})
  add_library(semitone::${name} ALIAS ${target})
  set_target_properties(${target} PROPERTIES EXPORT_NAME ${name})
  target_include_directories(${target}
    PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include> $<INSTALL_INTERFACE:include>
    PRIVATE ${PROJECT_SOURCE_DIR})
  list(TRANSFORM arg_ROOMS PREPEND semitone::)
  target_link_libraries(${target}
    PUBLIC ${arg_ROOMS} LibTorch::LibTorch
    PRIVATE $<BUILD_INTERFACE:semitone_warnings> ${arg_LIBRARIES})
  target_compile_features(${target} PUBLIC cxx_std_20)
  semitone_use_pch(${target})
  target_link_libraries(semitone INTERFACE semitone::${name})
  set_property(GLOBAL APPEND PROPERTY semitone_rooms ${target})
endfunction()

# LibTorch's headers take about 15 s a translation unit; precompiled once, they take about 6 s, most of it templates that
# the compiler instantiates again each time. So the presets also compile the sources of a room together
# (CMAKE_UNITY_BUILD): the program takes 5 minutes on 2 cores instead of 14.
function(semitone_use_pch target)
  if(NOT TARGET semitone_pch)
    # Written where it differs only, so that configuring again compiles nothing again.
    file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/pch.cpp CONTENT "// Holds the precompiled header.\n")
    add_library(semitone_pch OBJECT ${PROJECT_BINARY_DIR}/pch.cpp)
    target_precompile_headers(semitone_pch PRIVATE <torch/torch.h> <torch/script.h>)
    # The flags must equal those of the users: -Wpedantic, for one, changes predefined macros.
    target_link_libraries(semitone_pch PRIVATE LibTorch::LibTorch semitone_warnings)
  endif()
  target_precompile_headers(${target} REUSE_FROM semitone_pch)
endfunction()

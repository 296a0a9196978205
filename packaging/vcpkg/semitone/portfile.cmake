# An overlay port: it builds the repository that it is in. LibTorch is the one that the environment variable
# SEMITONE_LIBTORCH names (vcpkg passes it on if VCPKG_KEEP_ENV_VARS contains it).
get_filename_component(SOURCE_PATH "${CURRENT_PORT_DIR}/../../.." ABSOLUTE)
if("$ENV{SEMITONE_LIBTORCH}" STREQUAL "")
  message(FATAL_ERROR "[vcpkg] expected the folder of a LibTorch in SEMITONE_LIBTORCH, got nothing — set it, and "
    "VCPKG_KEEP_ENV_VARS=SEMITONE_LIBTORCH")
endif()
set(LIBRARY STATIC)
if(VCPKG_LIBRARY_LINKAGE STREQUAL dynamic)
  set(LIBRARY SHARED)
endif()
vcpkg_check_features(OUT_FEATURE_OPTIONS FEATURE_OPTIONS FEATURES program SEMITONE_APPS)
vcpkg_cmake_configure(
  SOURCE_PATH "${SOURCE_PATH}"
  OPTIONS
    ${FEATURE_OPTIONS}
    "-DSEMITONE_LIBTORCH=$ENV{SEMITONE_LIBTORCH}"
    -DSEMITONE_LIBRARY=${LIBRARY}
    -DSEMITONE_TESTS=OFF
    -DSEMITONE_EXAMPLES=OFF
    -DSEMITONE_BENCHMARKS=OFF
    -DSEMITONE_WERROR=OFF
    -DCMAKE_UNITY_BUILD=ON
    -DCMAKE_UNITY_BUILD_BATCH_SIZE=16)
vcpkg_cmake_install()
vcpkg_cmake_config_fixup(CONFIG_PATH lib/cmake/semitone)
vcpkg_fixup_pkgconfig()
if("program" IN_LIST FEATURES)
  vcpkg_copy_tools(TOOL_NAMES semitone AUTO_CLEAN)
endif()
file(REMOVE_RECURSE "${CURRENT_PACKAGES_DIR}/debug/include" "${CURRENT_PACKAGES_DIR}/debug/share")
vcpkg_install_copyright(FILE_LIST "${SOURCE_PATH}/LICENSE" "${SOURCE_PATH}/THIRD_PARTY.md")

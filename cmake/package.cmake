# Installation, so that other projects find Semitone: find_package(semitone), target_link_libraries(… semitone::semitone).
# The components are Runtime (shared libraries), Development (headers, archives, files for CMake and pkg-config) and Tools (the
# program). `cmake --install` installs all; packages.cmake makes a package of each.
include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/semitone)
get_property(rooms GLOBAL PROPERTY semitone_rooms)
# Programs and shared libraries find LibTorch in the build's place, even below the sources.
function(semitone_install_rpath target)
  if(SEMITONE_INSTALL_RPATH STREQUAL BUILD)
    set_target_properties(${target} PROPERTIES INSTALL_RPATH ${LibTorch_ROOT_DIR}/lib INSTALL_RPATH_USE_LINK_PATH ON)
  else()
    set_target_properties(${target} PROPERTIES INSTALL_RPATH "${SEMITONE_INSTALL_RPATH}")
  endif()
endfunction()
function(semitone_install_shared target export)
  semitone_install_rpath(${target})
  install(TARGETS ${target} EXPORT ${export}
    LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT Runtime NAMELINK_COMPONENT Development)
endfunction()
function(semitone_install_export export file)
  install(EXPORT ${export} FILE ${file} NAMESPACE semitone:: DESTINATION ${package_dir} COMPONENT Development)
endfunction()

# The static and the shared library have the same target name, semitone::semitone. The package reads one of the files.
if(NOT SEMITONE_LIBRARY STREQUAL SHARED)
  install(TARGETS semitone ${rooms} EXPORT semitone_static
    ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT Development)
  semitone_install_export(semitone_static semitone-static.cmake)
endif()
if(NOT SEMITONE_LIBRARY STREQUAL STATIC)
  semitone_install_shared(semitone_shared semitone_shared)
  semitone_install_export(semitone_shared semitone-shared.cmake)
endif()
if(SEMITONE_C)
  semitone_install_shared(semitone_c semitone_c)
  semitone_install_export(semitone_c semitone-c.cmake)
endif()
if(SEMITONE_APPS)
  semitone_install_rpath(semitone_cli)
  install(TARGETS semitone_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT Tools)
  get_target_property(manual_pages semitone_cli MANUAL_PAGES)
  if(manual_pages)
    get_target_property(completion semitone_cli COMPLETION)
    install(FILES ${manual_pages} DESTINATION ${CMAKE_INSTALL_MANDIR}/man1 COMPONENT Tools)
    install(FILES ${completion}.bash DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions RENAME semitone COMPONENT Tools)
    install(FILES ${completion}.zsh DESTINATION ${CMAKE_INSTALL_DATADIR}/zsh/site-functions RENAME _semitone COMPONENT Tools)
    install(FILES ${completion}.fish DESTINATION ${CMAKE_INSTALL_DATADIR}/fish/vendor_completions.d RENAME semitone.fish COMPONENT Tools)
  endif()
endif()
install(DIRECTORY include/semitone DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT Development)
# What distributors must add to the built files. Each component has them; a whole installation has them once.
# CMAKE_INSTALL_DOCDIR may be a parent project's.
install(FILES LICENSE THIRD_PARTY.md DESTINATION ${CMAKE_INSTALL_DATAROOTDIR}/doc/semitone COMPONENT Development)
foreach(component Runtime Tools)
  string(TOLOWER semitone-${component} folder)
  install(FILES LICENSE THIRD_PARTY.md DESTINATION ${CMAKE_INSTALL_DATAROOTDIR}/doc/${folder} COMPONENT ${component} EXCLUDE_FROM_ALL)
endforeach()
if(SEMITONE_LINKS_KERNELS)
  install(FILES ${CUDA_cudart_static_LIBRARY} DESTINATION ${CMAKE_INSTALL_LIBDIR}/semitone COMPONENT Development)
endif()
include(${cmake_folder}/pkg_config.cmake)
# 2.11 and 2.12 for 2.11.0.
string(REGEX MATCH "^([0-9]+)[.]([0-9]+)" LibTorch_RELEASE ${LibTorch_VERSION})
math(EXPR next "${CMAKE_MATCH_2} + 1")
set(LibTorch_NEXT_RELEASE ${CMAKE_MATCH_1}.${next})
configure_package_config_file(cmake/semitoneConfig.cmake.in ${PROJECT_BINARY_DIR}/semitoneConfig.cmake
  INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/semitoneConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/semitoneConfig.cmake ${PROJECT_BINARY_DIR}/semitoneConfigVersion.cmake
  cmake/FindLibTorch.cmake DESTINATION ${package_dir} COMPONENT Development)
if(PROJECT_IS_TOP_LEVEL)
  include(${cmake_folder}/packages.cmake)
endif()

# Installation, so that other projects find Semitone: find_package(semitone), target_link_libraries(… semitone::semitone).
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

get_property(rooms GLOBAL PROPERTY semitone_rooms)
install(TARGETS semitone ${rooms} EXPORT semitone ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
if(SEMITONE_PROGRAM)
  # It finds LibTorch in the build's place, even below the sources.
  set_target_properties(semitone_cli PROPERTIES INSTALL_RPATH ${LibTorch_ROOT_DIR}/lib INSTALL_RPATH_USE_LINK_PATH ON)
  install(TARGETS semitone_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
  get_target_property(manual_pages semitone_cli MANUAL_PAGES)
  if(manual_pages)
    get_target_property(completion semitone_cli COMPLETION)
    install(FILES ${manual_pages} DESTINATION ${CMAKE_INSTALL_MANDIR}/man1)
    install(FILES ${completion}.bash DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions RENAME semitone)
    install(FILES ${completion}.zsh DESTINATION ${CMAKE_INSTALL_DATADIR}/zsh/site-functions RENAME _semitone)
    install(FILES ${completion}.fish DESTINATION ${CMAKE_INSTALL_DATADIR}/fish/vendor_completions.d RENAME semitone.fish)
  endif()
endif()
install(DIRECTORY include/semitone DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
# What distributors must add to the built files.
install(FILES LICENSE THIRD_PARTY.md DESTINATION ${CMAKE_INSTALL_DOCDIR})
if(SEMITONE_LINKS_KERNELS)
  install(FILES ${CUDA_cudart_static_LIBRARY} DESTINATION ${CMAKE_INSTALL_LIBDIR}/semitone)
endif()
include(${cmake_folder}/pkg_config.cmake)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/semitone)
install(EXPORT semitone NAMESPACE semitone:: DESTINATION ${package_dir})
configure_package_config_file(cmake/semitoneConfig.cmake.in ${PROJECT_BINARY_DIR}/semitoneConfig.cmake
  INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/semitoneConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/semitoneConfig.cmake ${PROJECT_BINARY_DIR}/semitoneConfigVersion.cmake
  cmake/FindLibTorch.cmake DESTINATION ${package_dir})

# cmake --install: bin/echoline, share/echoline/configs, share/doc/echoline. Everything else is linked in or a system
# library, so the program needs no RPATH.
include(GNUInstallDirs)
if(TARGET echoline)
  install(TARGETS echoline RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
  install(DIRECTORY ${CMAKE_SOURCE_DIR}/configs/ DESTINATION ${CMAKE_INSTALL_DATADIR}/echoline/configs)
  foreach(file LICENSE README.md CHANGELOG.md)
    if(EXISTS ${CMAKE_SOURCE_DIR}/${file})
      install(FILES ${CMAKE_SOURCE_DIR}/${file} DESTINATION ${CMAKE_INSTALL_DOCDIR})
    endif()
  endforeach()
endif()

# cmake --install: bin/echoline, lib/echoline/echoline_torch.so, include/echoline_task.h, share/echoline/configs,
# share/doc/echoline, and what the program says of itself: manual pages and shell completion. Everything else is linked
# in or a system library, so the program needs no RPATH.
include(GNUInstallDirs)
if(TARGET echoline)
  install(TARGETS echoline RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
  if(TARGET echoline_torch_module)
    # base/program_module.cpp looks in this folder, whatever CMAKE_INSTALL_LIBDIR is.
    install(TARGETS echoline_torch_module LIBRARY DESTINATION lib/echoline)
  endif()
  install(DIRECTORY ${CMAKE_SOURCE_DIR}/configs/ DESTINATION ${CMAKE_INSTALL_DATADIR}/echoline/configs)
  foreach(file LICENSE README.md CHANGELOG.md)
    if(EXISTS ${CMAKE_SOURCE_DIR}/${file})
      install(FILES ${CMAKE_SOURCE_DIR}/${file} DESTINATION ${CMAKE_INSTALL_DOCDIR})
    endif()
  endforeach()
  install(FILES ${CMAKE_SOURCE_DIR}/clients/c/echoline_task.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
  install(DIRECTORY ${CMAKE_SOURCE_DIR}/docs/ DESTINATION ${CMAKE_INSTALL_DOCDIR}/docs)
  set(self "execute_process(COMMAND $<TARGET_FILE:echoline>")
  set(share "\"\$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/${CMAKE_INSTALL_DATADIR}")
  install(CODE "${self} man --folder ${share}/man/man1\" COMMAND_ERROR_IS_FATAL ANY)")
  foreach(place IN ITEMS bash:bash-completion/completions/echoline zsh:zsh/site-functions/_echoline
                         fish:fish/vendor_completions.d/echoline.fish)
    string(REGEX MATCH "^([a-z]+):(.*)/([^/]*)$" matched ${place})
    install(CODE "file(MAKE_DIRECTORY ${share}/${CMAKE_MATCH_2}\")
${self} completion ${CMAKE_MATCH_1} OUTPUT_FILE ${share}/${CMAKE_MATCH_2}/${CMAKE_MATCH_3}\"
  COMMAND_ERROR_IS_FATAL ANY)")
  endforeach()
endif()

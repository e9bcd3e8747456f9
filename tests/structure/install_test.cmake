# Installs into PREFIX and runs the installed program from there.
cmake_minimum_required(VERSION 3.25)
file(REMOVE_RECURSE ${PREFIX})
execute_process(COMMAND ${CMAKE_COMMAND} --install ${BUILD} --prefix ${PREFIX}
                OUTPUT_VARIABLE output ERROR_VARIABLE output RESULT_VARIABLE status)
if(NOT status EQUAL 0)
  message(FATAL_ERROR "cmake --install failed:\n${output}")
endif()
set(module "")
if(TORCH)
  set(module lib/echoline/echoline_torch.so)
endif()
foreach(file bin/echoline ${module} share/echoline/configs/quickstart.yaml share/man/man1/echoline-up.1
        share/doc/echoline/docs/run-file.md
        include/echoline_task.h
        share/bash-completion/completions/echoline share/zsh/site-functions/_echoline
        share/fish/vendor_completions.d/echoline.fish)
  if(NOT EXISTS ${PREFIX}/${file})
    message(FATAL_ERROR "expected ${PREFIX}/${file} to be installed")
  endif()
endforeach()
execute_process(COMMAND ${PREFIX}/bin/echoline --version WORKING_DIRECTORY ${PREFIX}
                OUTPUT_VARIABLE output ERROR_VARIABLE error RESULT_VARIABLE status)
if(NOT status EQUAL 0 OR NOT output MATCHES "[0-9]+\\.[0-9]+\\.[0-9]+")
  message(FATAL_ERROR "expected 'echoline --version' to print a version, found exit ${status}:\n${output}${error}")
endif()
if(TORCH)
  execute_process(COMMAND ${PREFIX}/bin/echoline doctor --json WORKING_DIRECTORY ${PREFIX}
                  OUTPUT_VARIABLE output ERROR_VARIABLE error)
  if(NOT output MATCHES "[0-9]+ threads, ")
    message(FATAL_ERROR "expected 'echoline doctor' to find the module that has libtorch, found:\n${output}${error}")
  endif()
endif()

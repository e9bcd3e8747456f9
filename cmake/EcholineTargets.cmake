# Compiler settings and the helpers every folder uses: echoline_library(), echoline_test(), echoline_fuzz().
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
# Every library is static and ends in a program, so all objects are built alike and share the precompiled headers.
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_C_COMPILE_OPTIONS_PIC ${CMAKE_C_COMPILE_OPTIONS_PIE})
set(CMAKE_CXX_COMPILE_OPTIONS_PIC ${CMAKE_CXX_COMPILE_OPTIONS_PIE})
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release)
endif()
# delta/ asks for -O3; elsewhere it costs a tenth more compiling and gains nothing that can be measured.
set(CMAKE_CXX_FLAGS_RELEASE "-O2 -DNDEBUG")

find_program(ECHOLINE_CCACHE ccache)
if(ECHOLINE_CCACHE)
  # The sloppiness without which ccache caches nothing that uses a precompiled header.
  set(ECHOLINE_LAUNCHER ${CMAKE_COMMAND} -E env CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime
    ${ECHOLINE_CCACHE})
  set(CMAKE_CXX_COMPILER_LAUNCHER ${ECHOLINE_LAUNCHER})
  set(CMAKE_C_COMPILER_LAUNCHER ${ECHOLINE_LAUNCHER})
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fpch-preprocess>)
  elseif(CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
    add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:SHELL:-Xclang -fno-pch-timestamp>")
  endif()
endif()

# GCC collects garbage as if memory were scarce; with a precompiled header of hundreds of MB that is a tenth of its time.
add_compile_options("$<$<COMPILE_LANG_AND_ID:CXX,GNU>:SHELL:--param ggc-min-expand=1000 --param ggc-min-heapsize=2000000>")

# Settings of our own code only; generated code and dependencies are not held to them.
add_library(echoline_flags INTERFACE)
target_compile_options(echoline_flags INTERFACE -Wall -Wextra -Wpedantic -Werror)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # False positives of GCC 12 and 14 on std::string, std::variant, std::optional and Boost.Graph (GCC bugs 105651, 105562).
  target_compile_options(echoline_flags INTERFACE -Wno-restrict -Wno-maybe-uninitialized)
  if(CMAKE_CXX_COMPILER_VERSION VERSION_GREATER_EQUAL 13)
    target_compile_options(echoline_flags INTERFACE -Wno-stringop-overflow)  # and on std::vector
  endif()
endif()
target_include_directories(echoline_flags INTERFACE ${CMAKE_SOURCE_DIR})

if(ECHOLINE_SANITIZE)
  add_compile_options(-fsanitize=${ECHOLINE_SANITIZE} -fno-omit-frame-pointer -g)
  add_link_options(-fsanitize=${ECHOLINE_SANITIZE})
endif()

if(ECHOLINE_FUZZ)
  if(NOT CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
    message(FATAL_ERROR "ECHOLINE_FUZZ needs clang (libFuzzer); the compiler is ${CMAKE_CXX_COMPILER_ID}. "
                        "Use the preset: cmake --preset fuzz")
  endif()
  add_compile_options(-fsanitize=fuzzer-no-link)
endif()

# echoline_precompiled(name HEADERS <a> ... [USES targets]): a precompiled header that targets take by its name. Compiling one
# costs as much as it saves in five to ten files, so there are few. Headers of our own do not belong in: they change.
function(echoline_precompiled name)
  cmake_parse_arguments(ARG "" "" "HEADERS;USES" ${ARGN})
  file(CONFIGURE OUTPUT ${CMAKE_BINARY_DIR}/precompiled/${name}.cpp CONTENT "")
  add_library(echoline_precompiled_${name} STATIC ${CMAKE_BINARY_DIR}/precompiled/${name}.cpp)
  target_link_libraries(echoline_precompiled_${name} PRIVATE echoline_flags ${ARG_USES})
  target_precompile_headers(echoline_precompiled_${name} PRIVATE ${ARG_HEADERS})
endfunction()

set(ECHOLINE_STANDARD_HEADERS
  <algorithm> <array> <atomic> <bit> <charconv> <chrono> <cmath> <condition_variable> <cstdint> <cstdlib> <cstring> <deque>
  <filesystem> <fstream> <functional> <limits> <map> <memory> <mutex> <numeric> <optional> <set> <span> <sstream> <string>
  <string_view> <thread> <tuple> <unordered_map> <utility> <variant> <vector> <fmt/format.h>)

# echoline_use_precompiled(target name [TORCH_SOURCES a.cpp ...]): compiles a target with one of them, and sources that include
# model/torch.hpp with libtorch's, which would double the time of every other file.
function(echoline_use_precompiled target name)
  cmake_parse_arguments(ARG "" "" "TORCH_SOURCES" ${ARGN})
  target_precompile_headers(${target} REUSE_FROM echoline_precompiled_${name})
  if(ARG_TORCH_SOURCES)
    add_library(${target}_with_torch OBJECT ${ARG_TORCH_SOURCES})
    foreach(property INCLUDE_DIRECTORIES LINK_LIBRARIES COMPILE_OPTIONS COMPILE_DEFINITIONS)
      set_property(TARGET ${target}_with_torch PROPERTY ${property} $<TARGET_PROPERTY:${target},${property}>)
    endforeach()
    target_precompile_headers(${target}_with_torch REUSE_FROM echoline_precompiled_torch)
    target_sources(${target} PRIVATE $<TARGET_OBJECTS:${target}_with_torch>)
  endif()
endfunction()

# For tests/structure: sources that are compiled only where there is libtorch.
function(echoline_note_torch_sources)
  foreach(source IN LISTS ARGN)
    file(RELATIVE_PATH path ${CMAKE_SOURCE_DIR} ${CMAKE_CURRENT_SOURCE_DIR}/${source})
    set_property(GLOBAL APPEND PROPERTY ECHOLINE_TORCH_SOURCES ${path})
  endforeach()
endfunction()

# echoline_library(name [TORCH] SOURCES a.cpp ... [USES targets in our public headers] [PRIVATE_USES targets hidden in .cpp
#                  files]). TORCH: libtorch is known to it, and with ECHOLINE_TORCH=OFF it does not exist.
function(echoline_library name)
  cmake_parse_arguments(ARG "TORCH" "" "SOURCES;USES;PRIVATE_USES" ${ARGN})
  set(precompiled standard)
  if(ARG_TORCH)
    echoline_note_torch_sources(${ARG_SOURCES})
    if(NOT TARGET echoline_torch)
      return()
    endif()
    list(APPEND ARG_USES echoline_torch)
    set(precompiled torch)
  endif()
  echoline_check_layers(${name} ${ARG_USES} ${ARG_PRIVATE_USES})
  add_library(echoline_${name} STATIC ${ARG_SOURCES})
  add_library(echoline::${name} ALIAS echoline_${name})
  target_include_directories(echoline_${name} PUBLIC ${CMAKE_SOURCE_DIR} ${CMAKE_BINARY_DIR}/generated)
  target_link_libraries(echoline_${name} PRIVATE echoline_flags PUBLIC ${ARG_USES} PRIVATE ${ARG_PRIVATE_USES})
  echoline_use_precompiled(echoline_${name} ${precompiled})
  echoline_folder(folder)
  set_target_properties(echoline_${name} PROPERTIES ECHOLINE_FOLDER ${folder})
  set_property(GLOBAL APPEND PROPERTY ECHOLINE_LIBRARIES ${name})
endfunction()

# What a test measures is in the libraries; optimising its own code is a third of the time that compiling it takes. GCC from 13 on
# takes no precompiled header of another level, which costs more.
set(ECHOLINE_TEST_OPTIONS "")
if(NOT CMAKE_CXX_COMPILER_ID STREQUAL "GNU" OR CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  set(ECHOLINE_TEST_OPTIONS $<$<NOT:$<CONFIG:Debug>>:-O1>)
endif()

# echoline_test(name KIND unit|integration|sim|fuzz|bench-smoke SOURCES a.cpp ... USES targets [TORCH_SOURCES b.cpp ...]
#               [TORCH_USES targets] [TIMEOUT seconds])
# One executable per call, one CTest test per executable, labelled with its kind. With ECHOLINE_TORCH=OFF it does without what
# is for libtorch, and does not exist where nothing else is left.
function(echoline_test name)
  cmake_parse_arguments(ARG "" "KIND;TIMEOUT" "SOURCES;TORCH_SOURCES;USES;TORCH_USES" ${ARGN})
  echoline_note_torch_sources(${ARG_TORCH_SOURCES})
  if(TARGET echoline_torch)
    list(APPEND ARG_USES ${ARG_TORCH_USES})
  else()
    set(ARG_TORCH_SOURCES "")
    if(NOT ARG_SOURCES)
      return()
    endif()
  endif()
  set(kinds unit integration sim fuzz bench-smoke)
  if(NOT ARG_KIND IN_LIST kinds)
    message(FATAL_ERROR "echoline_test(${name}): KIND is '${ARG_KIND}', expected one of ${kinds}")
  endif()
  if(ARG_KIND STREQUAL "bench-smoke" AND NOT ECHOLINE_BENCHMARKS)
    return()
  endif()
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 120)
  endif()
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE echoline_flags ${ARG_USES} GTest::gtest GTest::gmock GTest::gtest_main)
  echoline_use_precompiled(${name} test TORCH_SOURCES ${ARG_TORCH_SOURCES})
  target_compile_options(${name} PRIVATE ${ECHOLINE_TEST_OPTIONS})
  add_test(NAME ${name} COMMAND ${name} WORKING_DIRECTORY ${CMAKE_SOURCE_DIR})
  set_tests_properties(${name} PROPERTIES
    LABELS ${ARG_KIND} TIMEOUT ${ARG_TIMEOUT} COST ${ARG_TIMEOUT})  # long ones begin first, so that no core waits at the end
  if(ARG_KIND STREQUAL "integration")
    set_tests_properties(${name} PROPERTIES RUN_SERIAL ON)  # real processes and real time: nothing beside it
  endif()
endfunction()

# echoline_fuzz(name SOURCES a.cpp ... USES targets): a libFuzzer program around LLVMFuzzerTestOneInput(), built only
# with ECHOLINE_FUZZ (clang). List the same source in an echoline_test() as well, which runs it on a fixed corpus.
function(echoline_fuzz name)
  cmake_parse_arguments(ARG "" "" "SOURCES;USES" ${ARGN})
  if(NOT ECHOLINE_FUZZ)
    return()
  endif()
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE echoline_flags ${ARG_USES})
  target_link_options(${name} PRIVATE -fsanitize=fuzzer)
endfunction()

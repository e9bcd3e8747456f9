# Compiler settings and the helpers every folder uses: echoline_library(), echoline_test(), echoline_fuzz().
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
# Every library is static and ends in a program, so all objects are built alike and share the precompiled headers.
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_C_COMPILE_OPTIONS_PIC ${CMAKE_C_COMPILE_OPTIONS_PIE})
set(CMAKE_CXX_COMPILE_OPTIONS_PIC ${CMAKE_CXX_COMPILE_OPTIONS_PIE})
# Except what knows libtorch, which becomes a shared object as well (cli/torch_module.cpp).
set(ECHOLINE_TORCH_OPTIONS -fPIC -fno-semantic-interposition)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release)
endif()
# delta/ asks for -O3; elsewhere it costs a tenth more compiling and gains nothing that can be measured.
set(CMAKE_CXX_FLAGS_RELEASE "-O2 -DNDEBUG")

find_program(ECHOLINE_CCACHE ccache)
if(ECHOLINE_CCACHE)
  # The sloppiness without which ccache caches nothing that uses a precompiled header.
  set(ECHOLINE_LAUNCHER ${CMAKE_COMMAND} -E env
    CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime ${ECHOLINE_CCACHE})
  set(CMAKE_CXX_COMPILER_LAUNCHER ${ECHOLINE_LAUNCHER})
  set(CMAKE_C_COMPILER_LAUNCHER ${ECHOLINE_LAUNCHER})
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fpch-preprocess>)
  elseif(CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
    add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:SHELL:-Xclang -fno-pch-timestamp>")
  endif()
endif()

# GCC collects garbage as if memory were scarce; with a precompiled header of hundreds of MB that is a tenth of its
# time.
add_compile_options(
  "$<$<COMPILE_LANG_AND_ID:CXX,GNU>:SHELL:--param ggc-min-expand=1000 --param ggc-min-heapsize=2000000>")

# Settings of our own code only; generated code and dependencies are not held to them.
add_library(echoline_flags INTERFACE)
target_compile_options(echoline_flags INTERFACE -Wall -Wextra -Wpedantic $<$<BOOL:${ECHOLINE_WERROR}>:-Werror>)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # False positives of GCC 12 and 14 on std::string, std::variant, std::optional and Boost.Graph (GCC bugs 105651,
  # 105562).
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

# echoline_precompiled(name HEADERS <a> ... [USES targets] [OPTIONS flags]): a precompiled header that targets take by
# its name. Compiling one costs as much as it saves in five to ten files, so there are few. Headers of our own do not
# belong in: they change.
function(echoline_precompiled name)
  cmake_parse_arguments(ARG "" "" "HEADERS;USES;OPTIONS" ${ARGN})
  file(CONFIGURE OUTPUT ${CMAKE_BINARY_DIR}/precompiled/${name}.cpp CONTENT "")
  add_library(echoline_precompiled_${name} STATIC ${CMAKE_BINARY_DIR}/precompiled/${name}.cpp)
  target_link_libraries(echoline_precompiled_${name} PRIVATE echoline_flags ${ARG_USES})
  target_compile_options(echoline_precompiled_${name} PRIVATE ${ARG_OPTIONS})
  target_precompile_headers(echoline_precompiled_${name} PRIVATE ${ARG_HEADERS})
endfunction()

set(ECHOLINE_STANDARD_HEADERS
  <algorithm> <array> <atomic> <bit> <charconv> <chrono> <cmath> <condition_variable> <cstdint> <cstdlib> <cstring>
  <deque> <filesystem> <fstream> <functional> <limits> <map> <memory> <mutex> <numeric> <optional> <set> <span>
  <sstream> <string> <string_view> <thread> <tuple> <unordered_map> <utility> <variant> <vector> <fmt/format.h>)

# echoline_use_precompiled(target name [TORCH_SOURCES a.cpp ...]): compiles a target with one of them, and sources that
# include model/torch.hpp with libtorch's, which would double the time of every other file.
function(echoline_use_precompiled target name)
  cmake_parse_arguments(ARG "" "" "TORCH_SOURCES" ${ARGN})
  target_precompile_headers(${target} REUSE_FROM echoline_precompiled_${name})
  if(ARG_TORCH_SOURCES)
    add_library(${target}_with_torch OBJECT ${ARG_TORCH_SOURCES})
    foreach(property INCLUDE_DIRECTORIES LINK_LIBRARIES COMPILE_OPTIONS COMPILE_DEFINITIONS)
      set_property(TARGET ${target}_with_torch PROPERTY ${property} $<TARGET_PROPERTY:${target},${property}>)
    endforeach()
    target_compile_options(${target}_with_torch PRIVATE ${ECHOLINE_TORCH_OPTIONS})
    target_precompile_headers(${target}_with_torch REUSE_FROM echoline_precompiled_torch)
    target_sources(${target} PRIVATE $<TARGET_OBJECTS:${target}_with_torch>)
  endif()
endfunction()

# -O1, which saves a fifth to a third of the time that compiling takes. GCC from 13 on takes no precompiled header of
# another level, which costs more.
set(ECHOLINE_LIGHT_OPTIONS "")
if(NOT CMAKE_CXX_COMPILER_ID STREQUAL "GNU" OR CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  set(ECHOLINE_LIGHT_OPTIONS $<$<NOT:$<CONFIG:Debug>>:-O1>)
endif()
set(ECHOLINE_TEST_OPTIONS ${ECHOLINE_LIGHT_OPTIONS})  # what a test measures is in the libraries

# echoline_light(target): its code is not hot.
function(echoline_light target)
  if(ECHOLINE_QUICK)
    target_compile_options(${target} PRIVATE ${ECHOLINE_LIGHT_OPTIONS})
  endif()
endfunction()

# Private names of many sources, in no header: in a group each source gets its own, by a macro.
set(ECHOLINE_RENAMED Arguments as_json kBisections kBlock kBytesPerGb kComponentsMax kErrorSource kEvaluationMax
  kFormatVersion kGradedCharacters kIdPrefix kLogitsMax kLook kLookAgain kMagic kModule kOp kOperation kPoll
  kRounding kRoundsMax kStepsMax kTriesMax kWorthMoreStripes)

# Names at namespace scope that are private to a source: what two sources of one unity group must not both have. Private
# names begin in the first column, as clang-format leaves them.
function(echoline_private_names source out_names out_lines)
  file(READ ${source} text)
  string(REGEX REPLACE "[][;\\\\]" " " text "${text}")
  string(REPLACE "\n" ";" lines "${text}")
  list(LENGTH lines count)
  set(names "")
  set(inside OFF)
  foreach(line IN LISTS lines)
    if(line STREQUAL "namespace {")
      set(inside ON)
    elseif(line STREQUAL "}  // namespace")
      set(inside OFF)
    elseif(line MATCHES "^#define ([A-Za-z_0-9]+)")
      list(APPEND names "${CMAKE_MATCH_1}")
    elseif((inside AND line MATCHES "^using ([A-Za-z_0-9]+) =") OR
           (NOT line MATCHES "^using (nlohmann|std|torch)::" AND
            line MATCHES "^using [A-Za-z_0-9:]+::([A-Za-z_0-9]+) *$"))
      list(APPEND names "${CMAKE_MATCH_1}")
    elseif(inside AND line MATCHES "^(struct|class|enum class|enum) ([A-Za-z_0-9]+)")
      list(APPEND names "${CMAKE_MATCH_2}")
    elseif((inside AND line MATCHES "^[A-Za-z]" AND NOT line MATCHES "^(template|namespace|using) ?") OR
           line MATCHES "^static ")
      if(line MATCHES "([A-Za-z_0-9]+) *[({=]")
        list(APPEND names "${CMAKE_MATCH_1}")
      endif()
      string(REGEX MATCHALL "k[A-Z][A-Za-z_0-9]* *[={]" constants "${line}")  # several in one declaration
      string(REGEX REPLACE " *[={]" "" constants "${constants}")
      list(APPEND names ${constants})
    endif()
  endforeach()
  list(REMOVE_ITEM names ${ECHOLINE_RENAMED} "")
  set(${out_names} "${names}" PARENT_SCOPE)
  set(${out_lines} ${count} PARENT_SCOPE)
endfunction()

# echoline_unite(target): with ECHOLINE_QUICK, compiles its sources in groups. Headers and templates are then read and
# instantiated once a group; beyond some 4,000 lines a group gains little and keeps other processors waiting. Sources
# with options of their own, or with SKIP_UNITY_BUILD_INCLUSION, stay alone.
set(ECHOLINE_GROUP_LINES 4000)
function(echoline_unite target)
  if(NOT ECHOLINE_QUICK)
    return()
  endif()
  get_target_property(sources ${target} SOURCES)
  set(last -1)
  foreach(source IN LISTS sources)
    get_source_file_property(alone ${source} SKIP_UNITY_BUILD_INCLUSION)
    get_source_file_property(own_options ${source} COMPILE_OPTIONS)
    if(NOT source MATCHES "\\.cpp$" OR alone OR own_options)
      continue()
    endif()
    file(REAL_PATH ${source} path BASE_DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR})
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${path})
    echoline_private_names(${path} names lines)
    set(group -1)
    foreach(candidate RANGE ${last})
      if(last EQUAL -1)
        break()
      endif()
      math(EXPR sum "${lines_${candidate}} + ${lines}")
      if(sum GREATER ECHOLINE_GROUP_LINES)
        continue()
      endif()
      set(shared ${names_${candidate}})
      list(REMOVE_ITEM shared ${names} "")
      list(LENGTH shared left)
      list(LENGTH names_${candidate} all)
      if(left EQUAL all)
        set(group ${candidate})
        break()
      endif()
    endforeach()
    if(group EQUAL -1)
      math(EXPR last "${last} + 1")
      set(group ${last})
      set(lines_${group} 0)
      set(names_${group} "")
    endif()
    math(EXPR lines_${group} "${lines_${group}} + ${lines}")
    list(APPEND names_${group} ${names})
    set_source_files_properties(${source} PROPERTIES UNITY_GROUP ${group})
  endforeach()
  string(CONCAT before "#ifndef ECHOLINE_JOIN\n#define ECHOLINE_JOIN_(a, b) a##b\n"
    "#define ECHOLINE_JOIN(a, b) ECHOLINE_JOIN_(a, b)\n#endif\n")
  set(after "")
  foreach(name IN LISTS ECHOLINE_RENAMED)
    string(APPEND before "#define ${name} ECHOLINE_JOIN(${name}_, ECHOLINE_SOURCE)\n")
    string(APPEND after "#undef ${name}\n")
  endforeach()
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    target_compile_options(${target} PRIVATE -Wno-subobject-linkage)  # it takes every source of a group for a header
  endif()
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP UNITY_BUILD_UNIQUE_ID ECHOLINE_SOURCE
    UNITY_BUILD_CODE_BEFORE_INCLUDE "${before}" UNITY_BUILD_CODE_AFTER_INCLUDE "${after}")
endfunction()

# For tests/structure: sources that are compiled only where there is libtorch.
function(echoline_note_torch_sources)
  foreach(source IN LISTS ARGN)
    file(RELATIVE_PATH path ${CMAKE_SOURCE_DIR} ${CMAKE_CURRENT_SOURCE_DIR}/${source})
    set_property(GLOBAL APPEND PROPERTY ECHOLINE_TORCH_SOURCES ${path})
  endforeach()
endfunction()

# echoline_library(name [TORCH] [LIGHT] SOURCES a.cpp ... [USES targets in our public headers]
#                  [PRIVATE_USES targets hidden in .cpp files]).
#                  TORCH: libtorch is known to it, and with ECHOLINE_TORCH=OFF it does not exist.
#                  LIGHT: it has no hot loops, so ECHOLINE_QUICK compiles it with -O1.
function(echoline_library name)
  cmake_parse_arguments(ARG "TORCH;LIGHT" "" "SOURCES;USES;PRIVATE_USES" ${ARGN})
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
  if(ARG_TORCH)
    target_compile_options(echoline_${name} PRIVATE ${ECHOLINE_TORCH_OPTIONS})
  endif()
  if(ARG_LIGHT)
    echoline_light(echoline_${name})
  endif()
  echoline_unite(echoline_${name})
  echoline_folder(folder)
  set_target_properties(echoline_${name} PROPERTIES ECHOLINE_FOLDER ${folder})
  set_property(GLOBAL APPEND PROPERTY ECHOLINE_LIBRARIES ${name})
endfunction()

# echoline_test(name KIND unit|integration|sim|fuzz|bench-smoke SOURCES a.cpp ... USES targets [TORCH_SOURCES b.cpp ...]
#               [TORCH_USES targets] [TIMEOUT seconds])
# One executable per call, one CTest test per executable, labelled with its kind. With ECHOLINE_TORCH=OFF it does
# without what is for libtorch, and does not exist where nothing else is left.
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
  # COST: long tests begin first, so that no core waits at the end.
  set_tests_properties(${name} PROPERTIES LABELS ${ARG_KIND} TIMEOUT ${ARG_TIMEOUT} COST ${ARG_TIMEOUT})
  if(ARG_KIND STREQUAL "integration")
    set_tests_properties(${name} PROPERTIES RUN_SERIAL ON)  # real processes and real time: nothing beside it
  endif()
endfunction()

# echoline_fuzz(name SOURCES a.cpp ... USES targets SEEDS test[:filter]): a libFuzzer program around
# LLVMFuzzerTestOneInput(), built only with ECHOLINE_FUZZ (clang). The test `test` has the same source and calls the
# target by tests/fuzz/input.hpp, so that every ordinary test run tries it; with the GoogleTest filter `filter`, its
# inputs are the first corpus that tests/fuzz/run has.
add_custom_target(fuzzers)
function(echoline_fuzz name)
  cmake_parse_arguments(ARG "" "SEEDS" "SOURCES;USES" ${ARGN})
  if(NOT ECHOLINE_FUZZ)
    return()
  endif()
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE echoline_flags ${ARG_USES})
  target_link_options(${name} PRIVATE -fsanitize=fuzzer)
  add_dependencies(fuzzers ${name})
  file(RELATIVE_PATH folder ${CMAKE_SOURCE_DIR} ${CMAKE_CURRENT_SOURCE_DIR})
  file(APPEND ${CMAKE_BINARY_DIR}/fuzzers.txt "${name} ${folder} ${ARG_SEEDS}\n")
endfunction()
if(ECHOLINE_FUZZ)
  file(WRITE ${CMAKE_BINARY_DIR}/fuzzers.txt "")
endif()

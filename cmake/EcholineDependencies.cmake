# Every third-party library the project uses, found once, as imported targets.
find_package(PkgConfig REQUIRED)
find_package(Threads REQUIRED)
find_package(fmt REQUIRED)
find_package(spdlog REQUIRED)
find_package(nlohmann_json REQUIRED)
find_package(CLI11 REQUIRED)
find_package(Boost 1.74 REQUIRED)   # Boost.Graph is header-only for what we use
find_package(SQLite3 REQUIRED)
find_package(Protobuf REQUIRED)
find_package(OpenSSL 3.0 REQUIRED)
find_package(CURL REQUIRED)
pkg_check_modules(libuv REQUIRED IMPORTED_TARGET libuv)
pkg_check_modules(yaml REQUIRED IMPORTED_TARGET yaml-0.1)
pkg_check_modules(httplib REQUIRED IMPORTED_TARGET cpp-httplib)
pkg_check_modules(zstd REQUIRED IMPORTED_TARGET libzstd)
pkg_check_modules(xxhash REQUIRED IMPORTED_TARGET libxxhash)
pkg_check_modules(seccomp REQUIRED IMPORTED_TARGET libseccomp)
pkg_check_modules(pcre2 REQUIRED IMPORTED_TARGET libpcre2-8)
pkg_check_modules(utf8proc REQUIRED IMPORTED_TARGET libutf8proc)
include(EcholineBlake3)
# Pages draw their plots with Plotly, which becomes part of the program. Without it they are drawn as SVG.
find_file(ECHOLINE_CHART_JS chart.min.js PATHS /usr/share/javascript/chart.js NO_DEFAULT_PATH)
if(ECHOLINE_CHART_JS)
  message(STATUS "Chart.js: ${ECHOLINE_CHART_JS}")
else()
  message(STATUS "Chart.js was not found (Debian: libjs-chart.js): plots of pages will be plain SVG")
endif()
if(ECHOLINE_TESTS)
  find_package(GTest REQUIRED)
  find_package(benchmark REQUIRED)
endif()

if(ECHOLINE_TORCH AND "model" IN_LIST ECHOLINE_CONFIGURED)
  # libtorch, wrapped: SYSTEM includes, no flags leaked from TorchConfig, and only for libraries that ask for it
  # (TORCH). Debian's, one below CMAKE_PREFIX_PATH, or else the one of the Python package.
  find_package(Torch QUIET)
  if(NOT Torch_FOUND)
    find_package(Python3 COMPONENTS Interpreter)
    if(Python3_FOUND)
      execute_process(COMMAND ${Python3_EXECUTABLE} -c "import torch; print(torch.utils.cmake_prefix_path)"
        OUTPUT_VARIABLE python_torch OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
      list(APPEND CMAKE_PREFIX_PATH ${python_torch})
    endif()
    find_package(Torch REQUIRED)
  endif()
  add_library(echoline_torch INTERFACE)
  # PyTorch's Python package has headers of its own copies of protobuf and fmt among its own, which are of other
  # versions than the libraries that are linked here: links to the right ones come first.
  set(before_torch "")
  list(GET TORCH_INCLUDE_DIRS 0 torch_headers)
  get_target_property(fmt_headers fmt::fmt INTERFACE_INCLUDE_DIRECTORIES)
  foreach(header IN ITEMS "${Protobuf_INCLUDE_DIRS}/google" "${fmt_headers}/fmt")
    get_filename_component(name ${header} NAME)
    if(EXISTS ${torch_headers}/${name} AND EXISTS ${header})
      set(before_torch ${CMAKE_BINARY_DIR}/before_torch)
      file(MAKE_DIRECTORY ${before_torch})
      file(CREATE_LINK ${header} ${before_torch}/${name} SYMBOLIC)
    endif()
  endforeach()
  target_include_directories(echoline_torch SYSTEM INTERFACE ${before_torch} ${TORCH_INCLUDE_DIRS})
  # The Python package's libtorch.so also exports parts of an old libstdc++ (its std::filesystem::remove_all jumps to
  # address 0): the system's libstdc++ is the first library in which a program looks for a function.
  target_link_options(echoline_torch INTERFACE
    "$<$<CXX_COMPILER_ID:GNU>:LINKER:--push-state,--no-as-needed;-l:libstdc++.so.6;LINKER:--pop-state>")
  target_link_libraries(echoline_torch INTERFACE ${TORCH_LIBRARIES})
  target_link_options(echoline_torch INTERFACE $<$<CXX_COMPILER_ID:GNU>:-fopenmp>)  # threads of model/parallel.cpp
  # A flag that is the compiler's default anyway; stated again, it keeps files from using the precompiled headers of all
  # others.
  get_target_property(options torch INTERFACE_COMPILE_OPTIONS)
  if(NOT options)
    set(options "")  # "options-NOTFOUND" where PyTorch has none
  endif()
  if("-D_GLIBCXX_USE_CXX11_ABI=0" IN_LIST options)
    message(FATAL_ERROR "${TORCH_LIBRARY} was built for the C++ ABI of before 2015, and nothing else here is: take "
      "PyTorch 2.6 or newer, or a libtorch archive that says cxx11-abi")
  endif()
  list(REMOVE_ITEM options -D_GLIBCXX_USE_CXX11_ABI=1 "")
  set_target_properties(torch PROPERTIES INTERFACE_COMPILE_OPTIONS "${options}")
  # One with CUDA chooses for all device code what GPUs it is for; ours is for those that EcholineCuda or the user has
  # chosen.
  unset(CMAKE_CUDA_ARCHITECTURES)
  unset(CMAKE_CUDA_FLAGS)
endif()

echoline_precompiled(standard HEADERS ${ECHOLINE_STANDARD_HEADERS} USES fmt::fmt)
if(TARGET echoline_torch)
  echoline_precompiled(torch HEADERS ${ECHOLINE_STANDARD_HEADERS} <model/torch.hpp>
    USES fmt::fmt echoline_torch OPTIONS ${ECHOLINE_TORCH_OPTIONS})
endif()
if("cli" IN_LIST ECHOLINE_CONFIGURED OR ECHOLINE_TESTS)
  echoline_precompiled(program HEADERS ${ECHOLINE_STANDARD_HEADERS} <nlohmann/json.hpp>
    USES fmt::fmt nlohmann_json::nlohmann_json)
endif()
if(ECHOLINE_TESTS)
  echoline_precompiled(test HEADERS ${ECHOLINE_STANDARD_HEADERS} <gmock/gmock.h> <gtest/gtest.h>
    USES fmt::fmt GTest::gtest GTest::gmock)
endif()

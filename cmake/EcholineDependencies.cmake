# Every third-party library the project uses, found once, as imported targets.
find_package(PkgConfig REQUIRED)
find_package(Threads REQUIRED)
find_package(fmt REQUIRED)
find_package(spdlog REQUIRED)
find_package(nlohmann_json REQUIRED)
find_package(yaml-cpp REQUIRED)
find_package(CLI11 REQUIRED)
find_package(Boost 1.74 REQUIRED)   # Boost.Graph is header-only for what we use
find_package(SQLite3 REQUIRED)
find_package(Protobuf REQUIRED)
pkg_check_modules(libuv REQUIRED IMPORTED_TARGET libuv)
pkg_check_modules(zstd REQUIRED IMPORTED_TARGET libzstd)
pkg_check_modules(xxhash REQUIRED IMPORTED_TARGET libxxhash)
pkg_check_modules(pcre2 REQUIRED IMPORTED_TARGET libpcre2-8)
if(ECHOLINE_TESTS)
  find_package(GTest REQUIRED)
endif()

# libtorch, wrapped: SYSTEM includes, no flags leaked from TorchConfig, and only where model/learner/worker ask for it.
find_package(Torch REQUIRED)
add_library(echoline_torch INTERFACE)
target_include_directories(echoline_torch SYSTEM INTERFACE ${TORCH_INCLUDE_DIRS})
target_link_libraries(echoline_torch INTERFACE ${TORCH_LIBRARIES})

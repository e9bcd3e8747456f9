# echoline_blake3: the official C implementation of BLAKE3, as a library or compiled from installed sources. Debian 12
# has no libblake3, but its Rust package brings those sources along.
add_library(echoline_blake3 INTERFACE)
pkg_check_modules(blake3 IMPORTED_TARGET libblake3)
if(blake3_FOUND)
  target_link_libraries(echoline_blake3 INTERFACE PkgConfig::blake3)
  return()
endif()

file(GLOB sources /usr/share/cargo/registry/blake3-*/c/blake3.c)
if(NOT sources)
  message(FATAL_ERROR "BLAKE3 was not found: neither libblake3 (pkg-config) nor its sources in "
                      "/usr/share/cargo/registry. Install librust-blake3-dev (Debian 12), or libblake3-dev where it "
                      "exists.")
endif()
list(SORT sources COMPARE NATURAL)
list(GET sources -1 newest)
cmake_path(GET newest PARENT_PATH folder)

# Not held to our warning flags, nor to sanitizers: it looks the processor up without a lock, in each thread alike.
add_library(echoline_blake3_sources STATIC ${folder}/blake3.c ${folder}/blake3_dispatch.c ${folder}/blake3_portable.c)
target_include_directories(echoline_blake3_sources SYSTEM PUBLIC ${folder})
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|amd64|AMD64)$")
  enable_language(ASM)
  foreach(set sse2 sse41 avx2 avx512)
    target_sources(echoline_blake3_sources PRIVATE ${folder}/blake3_${set}_x86-64_unix.S)
  endforeach()
else()
  target_compile_definitions(echoline_blake3_sources PRIVATE
    BLAKE3_USE_NEON=0 BLAKE3_NO_SSE2 BLAKE3_NO_SSE41 BLAKE3_NO_AVX2 BLAKE3_NO_AVX512)
endif()
if(ECHOLINE_SANITIZE)
  target_compile_options(echoline_blake3_sources PRIVATE -fno-sanitize=all)
endif()
target_link_libraries(echoline_blake3 INTERFACE echoline_blake3_sources)
message(STATUS "BLAKE3: compiled from ${folder}")

// The bytes of host.cpp's program, which the build has compiled before.
#include "data_plane/adapters/library/host.hpp"

// The assembler embeds the file at ECHOLINE_LIBRARY_HOST into this program.
asm(".section .rodata\n"
    ".global echoline_library_host_begin, echoline_library_host_end\n"
    "echoline_library_host_begin: .incbin \"" ECHOLINE_LIBRARY_HOST
    "\"\n"
    "echoline_library_host_end: .byte 0\n"
    ".previous\n");
extern "C" const char echoline_library_host_begin[], echoline_library_host_end[];

namespace echoline::data_plane::library {

std::string_view host_program() {
  return {echoline_library_host_begin,
          static_cast<std::size_t>(echoline_library_host_end - echoline_library_host_begin)};
}

}  // namespace echoline::data_plane::library

// Fuzz target: the headers of an ELF file, and bytes given as hexadecimal digits.
#include "base/result.hpp"
#include "data_plane/adapters/library/elf.hpp"

using namespace echoline;
using namespace echoline::data_plane;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  if (const auto checked = library::check_library(bytes, "f"); !checked)
    ECHO_CHECK(checked.error().code == Code::kInvalid);
  ECHO_CHECK(*library::from_hex(library::to_hex(bytes)) == bytes);
  if (const auto read = library::from_hex(bytes)) ECHO_CHECK(library::to_hex(*read) == bytes);
  return 0;
}

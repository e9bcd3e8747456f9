// Reads the header of an ELF file, and converts bytes to hexadecimal digits.
#include "data_plane/adapters/library/elf.hpp"

#include <elf.h>

#include <bit>
#include <cstring>

namespace echoline::data_plane::library {
namespace {

#if defined(__x86_64__)
constexpr unsigned kThisMachine = EM_X86_64;
#elif defined(__aarch64__)
constexpr unsigned kThisMachine = EM_AARCH64;
#else
constexpr unsigned kThisMachine = EM_NONE;
#endif

std::string machine_name(unsigned number) {
  if (number == EM_X86_64) return "x86-64";
  if (number == EM_AARCH64) return "aarch64";
  return fmt::format("machine {}", number);
}

// The value of a hexadecimal digit; -1 for another character.
int digit_value(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

}  // namespace

Status check_library(std::string_view bytes, std::string_view name) {
  Elf64_Ehdr header{};
  const auto mismatch = [&](std::string_view found) {
    return fail(Code::kInvalid, "task", "{}: expected a shared library (ELF, 64 bits) for {}, found {}", name,
                machine_name(kThisMachine), found);
  };
  if (bytes.size() < sizeof header || !bytes.starts_with(ELFMAG)) return mismatch("another kind of file");
  std::memcpy(&header, bytes.data(), sizeof header);
  const int byte_order = std::endian::native == std::endian::little ? ELFDATA2LSB : ELFDATA2MSB;
  if (header.e_ident[EI_CLASS] != ELFCLASS64 || header.e_ident[EI_DATA] != byte_order)
    return mismatch("one for another kind of machine");
  if (header.e_machine != kThisMachine) return mismatch("one for " + machine_name(header.e_machine));
  if (header.e_type != ET_DYN)
    return mismatch(header.e_type == ET_REL ? "an object file; link it with -shared" : "a program");
  return ok();
}

std::string to_hex(std::string_view bytes) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string digits;
  digits.reserve(bytes.size() * 2);
  for (const char c : bytes) {
    digits += kDigits[static_cast<unsigned char>(c) >> 4];
    digits += kDigits[static_cast<unsigned char>(c) & 15];
  }
  return digits;
}

Result<std::string> from_hex(std::string_view digits) {
  std::string bytes;
  bytes.reserve(digits.size() / 2);
  for (std::size_t i = 0; i + 1 < digits.size(); i += 2) {
    const int high = digit_value(digits[i]), low = digit_value(digits[i + 1]);
    if (high < 0 || low < 0) break;
    bytes += static_cast<char>(high * 16 + low);
  }
  if (bytes.size() * 2 != digits.size())
    return fail(Code::kCorrupt, "task", "expected hexadecimal digits, two for each byte of a library");
  return bytes;
}

}  // namespace echoline::data_plane::library

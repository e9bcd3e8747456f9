// Fuzz target: bytes as a whole safetensors file, and as a header with the right length before it. Views must stay
// inside the data and fill it.
#include <cstdlib>
#include <cstring>
#include <string>

#include "delta/safetensors.hpp"

using namespace echoline::delta;

namespace {

void require(bool condition) {
  if (!condition) std::abort();
}

void try_file(std::span<const std::byte> file) {
  const auto parsed = parse_safetensors(file, "fuzz");
  if (!parsed) return;
  require(canonical(parsed->tensors).has_value());
  std::size_t total = 0;
  for (const TensorView& t : parsed->tensors) {
    total += t.bytes.size();
    require(t.bytes.empty() ||
            (t.bytes.data() >= file.data() && t.bytes.data() + t.bytes.size() <= file.data() + file.size()));
  }
  std::uint64_t header = 0;
  std::memcpy(&header, file.data(), 8);
  require(total == file.size() - 8 - header);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try_file(std::as_bytes(std::span(data, size)));
  for (const std::size_t data_bytes : {0, 6}) {
    std::string file(8, '\0');
    const std::uint64_t header = size;
    std::memcpy(file.data(), &header, 8);
    file.append(reinterpret_cast<const char*>(data), size).append(data_bytes, 'x');
    try_file(std::as_bytes(std::span(file.data(), file.size())));
  }
  return 0;
}

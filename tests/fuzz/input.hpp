// How an ordinary test calls the fuzz target that its program is linked with.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <span>
#include <string>
#include <string_view>

// Returns 0. Aborts where the input breaks something that must hold for every input.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace echoline::test {

// Runs the target on `bytes`. Where the environment variable ECHOLINE_FUZZ_SEEDS names a folder, the first kSeedsMax
// inputs of the process are kept there as well: tests/fuzz/run starts a new corpus with them.
inline void fuzz_input(std::string_view bytes) {
  constexpr int kSeedsMax = 4000;
  static const char* const folder = std::getenv("ECHOLINE_FUZZ_SEEDS");
  static int seeds = 0;
  if (folder != nullptr && seeds < kSeedsMax)
    std::ofstream(folder + ("/" + std::to_string(seeds++)), std::ios::binary) << bytes;
  LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size());
}

inline void fuzz_input(std::span<const std::byte> bytes) {
  fuzz_input(std::string_view(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
}

}  // namespace echoline::test

// Runs a fuzz target over its corpus and over random mutations of it, as an ordinary test.
#include <gtest/gtest.h>

#include <filesystem>
#include <set>

#include "base/files.hpp"
#include "base/random.hpp"
#include "tests/fuzz/input.hpp"

namespace echoline {
namespace {

TEST(Fuzz, CorpusAndItsMutations) {
  std::set<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(ECHOLINE_FUZZ_CORPUS)) files.insert(entry.path());
  ASSERT_FALSE(files.empty());
  Random random(11);
  for (const auto& path : files) {
    const auto content = read_file(path);
    ASSERT_TRUE(content) << content.error().message();
    SCOPED_TRACE(path);
    test::fuzz_input(*content);
    for (int round = 0; round < 2000; ++round) {
      std::string damaged = *content;
      for (std::uint64_t edits = 1 + random.below(3); edits > 0 && !damaged.empty(); --edits) {
        const std::size_t at = random.below(damaged.size());
        const auto byte = static_cast<char>(random.next());
        switch (random.below(3)) {
          case 0:
            damaged[at] = byte;
            break;
          case 1:
            damaged.insert(at, 1, byte);
            break;
          default:
            damaged.erase(at, 1 + random.below(4));
        }
      }
      test::fuzz_input(damaged);
    }
  }
}

}  // namespace
}  // namespace echoline

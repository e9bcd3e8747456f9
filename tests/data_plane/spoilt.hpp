// Messages damaged in thousands of ways, for the body of a fuzz target.
#pragma once
#include <cstdint>
#include <span>
#include <string>

#include "base/random.hpp"
#include "tests/fuzz/input.hpp"

namespace echoline::data_plane {

inline void feed_spoilt(std::span<const std::string> seeds, std::uint64_t seed) {
  Random random(seed, 0);
  for (int round = 0; round < 20'000; ++round) {
    std::string text = seeds[random.below(std::size(seeds))];
    for (std::uint64_t i = random.below(4); i > 0 && !text.empty(); --i) {
      const std::size_t at = random.below(text.size());
      if (random.below(2) == 0)
        text[at] = static_cast<char>(random.below(256));
      else
        text.erase(at, 1 + random.below(8));
    }
    test::fuzz_input(text);
  }
}

}  // namespace echoline::data_plane

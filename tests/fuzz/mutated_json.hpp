// Damaged JSON files for tests of parsers.
#pragma once
#include <string>

#include "base/random.hpp"

namespace echoline::test {

// `whole` with one to three random changes of bytes and short parts. Equal states of `random` give equal texts.
inline std::string mutated_json(const std::string& whole, Random& random) {
  std::string mutated = whole;
  for (std::uint64_t changes = 1 + random.below(3); changes > 0; --changes) {
    const auto place = static_cast<std::size_t>(random.below(mutated.size()));
    switch (random.below(4)) {
      case 0:
        mutated[place] = static_cast<char>(random.below(256));
        break;
      case 1:
        mutated.erase(place, random.below(20));
        break;
      case 2:
        mutated.insert(place, whole.substr(random.below(whole.size()), random.below(20)));
        break;
      default:
        mutated[place] = "{}[]\"\\,:01e-"[random.below(12)];
    }
  }
  return mutated;
}

}  // namespace echoline::test

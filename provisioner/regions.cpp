// Finds the region of a place by its words.
#include "provisioner/regions.hpp"

#include <algorithm>

namespace echoline::provisioner {

bool contains_place(std::string_view place, std::string_view part) {
  const auto lower = [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; };
  const auto in_word = [](char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c & 0x80);
  };
  for (auto at = place.begin(); !part.empty(); ++at) {
    at = std::search(at, place.end(), part.begin(), part.end(), [&](char a, char b) { return lower(a) == lower(b); });
    if (at == place.end()) return false;
    const auto after = at + static_cast<std::ptrdiff_t>(part.size());
    const bool begins = at == place.begin() || !in_word(part.front()) || !in_word(at[-1]);
    const bool ends = after == place.end() || !in_word(part.back()) || !in_word(*after);
    if (begins && ends) return true;
  }
  return false;
}

std::optional<std::uint32_t> RegionMap::find(std::string_view place) const {
  for (std::uint32_t r = 0; r < regions.size() && !place.empty(); ++r)
    if (std::any_of(regions[r].places.begin(), regions[r].places.end(),
                    [&](const auto& part) { return contains_place(place, part); }))
      return r;
  return std::nullopt;
}

}  // namespace echoline::provisioner

// Finds a place's region by the words of the place.
#include "provisioner/regions.hpp"

#include <algorithm>

namespace echoline::provisioner {

bool contains_place(std::string_view place, std::string_view part) {
  const auto lower = [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; };
  const auto is_word_char = [](char c) {  // bytes above 0x7f belong to a letter in UTF-8
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c & 0x80);
  };
  const auto equals = [&](char a, char b) { return lower(a) == lower(b); };
  for (auto match = place.begin(); !part.empty(); ++match) {
    match = std::search(match, place.end(), part.begin(), part.end(), equals);
    if (match == place.end()) return false;
    const auto after = match + static_cast<std::ptrdiff_t>(part.size());
    const bool begins_word = match == place.begin() || !is_word_char(part.front()) || !is_word_char(match[-1]);
    const bool ends_word = after == place.end() || !is_word_char(part.back()) || !is_word_char(*after);
    if (begins_word && ends_word) return true;
  }
  return false;
}

std::optional<std::uint32_t> RegionMap::find(std::string_view place) const {
  for (std::uint32_t i = 0; i < regions.size() && !place.empty(); ++i)
    if (std::any_of(regions[i].places.begin(), regions[i].places.end(),
                    [&](const auto& part) { return contains_place(place, part); }))
      return i;
  return std::nullopt;
}

}  // namespace echoline::provisioner

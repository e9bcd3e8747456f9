#include "provisioner/regions.hpp"

#include <algorithm>

namespace echoline::provisioner {

bool contains_place(std::string_view place, std::string_view part) {
  const auto lower = [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; };
  return std::search(place.begin(), place.end(), part.begin(), part.end(),
                     [&](char a, char b) { return lower(a) == lower(b); }) != place.end();
}

std::optional<std::uint32_t> RegionMap::find(std::string_view place) const {
  for (std::uint32_t r = 0; r < regions.size() && !place.empty(); ++r)
    if (std::any_of(regions[r].places.begin(), regions[r].places.end(), [&](const auto& part) { return contains_place(place, part); }))
      return r;
  return std::nullopt;
}

}  // namespace echoline::provisioner

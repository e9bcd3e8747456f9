// Regions of a run: which machines stand where, by the place that they or their offers state, and the ways between.
#pragma once
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "chains/regions.hpp"

namespace echoline::provisioner {

// Whether a place, such as "Sweden, SE" or "eu-west-1b", contains these whole words: "SE" and "eu-west" are in them,
// "DE" and "west-1" are not. Case does not count.
bool contains_place(std::string_view place, std::string_view part);

struct Region {
  std::string name;
  std::vector<std::string> places;  // who states a place that contains one of these words stands there
};

struct RegionMap {
  std::vector<Region> regions;  // empty: all stand in one place
  chains::Regions ways;         // by their order

  // The first region that has the place.
  std::optional<std::uint32_t> find(std::string_view place) const;
  // The learner's where none has it, or none is stated.
  std::uint32_t of(std::string_view place) const { return find(place).value_or(ways.learner); }
};

}  // namespace echoline::provisioner

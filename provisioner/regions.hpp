// The regions of a run, found by the places that machines or offers state, and the links between regions.
#pragma once
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "chains/regions.hpp"

namespace echoline::provisioner {

// Whether a place, such as "Sweden, SE" or "eu-west-1b", contains `part` as whole words: "SE" and "eu-west" but not
// "DE" or "west-1". Ignores case.
bool contains_place(std::string_view place, std::string_view part);

struct Region {
  std::string name;
  std::vector<std::string> places;  // a machine is in the region if its place contains one of these: contains_place()
};

struct RegionMap {
  std::vector<Region> regions;  // empty: all machines are in one region
  chains::Regions graph;        // the links between regions (network.ways), by their indices in `regions`

  // The index of the first region with a matching place.
  std::optional<std::uint32_t> find(std::string_view place) const;
  // Like find(), but the learner's region if none matches.
  std::uint32_t of(std::string_view place) const { return find(place).value_or(graph.learner_region); }
};

}  // namespace echoline::provisioner

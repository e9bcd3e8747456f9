// What it costs to bring somebody from one version to another with the publications that are at hand.
#pragma once
#include <map>
#include <optional>

#include "overlay/wire/frame.hpp"

namespace echoline::overlay {

// Bytes of the cheapest way from `position` (absent: from nothing) to `target` or beyond, over whole publications of
// the given sizes: a full snapshot starts anywhere, a delta continues from its base. `full_only`: by one full snapshot
// of `target` or newer. Absent: there is no way.
std::optional<std::uint64_t> cheapest_way(const std::map<PublicationKey, std::uint64_t>& bytes_of,
                                          std::optional<Version> position, Version target, bool full_only);

}  // namespace echoline::overlay

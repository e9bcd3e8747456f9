// Responses that a policy may write, from correct to hostile. Private to data_plane/.
#pragma once
#include <string>
#include <vector>

#include "data_plane/adapters/adapter.hpp"

namespace echoline::data_plane {

// A response to try.
struct Probe {
  std::string what;  // "1 MiB of digits"
  std::string text;
  bool plain = false;  // every task should be able to score it, so a failure is an error
};

// `other`: a different problem. Equal problems give equal probes.
std::vector<Probe> probes_for(const Adapter& adapter, const Problem& problem, const Problem& other);

}  // namespace echoline::data_plane

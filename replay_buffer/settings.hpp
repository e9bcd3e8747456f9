// Keys of the run file for the age of data (section `staleness`) and for leases (lease_* of section `rollout`).
#pragma once
#include <cstdint>
#include <optional>

#include "base/units.hpp"

namespace echoline {
class ConfigSection;
}

namespace echoline::replay_buffer {

struct StalenessSettings {
  std::uint32_t budget = 3;                // S >= kappa - 1; 0: every step trains on rollouts of the policy it updates
  std::uint32_t publish_every = 1;         // kappa
  std::optional<std::uint32_t> lookahead;  // batches leased ahead of consumption, <= S; absent: S
  std::uint32_t lookahead_steps() const { return lookahead.value_or(budget); }  // L
};

// A worker's lease lasts twice the measured time of a longest response, at least `min`; each sign of progress renews
// it.
struct LeaseSettings {
  Duration first = std::chrono::seconds(60);  // before any measurement
  Duration min = std::chrono::seconds(10);
  Duration max = std::chrono::hours(2);  // from grant to result, including renewals
};

// Each function reads its keys of the section and records mistakes in it.
void read(ConfigSection staleness, StalenessSettings& settings);
void read(ConfigSection rollout, LeaseSettings& settings);

}  // namespace echoline::replay_buffer

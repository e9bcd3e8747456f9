// Keys of the run file for the age of data (section `staleness`) and for leases (lease_* of section `rollout`). A lease
// permits a worker to generate one group.
#pragma once
#include <cstdint>
#include <optional>

#include "base/units.hpp"

namespace echoline {
class ConfigSection;
}

namespace echoline::replay_buffer {

struct StalenessSettings {
  std::uint32_t budget = 3;                // S: learner steps, >= kappa - 1; 0: trains on the current policy's rollouts
  std::uint32_t publish_every = 1;         // kappa: learner steps from one publication of the policy to the next
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

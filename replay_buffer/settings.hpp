// Keys of a run file: how old data may be (section `staleness`), and for how long a worker keeps a group (lease_* of
// section `rollout`).
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
  std::optional<std::uint32_t> lookahead;  // batches that may be handed out ahead of consumption, <= S; absent: S
  std::uint32_t lookahead_steps() const { return lookahead.value_or(budget); }  // L
};

// A worker's right to a group ends after twice the time it needs for a response of the greatest length, as measured on
// it, but not before `min`; every sign of progress renews it.
struct LeaseSettings {
  Duration first = std::chrono::seconds(60);  // before anything was measured
  Duration min = std::chrono::seconds(10);
  Duration max = std::chrono::hours(2);  // from grant to result, renewals included
};

// Each reads its keys of the section; mistakes are noted in it.
void read(ConfigSection staleness, StalenessSettings& settings);
void read(ConfigSection rollout, LeaseSettings& settings);

}  // namespace echoline::replay_buffer

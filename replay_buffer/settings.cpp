// Reads this folder's keys of the run file, for the learner and the simulator.
#include "replay_buffer/settings.hpp"

#include "base/config.hpp"
#include "replay_buffer/rules.hpp"

namespace echoline::replay_buffer {

void read(ConfigSection s, StalenessSettings& c) {
  s.require("budget", c.budget, {.min = 0, .max = 1000},
            "S: the most learner steps by which a trajectory may be older than the step that trains on it");
  s.read("publish_every", c.publish_every, {.min = 1, .max = 1000},
         "kappa: learner steps from one publication of the policy to the next");
  const std::uint32_t budget_min = staleness_budget_min(c.publish_every);
  if (c.budget < budget_min)
    s.error("budget", fmt::format("the staleness budget S = {} is below publish_every (kappa) - 1 = {}: the last step "
                                  "before a publication trains on a policy that is {} steps old. Raise budget or lower "
                                  "publish_every",
                                  c.budget, budget_min, budget_min));
  s.read_or_auto("lookahead", c.lookahead, {.min = 0, .max = 1000},
                 "batches of work that may be leased ahead of the step that trains on them, at most S. `auto`: S, so "
                 "that S alone limits the age of data. A smaller number keeps data fresher; 2 keep a learner as busy "
                 "as more do, fewer leave it waiting");
  if (c.lookahead > c.budget)
    s.error("lookahead", fmt::format("expected at most the budget S = {}, or `auto`, which follows it; found {}",
                                     c.budget, *c.lookahead));
}

void read(ConfigSection s, LeaseSettings& c) {
  const Limits<Duration> lease{.min = std::chrono::seconds(1), .max = std::chrono::hours(24 * 7)};
  s.read("lease_first", c.first, lease,
         "how long an unmeasured worker may work on a group without progress; progress renews it");
  s.read("lease_min", c.min, lease, "the shortest such time for a measured worker");
  s.read("lease_max", c.max, lease, "the longest that a worker may keep a group, with any progress");
  if (c.min > c.first || c.first > c.max)
    s.error("lease_first", fmt::format("expected lease_min {} <= lease_first {} <= lease_max {}", to_text(c.min),
                                       to_text(c.first), to_text(c.max)));
}

}  // namespace echoline::replay_buffer

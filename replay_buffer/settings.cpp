// Reads this folder's keys of the run file, for the learner and the simulator.
#include "replay_buffer/settings.hpp"

#include "base/config.hpp"
#include "replay_buffer/rules.hpp"

namespace echoline::replay_buffer {

void read(ConfigSection staleness, StalenessSettings& settings) {
  staleness.require("budget", settings.budget, {.min = 0, .max = 1000},
                    "S: the most learner steps by which a trajectory may be older than the step that trains on it");
  staleness.read("publish_every", settings.publish_every, {.min = 1, .max = 1000},
                 "kappa: learner steps from one publication of the policy to the next");
  const std::uint32_t budget_min = staleness_budget_min(settings.publish_every);
  if (settings.budget < budget_min)
    staleness.error("budget",
                    fmt::format("the staleness budget S = {} is below publish_every (kappa) - 1 = {}: the last step "
                                "before a publication trains on a policy that is {} steps old. Raise budget or lower "
                                "publish_every",
                                settings.budget, budget_min, budget_min));
  staleness.read_or_auto(
      "lookahead", settings.lookahead, {.min = 0, .max = 1000},
      "batches of work that may be leased ahead of the step that trains on them, at most S. `auto`: S, so "
      "that S alone limits the age of data. A smaller number keeps data fresher; 2 keep a learner as busy "
      "as more do, fewer leave it waiting");
  if (settings.lookahead > settings.budget)
    staleness.error("lookahead",
                    fmt::format("expected at most the budget S = {}, or `auto`, which follows it; found {}",
                                settings.budget, *settings.lookahead));
}

void read(ConfigSection rollout, LeaseSettings& settings) {
  const Limits<Duration> allowed{.min = std::chrono::seconds(1), .max = std::chrono::hours(24 * 7)};
  rollout.read("lease_first", settings.first, allowed,
               "how long an unmeasured worker may work on a group without progress; progress renews it");
  rollout.read("lease_min", settings.min, allowed, "the shortest such time for a measured worker");
  rollout.read("lease_max", settings.max, allowed, "the longest that a worker may keep a group, with any progress");
  if (settings.min > settings.first || settings.first > settings.max)
    rollout.error("lease_first", fmt::format("expected lease_min {} <= lease_first {} <= lease_max {}",
                                             to_text(settings.min), to_text(settings.first), to_text(settings.max)));
}

}  // namespace echoline::replay_buffer

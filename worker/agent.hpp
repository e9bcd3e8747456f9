// The worker process: joins a learner, installs every published policy, generates and scores rollouts, and returns
// them.
#pragma once
#include <atomic>
#include <cstdint>
#include <optional>
#include <string>

#include "base/result.hpp"
#include "base/units.hpp"
#include "overlay/uv/node.hpp"
#include "worker/engine.hpp"

namespace echoline::worker {

// A worker with a speed limit (AgentOptions::rollouts_per_s_max) leases work for kAheadSeconds in advance, in addition
// to its current group.
inline constexpr double kAheadSeconds = 0.25;

struct AgentOptions {
  overlay::WorkerOptions node;               // the learner to join, and the worker's place in the overlay
  std::optional<double> rollouts_per_s_max;  // limit on the generation speed, to emulate a rented machine
  EngineMaker make_engine;                   // worker/engines/make.hpp
  // Called often, on the thread of run_agent(), while the learner is in reach; may be empty.
  std::function<void()> on_contact;
};

struct AgentReport {
  std::uint64_t rollouts = 0;  // acknowledged by the learner
  std::uint64_t refused = 0;   // submissions that the learner refused
  std::uint64_t versions = 0;  // installed policies
  // Sums over all installations: from the complete arrival of the publication until its installation began, and from
  // then until the policy was in place and reported.
  Duration install_waits{}, install_times{};
  std::string reason;  // why the worker ended
  // The run has ended, or the worker was asked to stop. False: the worker has lost its learner for good.
  bool ended_cleanly = true;
};

// Runs until the learner ends the run or is lost for good, or `stop` turns true (checked several times a second). On
// `stop`, groups that cannot be finished soon are abandoned, and their leases go to other workers. Returns an error if
// the worker cannot join, or cannot go on, for example because its engine is broken.
Result<AgentReport> run_agent(const AgentOptions& options, const std::atomic<bool>& stop);

}  // namespace echoline::worker

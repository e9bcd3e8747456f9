// The worker process: joins a learner, installs every policy it publishes, generates and scores rollouts, returns them.
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

inline constexpr double kAheadSeconds = 0.25;  // that a machine held to a speed has work beyond the group it is at

struct AgentOptions {
  overlay::WorkerOptions node;               // the learner that it joins, and its place in the overlay
  std::optional<double> rollouts_per_s_max;  // generation speed is held to this (a rented machine's, emulated)
  EngineMaker engine;                        // worker/engines/make.hpp
};

struct AgentReport {
  std::uint64_t rollouts = 0;  // acknowledged by the learner
  std::uint64_t refused = 0;   // returned but not accepted
  std::uint64_t versions = 0;  // installed
  Duration install_waits{};    // of all of them: from the complete publication until its installation began,
  Duration install_times{};    // and from then until it was in place and told
  std::string reason;          // why it ended
  bool in_order = true;        // the run has ended, or it was asked to stop; false: it lost its learner for good
};

// Runs until the learner ends the run or goes away, or `stop` turns true (checked several times a second; the batch
// under way is then abandoned and its leases return to the pool). An error when it never got to work.
Result<AgentReport> run_agent(const AgentOptions& options, const std::atomic<bool>& stop);

}  // namespace echoline::worker

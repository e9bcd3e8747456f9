// The parts of a simulated run around its learner: steps, publications, quorums, capacity, lengths of responses.
// Private to run_simulation.cpp.
#pragma once
#include <algorithm>
#include <cmath>
#include <deque>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "chains/broadcast_model.hpp"
#include "sim/draws.hpp"
#include "sim/run_desk.hpp"
#include "sim/run_plan.hpp"
#include "sim/run_scenario.hpp"
#include "sim/run_workers.hpp"

namespace echoline::sim {

struct Outgoing {  // a publication waiting for the learner's links
  std::uint64_t version = 0;
  double at_s = 0;  // end of its step
  Bytes bytes;
  bool snapshot = false;
};

// Publications that the learner has made but not sent.
struct Outbox {
  std::deque<Outgoing> encoding;  // oldest first, encoded one at a time
  double encoder_free_s = 0;      // when the encoder has encoded all of them
  bool links_busy = false;
  std::optional<Outgoing> waiting;  // encoded, until the links are free
  std::uint64_t newest_sent = 0;    // newest version sent
  std::uint64_t deltas_made = 0;    // number of publications after the first one
};

enum class LearnerPhase : std::uint8_t {
  kNotBegun,  // machines are booting
  kWaiting,   // for a batch
  kTraining,
  kFinishing,  // waits until the workers have the last policy
  kOver,
};

// The learner's phase and its current step.
struct Steps {
  LearnerPhase phase = LearnerPhase::kNotBegun;
  double wait_began_s = 0;       // when the current wait for a batch began
  SimStep row;                   // report of the step in training
  std::vector<DeskGroup> batch;  // of the step in training
  bool is(LearnerPhase expected) const { return phase == expected; }
  bool have_begun() const { return phase != LearnerPhase::kNotBegun; }
  void set_phase(LearnerPhase next) {
    const bool is_allowed =
        next == LearnerPhase::kOver || (next == LearnerPhase::kTraining && is(LearnerPhase::kWaiting)) ||
        (next == LearnerPhase::kFinishing && is(LearnerPhase::kWaiting)) ||
        (next == LearnerPhase::kWaiting && (is(LearnerPhase::kTraining) || is(LearnerPhase::kNotBegun)));
    ECHO_CHECK(is_allowed, "the learner: from {} to {}", static_cast<int>(phase), static_cast<int>(next));
    phase = next;
  }
};

// Measures how long the fleet is short of capacity, each time after it had enough, and how long it has none.
class CapacityWatch {
 public:
  explicit CapacityWatch(std::vector<double>& recoveries_s) : recoveries_s_(recoveries_s) {}
  void measure(double rollouts_per_s, double now_s) {
    const bool is_sufficient = rollouts_per_s >= target * (1 - provisioner::rules::kDeadband);
    was_sufficient_ = was_sufficient_ || is_sufficient;
    if (!was_sufficient_) return;
    if (!is_sufficient && !short_since_s_) short_since_s_ = now_s;
    if (is_sufficient && short_since_s_) recoveries_s_.push_back(now_s - *std::exchange(short_since_s_, std::nullopt));
  }

  // How long `is_idle` has been true: no worker works and the learner does not train.
  double idle_seconds(bool is_idle, double now_s) {
    if (!is_idle) idle_since_s_.reset();
    if (is_idle && !idle_since_s_) idle_since_s_ = now_s;
    return now_s - idle_since_s_.value_or(now_s);
  }

  double target = 0;  // rollouts/s that the fleet core wants

 private:
  std::vector<double>& recoveries_s_;
  bool was_sufficient_ = false;
  std::optional<double> short_since_s_, idle_since_s_;
};

// The publications that their quorum, a share of their target workers, has not installed yet.
class AwaitedQuorums {
 public:
  struct Measured {
    Duration broadcast_time;
    Bytes payload;
  };
  AwaitedQuorums(const RunScenario& scenario, std::vector<SimPublication>& publications)
      : scenario_(scenario), publications_(publications) {}
  // The newest publication was sent to `targets` workers.
  void add(std::size_t targets) {
    if (targets > 0) awaited_[publications_.back().version] = {.index = publications_.size() - 1, .targets = targets};
  }
  void on_lost(const SimWorker& worker, double now_s);
  // `version_before`: the worker's version before this installation.
  void on_installed(const SimWorker& worker, std::uint64_t version_before, double now_s);
  // Broadcasts of the publications by which the fleet is planned, oldest first; each is returned once.
  std::deque<Measured> take_measured() { return std::exchange(measured_, {}); }
  void check() const;  // aborts if a quorum has more workers than targets, or is complete

 private:
  struct Quorum {
    std::size_t index = 0;                   // in publications_
    std::size_t targets = 0, installed = 0;  // workers to which it was sent; those that have installed it
  };
  std::size_t count_for(const Quorum& quorum) const {
    return chains::quorum_count(scenario_.request.quorum, quorum.targets);
  }
  // Returns whether the quorum is complete, and if so records its T_b. True also without any targets left.
  bool record_if_reached(const Quorum& quorum, double now_s);

  const RunScenario& scenario_;
  std::vector<SimPublication>& publications_;
  std::map<std::uint64_t, Quorum> awaited_;  // by version
  std::deque<Measured> measured_;            // not yet taken
};

// Draws the lengths of responses.
class ResponseLengths {
 public:
  explicit ResponseLengths(const RunScenario& scenario);
  double mean() const { return mean_; }
  Work draw_work(const replay_buffer::LiveLease& lease);

 private:
  const RunScenario& scenario_;
  Draws draws_;
  double mean_;
};

}  // namespace echoline::sim

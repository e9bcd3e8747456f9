// The rules of the job ledger as pure functions: pacing, lease length, acceptance, and the share of each worker.
#pragma once
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/ids.hpp"

namespace echoline::replay_buffer {

// --- Admission and pacing -------------------------------------------------------------------------------------

// Whether a trajectory of version v may be trained on at step t: t - v <= S; a newer version is always fresh.
bool admissible(std::uint64_t step, Version version, std::uint32_t staleness_budget);

struct Pacing {
  std::uint32_t staleness_budget = 3;        // S, learner steps
  std::uint32_t lookahead_steps = 3;         // <= S: at most this many batches beyond the current one in stock
  std::uint32_t trajectories_per_step = 64;  // R
  std::optional<std::uint64_t> steps_total = std::nullopt;  // of the run: nothing is generated that no step would use
};

// How many more trajectories of policy `version` may be asked for at learner step t, when `ahead` trajectories are
// outstanding or wait in the buffer (the batch of step t itself included until it is consumed).
//
// Derivation, for any publication period: number the trajectories in the order in which they will be consumed. The
// learner takes R per step, so the n-th one (from 0) is consumed at step floor(n/R), and it is fresh enough iff
// floor(n/R) - v <= S, that is n < (S + v + 1)*R. At step t, n = t*R + ahead for the next one granted, so
// ahead < (S + v + 1 - t)*R. Versions are counted in learner steps, so nothing depends on kappa except through v: with
// publications every kappa steps v = kappa*p for the p-th, and the bound is (S + kappa*p + 1)*R; kappa = 1 gives the
// form of formulas section 2. Writing t*R instead of a count of consumed trajectories keeps the bound right when a
// step trained on fewer. lookahead_steps L additionally keeps ahead <= (L + 1)*R, so data is fresher than S demands;
// being relative to the stock and not to v, it cannot starve a run with kappa > L.
std::uint64_t room(const Pacing& pacing, std::uint64_t step, Version version, std::uint64_t ahead);

// Whole trajectories of one version: waiting in the buffer, and still being generated under live leases.
struct VersionStock {
  Version version;
  std::uint64_t waiting = 0;
  std::uint64_t live = 0;
};

// How many trajectories of live leases cannot be used any more if the learner trains on the R oldest waiting ones at
// step t without waiting for them; `stock` ascends by version. Version v may be consumed up to step v + S, so after
// step t at most (v + S - t)*R trajectories of versions <= v can still be used; what remains beyond that is lost.
// room() keeps this at zero as long as results come in the order they were granted; a slow worker overtaken by fast
// ones is what makes it positive.
std::uint64_t stranded(const Pacing& pacing, std::uint64_t step, std::span<const VersionStock> stock);

// --- Leases ---------------------------------------------------------------------------------------------------

struct LeaseLength {
  double lease_s_min = 5;
  double lease_s_max = 600;  // also the length before any completion time is known
};

// clamp(2.5 x median completion time) (SparrowRL section 5.4); reorders `completion_s`.
double lease_seconds(const LeaseLength& length, std::span<double> completion_s);

enum class LeaseState : std::uint8_t { kLive = 0, kSettled = 1, kExpired = 2, kReleased = 3 };

struct LeaseRecord {
  LeaseId id;
  GroupId group;
  WorkerId worker;
  Version version;
  std::string policy_digest;
  std::uint32_t rollouts = 0;
  double granted_unix_s = 0;
  double expires_unix_s = 0;
  LeaseState state = LeaseState::kLive;
};

// What a result claims about itself.
struct Claim {
  WorkerId worker;
  Version version;
  std::string_view policy_digest;
};

// Why a result for this lease must be refused, absent when it is acceptable: the lease must be known, held by this
// worker, live and not past its expiry, and version and digest must be the leased ones. The texts are stable
// ("unknown lease", "lease of another worker", "lease expired", "lease released", "lease already settled",
// "wrong version", "wrong digest"); reports count by them.
std::optional<std::string_view> refusal(const std::optional<LeaseRecord>& lease, const Claim& claim, double now_unix_s);

// --- Shares of unequal workers (SparrowRL Alg. 1) ---------------------------------------------------------------

inline constexpr double kIneligibleDecay = 0.5;  // alpha
inline constexpr double kThroughputKeep = 0.8;   // beta

struct WorkerShare {
  WorkerId worker;
  double tokens_per_s = 0;   // tau, decayed by allocate() when not eligible
  bool eligible = false;     // active version v, or v-1 with v staged
  std::uint64_t groups = 0;  // out: B_a
};

// Splits `total` groups: B_a = floor(B * tau_a / sum of tau over eligible), the remainder to the fastest (ties: the
// lowest id); ineligible workers get 0 and their tau is multiplied by alpha. Sum of B_a is `total` when anyone is
// eligible, else 0. Without any throughput known the eligible share equally.
void allocate(std::uint64_t total, std::span<WorkerShare> workers);

// tau after a result of `tokens` in `elapsed_s`: beta*tau + (1-beta)*tokens/elapsed; the first measurement stands
// alone.
double updated_throughput(std::optional<double> tokens_per_s, std::uint64_t tokens, double elapsed_s);

}  // namespace echoline::replay_buffer

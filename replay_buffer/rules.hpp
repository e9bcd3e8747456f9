// The rules of the job ledger as pure functions: pacing, lease length, acceptance, work per worker, failures.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/ids.hpp"
#include "replay_buffer/settings.hpp"

namespace echoline::replay_buffer {

// --- Admission and pacing -------------------------------------------------------------------------------------

// Whether a trajectory of version v may be trained on at step t: t - v <= S; a newer version is always fresh.
bool admissible(std::uint64_t step, Version version, std::uint32_t staleness_budget);
Version oldest_admissible(std::uint64_t step, std::uint32_t staleness_budget);

// How much work is leased ahead of the learner.
struct Pacing {
  StalenessSettings staleness;               // S, and L: at most this many batches in stock beyond the current one
  std::uint32_t trajectories_per_step = 64;  // R, a multiple of G
  std::optional<std::uint64_t> steps_total = std::nullopt;  // of the run: work that no step would use is not generated
  std::uint32_t group_size = 8;                             // G
  std::uint32_t groups_per_step() const { return trajectories_per_step / group_size; }
};

// How many more trajectories of policy `version` may be requested at learner step t if `ahead` trajectories are
// outstanding or wait in the buffer (including the batch of step t until it is consumed).
//
// Derivation, for any publication period: number the trajectories in the order of consumption. The learner takes R per
// step, so the n-th one (from 0) is consumed at step floor(n/R), and is fresh enough iff floor(n/R) - v <= S, that is n
// < (S + v + 1)*R. At step t the next one granted has n = t*R + ahead, so ahead < (S + v + 1 - t)*R.
// Versions count learner steps, so kappa matters only through v: with publications every kappa steps the p-th has v =
// kappa*p, and the bound is (S + kappa*p + 1)*R; kappa = 1 gives the form of formulas section 2. t*R instead of a count
// of consumed trajectories keeps the bound right if a step trained on fewer.
// lookahead_steps L also keeps ahead <= (L + 1)*R, so data is fresher than S demands. It is relative to the stock and
// not to v, so it cannot starve a run with kappa > L.
std::uint64_t room(const Pacing& pacing, std::uint64_t step, Version version, std::uint64_t ahead);

// Which of S and L leaves less room for work of policy `version` at learner step t; S if both leave the same. Absent if
// the end of the run leaves less than either.
enum class Bound : std::uint8_t { kBudget, kLookahead };
std::optional<Bound> binding(const Pacing& pacing, std::uint64_t step, Version version);

// Counts the learner steps in which a worker got less work than it could take, by the limiting bound. A step counts
// once per bound.
class BoundSteps {
 public:
  void note(Bound bound, std::uint64_t step);
  std::uint64_t of(Bound bound) const { return counted_[static_cast<std::size_t>(bound)].steps; }

 private:
  struct Counted {
    std::uint64_t steps = 0;
    std::optional<std::uint64_t> last;
  };
  std::array<Counted, 2> counted_;
};

// Complete trajectories of one version: waiting in the buffer, and being generated under live leases.
struct VersionStock {
  Version version;
  std::uint64_t waiting = 0;
  std::uint64_t live = 0;
};

// The number of trajectories of live leases that become useless if the learner trains on the R oldest waiting ones at
// step t without waiting for them; `stock` is ascending by version. Version v may be consumed up to step v + S, so
// after step t at most (v + S - t)*R trajectories of versions <= v can be used; more than that are lost. room() keeps
// this at zero while results arrive in the order of their grants. It becomes positive when fast workers overtake a slow
// one.
std::uint64_t stranded(const Pacing& pacing, std::uint64_t step, std::span<const VersionStock> stock);

// The age in learner steps of the oldest data that pacing allows in a step: min(S, kappa - 1 + lag + L). At step t the
// newest published policy is up to kappa - 1 steps old. `lag_steps` pass until workers have installed it (T_b in steps,
// rounded up; 0 if they wait for it, because S admits nothing older), and while slow workers' results are overtaken by
// later requests. Work granted now is used at most L steps later, because at most (L + 1)*R trajectories are in stock,
// in-flight ones included. S always holds, because stranded() makes the learner wait.
std::uint32_t staleness_worst(std::uint32_t staleness_budget, std::uint32_t publish_every,
                              std::uint32_t lookahead_steps, std::uint32_t lag_steps);

// The least S with which every step finds a policy that is fresh enough: the last step before a publication trains on
// one that is kappa - 1 steps old. With S = 0 and kappa = 1 every step trains on rollouts of exactly the policy it
// updates.
std::uint32_t staleness_budget_min(std::uint32_t publish_every);

// --- Leases ---------------------------------------------------------------------------------------------------

struct LeaseLength {
  LeaseSettings limits;
  std::uint32_t tokens_max = 64;  // per response: a lease lasts as long as this worker needs for this many
  // Groups for a worker without results; absent: an eighth of a step's groups, at least one.
  std::optional<std::uint32_t> first_groups = std::nullopt;
};

// Length of a lease and of each renewal: twice the time of a response of tokens_max at this worker's measured seconds
// per token, clamped. For an unmeasured worker four times the median of the measured ones, at most first_s; first_s if
// none is measured.
double lease_seconds(const LeaseLength& length, std::optional<double> seconds_per_token,
                     std::optional<double> median_seconds_per_token = std::nullopt);

// How long after the grant a learner step waits for a result that would otherwise be stranded. It is 2.5 x the worker's
// own time from grant to result (SparrowRL section 5.4); for an unmeasured worker, 4 x the median of the measured ones,
// or first_s. It is at most the lease's maximum, and at most `fresh_s`, in which the learner does all the steps that
// may use the result: beyond that it would wait for this worker alone. A slower worker keeps its lease, but the learner
// continues.
double patience_seconds(const LeaseLength& length, std::optional<double> batch_seconds,
                        std::optional<double> median_batch_seconds = std::nullopt,
                        std::optional<double> fresh_s = std::nullopt);

// Expiry after a sign of progress at `now`; a lease lasts at most max_s in total.
double renewed(const LeaseLength& length, double granted_unix_s, double now_unix_s, double lease_s);

// Whether a worker that takes `batch_seconds` from grant to result can submit work of `version` before the last step
// that may use it, with steps of `step_seconds`.
bool in_time(const Pacing& pacing, std::uint64_t step, Version version, double batch_seconds, double step_seconds);

// Groups that one worker may hold: twice its share of the `groups` in stock, by measured groups/s, at least one. So it
// is not idle while others are served, and cannot hoard work that they could do.
std::uint64_t groups_held_max(std::uint64_t groups, double groups_per_s, double fleet_groups_per_s);

// Groups that a worker may hold by its results, whatever its speed: first_groups at first, one more for each result,
// half as many after each lapsed batch. So it can withhold at most as much as it has delivered.
std::uint64_t first_groups(const LeaseLength& length, const Pacing& pacing);
std::uint64_t groups_trusted(std::uint64_t trusted, std::uint64_t handed_in);
std::uint64_t groups_trusted_after_lapse(std::uint64_t trusted);

// The median, for an even number the upper one; absent without values. A single value, true or false, hardly affects
// it.
std::optional<double> median(std::vector<double> values);
// A measured rate limited to four times the median, so that a worker that is fast, or pretends to be, cannot take all
// work.
double rate_that_counts(double rate, std::optional<double> median_rate);

// Why a batch of leases ended without a result: it expired, or its worker was lost, which also happens to honest
// workers.
enum class LapseKind { kExpired, kLost };
// The new weight of a worker's lapses. Each submitted batch reduces it by one.
std::uint32_t lapse_weight(std::uint32_t weight, LapseKind kind);
inline constexpr std::uint32_t kLapsesMax = 20;  // five that expired in a row: such a worker returns nothing

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
  double lease_s = 0;  // extension by a sign of progress
};

// The statements of a result about itself.
struct Claim {
  WorkerId worker;
  Version version;  // oldest version that generated any token
  std::string_view policy_digest;
};

// Why a result for this lease must be refused; absent if it is acceptable. The lease must be known, held by this
// worker, live and not expired; no token may come from an older version than the leased one, whose digest it must name.
// Reports count by these stable texts: "unknown lease", "lease of another worker", "lease expired", "lease released",
// "lease already settled", "wrong version", "wrong digest".
std::optional<std::string_view> refusal(const std::optional<LeaseRecord>& lease, const Claim& claim, double now_unix_s);

// --- Failures -------------------------------------------------------------------------------------------------

inline constexpr std::uint32_t kFailuresMax = 2;  // a group that fails this often is set aside
inline constexpr std::uint32_t kLossesMax = 4;    // so is a group with which this many workers were lost

// Decides by a group's failures on workers that were not lost, and by the number of workers that were lost with it
// (each may have had another cause, so more of them are needed).
bool set_aside_after(std::uint32_t failures, std::uint32_t workers_lost);

}  // namespace echoline::replay_buffer

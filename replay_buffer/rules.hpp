// The rules of the job ledger as pure functions: pacing, lease length, acceptance, what one worker may hold, failures.
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
// The oldest version that is.
Version oldest_admissible(std::uint64_t step, std::uint32_t staleness_budget);

// How much work is handed out ahead of the learner.
struct Pacing {
  StalenessSettings staleness;               // S, and L: at most so many batches beyond the current one in stock
  std::uint32_t trajectories_per_step = 64;  // R, a multiple of G
  std::optional<std::uint64_t> steps_total = std::nullopt;  // of the run: nothing is generated that no step would use
  std::uint32_t group_size = 8;                             // G
  std::uint32_t groups_per_step() const { return trajectories_per_step / group_size; }
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

// Returns which of S and L leaves less room for work of policy `version` at learner step t; S where both leave the
// same. Absent if the end of the run leaves less than either.
enum class Bound : std::uint8_t { kBudget, kLookahead };
std::optional<Bound> binding(const Pacing& pacing, std::uint64_t step, Version version);

// Counts the learner steps in which a worker got less work than it could take, by the bound that was the reason. A step
// counts once for each bound.
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

// The oldest data that pacing lets a step train on, in learner steps: min(S, kappa - 1 + lag + L). At step t the newest
// policy out is up to kappa - 1 steps old; `lag_steps` more pass until workers have installed it (T_b in steps, rounded
// up; 0 when they wait for it, because S admits nothing older) and while results of slow workers are overtaken by those
// that were asked for later; and what is granted now is used at most L steps later, because no more than (L + 1)*R are
// in stock, work under way included. S holds whatever happens: stranded() makes the learner wait.
std::uint32_t staleness_worst(std::uint32_t staleness_budget, std::uint32_t publish_every,
                              std::uint32_t lookahead_steps, std::uint32_t lag_steps);

// The least S with which every step finds a policy that is fresh enough: the last step before a publication trains on
// one that is kappa - 1 steps old. With S = 0 and kappa = 1 every step trains on rollouts of the very policy it
// updates.
std::uint32_t staleness_budget_min(std::uint32_t publish_every);

// --- Leases ---------------------------------------------------------------------------------------------------

struct LeaseLength {
  LeaseSettings limits;
  std::uint32_t tokens_max = 64;  // of a response: a lease lasts as long as this worker needs for so many
  // Groups that a worker may hold which has not handed in anything yet; absent: an eighth of a step's, at least one.
  std::optional<std::uint32_t> first_groups = std::nullopt;
};

// Length of a lease, and of each renewal: twice what a response of tokens_max takes at this worker's own measured
// seconds per token, clamped. For a worker not measured yet four times the median of those that are, at most first_s;
// first_s when nobody is.
double lease_seconds(const LeaseLength& length, std::optional<double> seconds_per_token,
                     std::optional<double> median_seconds_per_token = std::nullopt);

// How long after the grant a learner step still waits for a result that would otherwise be stranded: 2.5 x the worker's
// own time from grant to result (SparrowRL section 5.4); for a worker not measured yet 4 x the median of
// those that are, or first_s. Never longer than the lease may last, nor than `fresh_s`, in which the learner does all
// the steps that may use the result: then it would wait for this worker alone. A worker that is slower keeps its lease,
// but the learner goes on.
double patience_seconds(const LeaseLength& length, std::optional<double> batch_seconds,
                        std::optional<double> median_batch_seconds = std::nullopt,
                        std::optional<double> fresh_s = std::nullopt);

// Expiry after a sign of progress at `now`; a lease never lasts longer than max_s in all.
double renewed(const LeaseLength& length, double granted_unix_s, double now_unix_s, double lease_s);

// Whether a worker that takes `batch_seconds` from grant to result can hand in work of `version` before the last step
// that may use it, when steps take `step_seconds`.
bool in_time(const Pacing& pacing, std::uint64_t step, Version version, double batch_seconds, double step_seconds);

// Groups that one worker may hold at once: twice its share of the `groups` that may be in stock, by measured groups/s,
// so that it is never idle while others are served and cannot hoard what they could generate. At least one.
std::uint64_t groups_held_max(std::uint64_t groups, double groups_per_s, double fleet_groups_per_s);

// Groups that a worker may hold by what it has handed in, whatever its speed: first_groups at first, one more for each
// group handed in, and half as many after each batch that lapsed. So it can hold back no more than it has given before.
std::uint64_t first_groups(const LeaseLength& length, const Pacing& pacing);
std::uint64_t groups_trusted(std::uint64_t trusted, std::uint64_t handed_in);
std::uint64_t groups_trusted_after_lapse(std::uint64_t trusted);

// Of an even number the upper one; absent without values. What one of them is, or pretends to be, hardly moves it.
std::optional<double> median(std::vector<double> values);
// A measured rate as it counts among those of others: at most four times their median, so that nobody who is fast, or
// pretends to be, leaves nothing to the rest.
double rate_that_counts(double rate, std::optional<double> median_rate);

// A batch of leases that ended without a result: nothing came of it until it expired, or its worker was lost with it,
// which happens to honest ones.
enum class LapseKind { kExpired, kLost };
// The new weight of a worker's lapses. Each batch handed in takes one off.
std::uint32_t lapse_weight(std::uint32_t weight, LapseKind kind);
inline constexpr std::uint32_t kLapsesMax = 20;  // five that expired in a row: who has so many returns nothing

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
  double lease_s = 0;  // how far a sign of progress moves the expiry
};

// What a result claims about itself.
struct Claim {
  WorkerId worker;
  Version version;  // the oldest that generated any token
  std::string_view policy_digest;
};

// Why a result for this lease must be refused, absent when it is acceptable: the lease must be known, held by this
// worker, live and not past its expiry; no token may come from an older version than the leased one, whose digest it
// names. The texts are stable
// ("unknown lease", "lease of another worker", "lease expired", "lease released", "lease already settled",
// "wrong version", "wrong digest"); reports count by them.
std::optional<std::string_view> refusal(const std::optional<LeaseRecord>& lease, const Claim& claim, double now_unix_s);

// --- Failures -------------------------------------------------------------------------------------------------

inline constexpr std::uint32_t kFailuresMax = 2;  // a group that fails so often is set aside
inline constexpr std::uint32_t kLossesMax = 4;    // as is one that so many different workers were lost with

// What a group's past says: its failures on workers that lived to tell, and the different workers that were lost while
// they had it (each may have died of something else, so it takes more of them).
bool set_aside_after(std::uint32_t failures, std::uint32_t workers_lost);

}  // namespace echoline::replay_buffer

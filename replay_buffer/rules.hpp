// The rules of the job ledger as pure functions: pacing, lease length, acceptance, work per worker, failures. A lease
// permits a worker to generate one group of G responses with a policy version. Symbols: S is the staleness budget, L
// the lookahead, R the trajectories per learner step, G the group size, kappa the steps between two publications.
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

// Whether a trajectory of `version` may be trained on at `step`: step - version <= S. A newer version is always fresh.
bool admissible(std::uint64_t step, Version version, std::uint32_t staleness_budget);
// The oldest version that may be trained on at `step`.
Version oldest_admissible(std::uint64_t step, std::uint32_t staleness_budget);

// How much work is leased ahead of the learner.
struct Pacing {
  StalenessSettings staleness;               // S, and L: at most this many batches in stock beyond the current one
  std::uint32_t trajectories_per_step = 64;  // R, a multiple of G
  // Learner steps of the run; absent: no end. Work that no step would use is not generated.
  std::optional<std::uint64_t> steps_total = std::nullopt;
  std::uint32_t group_size = 8;  // G
  std::uint32_t groups_per_step() const { return trajectories_per_step / group_size; }
};

// How many more trajectories of policy `version` may be leased at learner step t if `ahead` trajectories are being
// generated or wait in the buffer (including the batch of step t until it is consumed).
//
// Derivation, for any publication period: number the trajectories in the order of consumption. The learner takes R per
// step, so the n-th one (from 0) is consumed at step floor(n/R). It is fresh enough if floor(n/R) - v <= S, which means
// n < (S + v + 1)*R. At step t the next one granted has n = t*R + ahead, so ahead < (S + v + 1 - t)*R.
// Versions count learner steps, so kappa matters only through v. With publications every kappa steps, the p-th has
// v = kappa*p, and the bound is (S + kappa*p + 1)*R. The formula has t*R instead of a count of consumed trajectories,
// so it stays right if a step trained on fewer.
//
// The lookahead L also keeps ahead <= (L + 1)*R, so data is fresher than S demands. This bound depends on `ahead` only
// and not on v, so an old policy does not reduce it, and a run with kappa > L still gets work.
std::uint64_t room(const Pacing& pacing, std::uint64_t step, Version version, std::uint64_t ahead);

// The bound, S or L, that leaves less room for work of policy `version` at learner step t; S if both leave the same.
// Absent if the end of the run leaves less than either.
enum class Bound : std::uint8_t { kBudget, kLookahead };
std::optional<Bound> limiting_bound(const Pacing& pacing, std::uint64_t step, Version version);

// Counts the learner steps in which a worker got less work than it could take, by the limiting bound. A step counts
// once per bound.
class LimitedStepCounter {
 public:
  void record(Bound bound, std::uint64_t step);
  std::uint64_t count(Bound bound) const { return by_bound_[static_cast<std::size_t>(bound)].count; }

 private:
  struct LimitedSteps {
    std::uint64_t count = 0;
    std::optional<std::uint64_t> newest_step;
  };
  std::array<LimitedSteps, 2> by_bound_;
};

// The trajectories of one version.
struct VersionStock {
  Version version;
  std::uint64_t waiting = 0;  // complete, in the buffer
  std::uint64_t live = 0;     // being generated under live leases that a step waits for (LeaseTable::awaited())
};

// The number of live trajectories that would be too old for every later step if the learner now trained on the R oldest
// waiting ones at step t. They are stranded. `stock` is ascending by version. Version v may be consumed up to step v +
// S. So steps after t can use at most (v + S - t)*R trajectories of versions <= v, and the excess is stranded. room()
// keeps the number at zero while results arrive in the order of their grants. It becomes positive when fast workers
// overtake a slow one.
std::uint64_t stranded(const Pacing& pacing, std::uint64_t step, std::span<const VersionStock> stock);

// The age in learner steps of the oldest data that pacing allows in a step: min(S, kappa - 1 + lag_steps + L).
// - kappa - 1: the age of the newest published policy.
// - lag_steps: the broadcast time in steps, rounded up, and the delay of slow workers' results. If S admits only the
//   newest policy, workers wait for it, and the broadcast time counts as 0.
// - L: the steps that a result waits, because at most (L + 1)*R trajectories are in stock or in flight.
// - S: always holds, because the learner waits while stranded() is above zero.
std::uint32_t staleness_worst(std::uint32_t staleness_budget, std::uint32_t publish_every,
                              std::uint32_t lookahead_steps, std::uint32_t lag_steps);

// The least S with which every step finds a policy that is fresh enough. It is kappa - 1, because the last step before
// a publication trains on a policy of that age. With S = 0 and kappa = 1 every step trains on rollouts of exactly the
// policy it updates.
std::uint32_t staleness_budget_min(std::uint32_t publish_every);

// --- Leases ---------------------------------------------------------------------------------------------------

// Parameters of a lease's length, and of a worker's first share of work.
struct LeaseLength {
  LeaseSettings limits;
  std::uint32_t tokens_max = 64;  // the longest response; lease_seconds() allows twice its time
  // Groups for a worker without results; absent: an eighth of a step's groups, at least one.
  std::optional<std::uint32_t> initial_groups = std::nullopt;
};

// Length of a lease and of each renewal. For a measured worker, twice the time of a response of tokens_max at its
// seconds per token, between `limits.min` and `limits.max`. For an unmeasured worker, four times as long at the median
// of the measured ones, at most `limits.first`. `limits.first` if no worker is measured.
double lease_seconds(const LeaseLength& length, std::optional<double> seconds_per_token,
                     std::optional<double> median_seconds_per_token = std::nullopt);

// How long after the grant a learner step waits for a result that would otherwise be stranded. It is 2.5 x the worker's
// own time from grant to result (SparrowRL section 5.4). For an unmeasured worker, it is 4 x the median of the measured
// ones, or `limits.first`. It is at most the lease's maximum, and at most `usable_s`, the duration of all steps that
// may use the result, because a longer wait could not help. A slower worker keeps its lease, but the learner continues.
double patience_seconds(const LeaseLength& length, std::optional<double> batch_seconds,
                        std::optional<double> median_batch_seconds = std::nullopt,
                        std::optional<double> usable_s = std::nullopt);

// The lease's expiry after a sign of progress at `now_unix_s`; a lease lasts at most `limits.max` in total.
double renewed_expiry(const LeaseLength& length, double granted_unix_s, double now_unix_s, double lease_s);

// Whether a worker that takes `batch_seconds` from grant to result can submit work of `version` in time for the last
// step that may use it, if a step takes `step_seconds`.
bool can_finish_in_time(const Pacing& pacing, std::uint64_t step, Version version, double batch_seconds,
                        double step_seconds);

// Groups that one worker may hold: twice its share of `stock_groups` by measured groups/s, at least one. So the worker
// is not idle while the learner serves others, and cannot hoard work that other workers could do.
std::uint64_t groups_held_max(std::uint64_t stock_groups, double groups_per_s, double fleet_groups_per_s);

// The number of groups that a worker may hold, whatever its speed. It starts at `initial_groups`, grows by one with
// each result, and is halved by each lapsed batch. So a worker can withhold at most as much as it has delivered.
std::uint64_t initial_group_allowance(const LeaseLength& length, const Pacing& pacing);
std::uint64_t group_allowance_after_results(std::uint64_t allowance, std::uint64_t results);
std::uint64_t group_allowance_after_lapse(std::uint64_t allowance);

// The median; for an even number of values the upper one; absent without values. Used because one worker's value,
// honest or not, hardly affects it.
std::optional<double> median(std::vector<double> values);
// A worker's rate, limited to four times the median. The limit keeps one worker, fast or dishonest, from all the work.
double capped_rate(double rate, std::optional<double> median_rate);

// Seconds that count as a worker's work: those that it reports, but at least half of those in which it held leases, so
// that a false report gains at most a factor of two.
double counted_work_seconds(double reported_s, double leased_s);

// Why a batch of leases lapsed: leases expired, or the worker was lost, which also happens to honest workers.
enum class LapseKind { kExpired, kLost };
// The weight of a worker's lapses after one more: an expired batch adds 4, so that one batch in five may expire (each
// batch with a result takes 1); a lost one adds 2.
std::uint32_t weight_after_lapse(std::uint32_t weight, LapseKind kind);
// From this weight on a worker counts as unproductive (LeaseCore::newly_unproductive): five batches expired in a row.
inline constexpr std::uint32_t kLapseWeightMax = 20;

// kSettled: the result was stored. kReleased: the lease ended otherwise before its time. The numbers are in the file.
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
  double lease_s = 0;  // length of the lease and of each renewal, in seconds
};

// The origin that a submitted result states. refusal() checks it against the lease.
struct Claim {
  WorkerId worker;
  Version version;  // oldest version that generated any token
  std::string_view policy_digest;
};

// Why a result for this lease must be refused; absent if it is acceptable. The lease must be known, held by this
// worker, live and not expired. The result must name the digest of the leased version, and no token may come from an
// older version.
// Reports count by these stable texts: "unknown lease", "lease of another worker", "lease expired", "lease released",
// "lease already settled", "wrong version", "wrong digest".
std::optional<std::string_view> refusal(const std::optional<LeaseRecord>& lease, const Claim& claim, double now_unix_s);

// --- Failures -------------------------------------------------------------------------------------------------

inline constexpr std::uint32_t kFailuresMax = 2;  // failures that workers reported for a group
inline constexpr std::uint32_t kLossesMax = 4;    // workers that were lost while they held it

// Whether a group must be set aside, that is, not be leased again, because one of the two limits is reached. kLossesMax
// is higher, because the loss of a worker may have another cause.
bool must_set_aside(std::uint32_t failures, std::uint32_t workers_lost);

}  // namespace echoline::replay_buffer

// The durable replay buffer: every acknowledged trajectory is on disk, whole fresh groups are sampled oldest first,
// and each group is consumed once. FORMAT.md describes the file.
#pragma once
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/ids.hpp"
#include "base/result.hpp"
#include "base/units.hpp"
#include "data_plane/trajectory.hpp"

namespace echoline::replay_buffer {

using data_plane::Trajectory;

class Store;  // the SQLite file, shared with JobLedger; hidden

struct BufferOptions {
  std::uint32_t group_size = 8;        // G: a group is whole when it has members 0 .. G-1
  std::uint32_t staleness_budget = 3;  // S, learner steps
  std::uint64_t rows_max = 4'000'000;  // trajectories in the file, consumed ones included until prune()
  Bytes bytes_max{64ull << 30};        // their serialised size together
  data_plane::TrajectoryLimits limits;
};

struct AddOutcome {
  std::uint64_t stored = 0;
  std::uint64_t duplicates = 0;  // ids that were there already: acknowledged, not stored again
};

struct Group {
  GroupId id;
  Version version;                       // oldest version in any token of any member
  std::vector<Trajectory> trajectories;  // ordered by member
};

struct Batch {
  std::uint64_t step = 0;
  std::vector<Group> groups;  // oldest version first, then by group id
  std::vector<GroupId> ids() const;
};

struct Counts {
  std::uint64_t stored = 0;             // trajectories in the file
  std::uint64_t admissible_groups = 0;  // whole, unconsumed, fresh enough at the step asked about
  std::uint64_t admissible_trajectories = 0;
  std::uint64_t incomplete_groups = 0;            // waiting for members
  std::uint64_t unscored_groups = 0;              // whole, waiting for the learner's scores
  std::uint64_t consumed = 0;                     // trajectories ever consumed (and not given back by rewind)
  std::map<std::string, std::uint64_t> rejected;  // trajectories by reason; "stale" is what drop_stale() counted
};

// Learner steps: step t is the t-th update counted from 0, so a policy of version v has seen steps 0 .. v-1, and a
// trajectory of version v trained on at step t is t - v steps stale. A version newer than t, left from a run that was
// rolled back to an older checkpoint, counts as staleness 0: the importance weights use the stored behaviour
// log-probabilities, so they are right whatever policy generated the tokens; only the distance between the policies
// matters, and that is at most the steps rolled back.
//
// Durability: WAL with synchronous=FULL; once a call has returned, its effect survives kill -9 and power loss.
// Thread: one owner thread, the first that calls after open(); another thread's call ends the process.
class ReplayBuffer {
 public:
  // Opens or creates the file. kCorrupt when it is not a sound SQLite file, kInvalid when it was written by another
  // schema version or for another group size; both say what to do.
  static Result<std::unique_ptr<ReplayBuffer>> open(const std::filesystem::path& path, const BufferOptions& options);
  ~ReplayBuffer();

  // Stores all in one transaction (group commit), or none on an error: kInvalid for a trajectory that fails the
  // check or takes a member's place under another id, kExhausted at rows_max or bytes_max.
  Result<AddOutcome> add(std::span<const Trajectory> trajectories);

  // `groups` whole admissible groups for step t; nothing when there are fewer. Marks nothing, but a group that does not
  // read back is discarded ("unreadable") and another one taken.
  Result<std::optional<Batch>> sample(std::uint64_t step, std::uint32_t groups);

  // Marks the groups consumed at step t in one transaction. kInvalid when one is unknown, incomplete or was
  // consumed at another step; a repeat for the same step is fine.
  Status consume(std::uint64_t step, std::span<const GroupId> groups);

  // After a resume whose next step is `step`: what was consumed or dropped at steps >= `step` is available again.
  // A checkpoint taken after consume(4) resumes with rewind(5).
  Status rewind(std::uint64_t step);

  // Marks unconsumed groups too stale for step t as rejected ("stale"); returns their trajectories.
  Result<std::uint64_t> drop_stale(std::uint64_t step);

  // A stored group that cannot be trained on: its trajectories are deleted and counted as rejected for `reason`; the
  // group goes to the pool, because the problem may be sound.
  Status discard(GroupId group, std::string_view reason);

  // Groups that wait for the learner's scores, oldest version first, but for those in `known`; at most `most`.
  Result<std::vector<Group>> unscored(std::size_t most, const std::set<GroupId>& known = {});
  // Whether these very trajectories still do.
  Result<bool> awaits_scores(const Group& group);
  // Their scores are there: the bodies are replaced in one transaction, and the group may be sampled. False where they
  // are not waited for any more.
  Result<bool> scored(const Group& group);

  // Likewise all that this worker has handed in and that waits, but for `kept`; how many groups.
  Result<std::uint64_t> discard_of(WorkerId worker, std::string_view reason, std::span<const GroupId> kept = {});

  Result<Counts> counts(std::uint64_t step);

  // Deletes what was consumed or dropped at steps before `before_step`, with its settled leases, and returns the
  // deleted trajectories. Checkpoints older than `before_step` can no longer be resumed with the same data.
  Result<std::uint64_t> prune(std::uint64_t before_step);

  const BufferOptions& options() const;
  // For JobLedger.
  Store& store() { return *store_; }

 private:
  Result<std::optional<GroupId>> read_groups(Batch& batch);
  explicit ReplayBuffer(std::unique_ptr<Store> store);
  std::unique_ptr<Store> store_;
};

}  // namespace echoline::replay_buffer

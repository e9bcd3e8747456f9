// The durable replay buffer. A group is the G responses of one problem. Every acknowledged trajectory is on disk.
// Complete groups that are fresh enough are sampled oldest first. Each group is consumed once, which means trained on.
// FORMAT.md describes the file.
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

class Store;  // the SQLite file, shared with JobLedger

struct BufferOptions {
  std::uint32_t group_size = 8;        // G: a group is complete with members 0 .. G-1
  std::uint32_t staleness_budget = 3;  // S, learner steps
  std::uint64_t rows_max = 4'000'000;  // trajectories in the file, including consumed ones until prune()
  Bytes bytes_max{64ull << 30};        // serialised size of all trajectories
  data_plane::TrajectoryLimits limits;
};

struct AddOutcome {
  std::uint64_t stored = 0;
  std::uint64_t duplicates = 0;  // ids that existed already: acknowledged, not stored again
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
  std::uint64_t admissible_groups = 0;  // complete, unconsumed, fresh enough at the given step
  std::uint64_t admissible_trajectories = 0;
  std::uint64_t incomplete_groups = 0;  // waiting for members
  std::uint64_t unscored_groups = 0;    // complete, waiting for scores, which the learner computes for some tasks
  std::uint64_t consumed = 0;           // trajectories ever consumed, without those that rewind() made available again
  std::map<std::string, std::uint64_t> rejected;  // trajectories by reason; drop_stale() counts as "stale"
};

// Learner steps: step t is the t-th update, counted from 0. A policy of version v has seen steps 0 .. v-1, and a
// trajectory of version v used in step t is t - v steps stale.
// After a rollback to an older checkpoint, the file may have versions newer than t. They count as staleness 0. That is
// safe, because the importance weights use the stored log-probabilities of the generating policy and are correct for
// any policy. Besides, the policies differ by at most the steps rolled back.
//
// Durability: WAL with synchronous=FULL. The effect of a call that has returned survives kill -9 and power loss.
// Thread: the first thread that calls after open() owns the buffer; a call from another thread ends the process.
class ReplayBuffer {
 public:
  // Opens or creates the file. kCorrupt if it is not a valid SQLite file, kInvalid if it has another schema version or
  // group size. Both say what to do.
  static Result<std::unique_ptr<ReplayBuffer>> open(const std::filesystem::path& path, const BufferOptions& options);
  ~ReplayBuffer();

  // Stores all trajectories in one transaction, or none on an error. kInvalid if a trajectory fails
  // data_plane::check(), or if the file has another trajectory for the same group and member. kExhausted at rows_max or
  // bytes_max.
  Result<AddOutcome> add(std::span<const Trajectory> trajectories);

  // Returns `group_count` complete admissible groups for step t, or nothing if there are fewer. Does not mark them:
  // call consume() after training. Discards groups that cannot be read ("unreadable") and takes other groups instead.
  Result<std::optional<Batch>> sample(std::uint64_t step, std::uint32_t group_count);

  // Marks the groups as consumed at step t in one transaction. kInvalid if one is unknown, incomplete or was consumed
  // at another step; repeating the call for the same step is allowed.
  Status consume(std::uint64_t step, std::span<const GroupId> groups);

  // Call after a resume whose next step is `step`. Groups consumed or dropped at steps >= `step` become available
  // again. After a checkpoint that follows consume(4), resume with rewind(5).
  Status rewind(std::uint64_t step);

  // Marks unconsumed groups too stale for step t as rejected ("stale"). Returns the number of their trajectories.
  Result<std::uint64_t> drop_stale(std::uint64_t step);

  // Discards a stored group that cannot be trained on: deletes its trajectories and counts them as rejected for
  // `reason`. The group returns to the ledger's pool of groups to generate again, because the problem may be valid.
  Status discard(GroupId group, std::string_view reason);

  // Groups waiting for the learner's scores, oldest version first, without those in `known`; at most `groups_max`.
  Result<std::vector<Group>> unscored_groups(std::size_t groups_max, const std::set<GroupId>& known = {});
  // Whether the group still waits for scores, with exactly these trajectories.
  Result<bool> awaits_scores(const Group& group);
  // Replaces the stored bodies by scored ones in one transaction, after which the group may be sampled. False if the
  // group no longer waits for scores.
  Result<bool> store_scores(const Group& group);

  // Discards all waiting groups that this worker generated, except `kept`. Returns the number of discarded groups.
  Result<std::uint64_t> discard_groups_of(WorkerId worker, std::string_view reason, std::span<const GroupId> kept = {});

  Result<Counts> counts(std::uint64_t step);

  // Deletes data consumed or dropped at steps before `before_step`, with its settled leases. Returns the number of
  // deleted trajectories. Checkpoints older than `before_step` can no longer be resumed with the same data.
  Result<std::uint64_t> prune(std::uint64_t before_step);

  const BufferOptions& options() const;
  // For JobLedger.
  Store& store() { return *store_; }

 private:
  Result<std::optional<GroupId>> read_groups_until_unreadable(Batch& batch);
  explicit ReplayBuffer(std::unique_ptr<Store> store);
  std::unique_ptr<Store> store_;
};

}  // namespace echoline::replay_buffer

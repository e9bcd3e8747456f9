// Groups in the making: from a lease to sequences for an engine, from what came of them to the task and back to the
// engine turn by turn, and to a scored submission. No network and no engine.
#pragma once
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <variant>
#include <vector>

#include "base/ids.hpp"
#include "base/result.hpp"
#include "data_plane/adapters/adapter.hpp"
#include "data_plane/schema.pb.h"
#include "model/config.hpp"
#include "model/phrasing.hpp"
#include "worker/engine.hpp"

namespace echoline::worker {

// What the run told this worker, made usable.
struct Task {
  schema::RunSpec spec;
  std::unique_ptr<data_plane::Adapter> adapter;  // null: the learner scores everything
  std::optional<model::Phrasing> phrasing;
  model::ModelConfig model;
};

Result<Task> make_task(schema::RunSpec spec);

// What the learner is to be told of a lease.
using Settled = std::variant<schema::Submission, schema::WorkFailed>;

// The submission, or WORK_FAILURE_SIZE with the reason that the learner's door would give: a trajectory has more
// metadata than the run allows (rollout.metadata_max).
Settled within_limits(const schema::Lease& lease, schema::Submission submission, Bytes metadata_max);

// A group fails as a whole and alone: with the first of its sequences that does, or where its task does. What a task is
// asked is answered on any thread; everything else is one thread's.
class Groups {
 public:
  // `wake` is called on a task's thread when advance() has something to do; it may be empty. The task must outlive the
  // groups.
  Groups(const Task& task, WorkerId worker, std::function<void()> wake = {});

  // The sequences of a group, in order, or why there are none.
  std::variant<std::vector<Sequence>, schema::WorkFailed> begin(schema::Lease lease, TimePoint now);
  // A turn has been drawn, and goes to its task. A sequence that is not known is one that was abandoned.
  void take(Outcome outcome);

  struct Ended {
    TimePoint begun;
    Settled what;
    std::vector<std::uint64_t> abandoned;  // sequences that are still inside the engine
  };
  struct Advance {
    std::vector<Sequence> next;  // turns that follow
    std::vector<Ended> ended;
  };
  // What has come of take() and of tasks since.
  Advance advance();

  std::vector<std::uint64_t> leases() const;
  std::size_t rollouts() const;  // of all groups, however many of them are finished
  std::size_t at_task() const;   // those whose task is thinking
  bool empty() const { return groups_.empty(); }
  // All groups are forgotten; their sequences inside the engine are returned.
  std::vector<std::uint64_t> drop();

 private:
  struct Member {
    std::unique_ptr<data_plane::Episode> episode;
    std::vector<model::Token> tokens;  // of turns and observations
    std::vector<float> logprobs;
    std::vector<bool> drawn;  // by the policy
    std::vector<Span> spans;
    std::vector<model::Token>
        aside;  // what is asked in between, of the policy in somebody else's place; empty: nothing
    std::size_t turns = 0, asides = 0;
    data_plane::Score score;
    bool ended = false;  // its last turn, by itself
  };
  struct Group {
    schema::Lease lease;
    std::vector<model::Token> prompt;
    TimePoint begun;
    std::vector<Member> members;
    std::size_t missing = 0;
  };
  struct Place {
    std::uint64_t lease = 0;
    std::size_t member = 0;
    bool at_task = false;  // not inside the engine
  };
  // Where tasks leave their answers; outlives the groups, in case a task does.
  struct Answers {
    std::mutex mutex;
    std::vector<std::pair<std::uint64_t, Result<data_plane::Step>>> given;  // by sequence; at most one each
    std::function<void()> wake;
  };

  Sequence next_turn(std::uint64_t lease, std::size_t member);
  std::int64_t room(const Member& member) const;
  static void note(Member& member, const Response& turn);
  // Goes on with a member; false when it has ended.
  Result<bool> go_on(Member& member, data_plane::Step step) const;
  void end(std::uint64_t lease, std::optional<schema::WorkFailed> failed);
  schema::Submission submission(const Group& group) const;
  std::vector<std::uint64_t> forget(std::uint64_t lease);

  const Task& task_;
  WorkerId worker_;
  std::map<std::uint64_t, Group> groups_;     // by lease
  std::map<std::uint64_t, Place> sequences_;  // inside the engine or at their task, by id
  std::uint64_t next_ = 0;
  std::vector<Ended> ended_;
  std::shared_ptr<Answers> answers_;
};

}  // namespace echoline::worker

// Groups in progress: a lease becomes sequences for an engine. Turn by turn, their outcomes go to the task, and the
// task's answers back to the engine, until the group's submission is scored. No network and no engine.
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

// The run's description in usable form.
struct Task {
  schema::RunSpec spec;
  std::unique_ptr<data_plane::Adapter> adapter;  // null: the learner scores everything
  std::optional<model::Phrasing> phrasing;
  model::ModelConfig model;
};

Result<Task> make_task(schema::RunSpec spec);

// The message to the learner that ends a lease.
using LeaseResult = std::variant<schema::Submission, schema::WorkFailed>;

// Returns the submission if its size is within the run's limits. Otherwise WORK_FAILURE_SIZE with the reason that the
// learner would give: a trajectory has more metadata than rollout.metadata_max.
LeaseResult within_limits(const schema::Lease& lease, schema::Submission submission, Bytes metadata_max);

// A group fails as a whole if one of its sequences or its task fails; other groups are not affected. Tasks answer on
// any thread; all other calls are on one thread.
class Groups {
 public:
  // `wake` is called on a task's thread when advance() has work to do; it may be empty. The task must outlive the
  // groups.
  Groups(const Task& task, WorkerId worker, std::function<void()> wake = {});

  // Returns the first sequences of the group, one per member in order, or why there are none.
  std::variant<std::vector<Sequence>, schema::WorkFailed> begin(schema::Lease lease, TimePoint now);
  // Passes a turn that the engine generated to its task. Ignores unknown sequences, which were abandoned before.
  void take(Outcome outcome);

  struct Ended {
    TimePoint begun;
    LeaseResult what;
    std::vector<std::uint64_t> abandoned;  // sequences that are still inside the engine
  };
  struct Advance {
    std::vector<Sequence> next;  // the next turns
    std::vector<Ended> ended;
  };
  // Returns the effects of take() and of the tasks' answers since the last call.
  Advance advance();

  std::vector<std::uint64_t> leases() const;
  std::size_t rollouts() const;  // of all groups, finished ones included
  std::size_t at_task() const;   // rollouts that wait for their task's answer
  bool empty() const { return groups_.empty(); }
  // Drops all groups and returns their sequences inside the engine.
  std::vector<std::uint64_t> drop();

 private:
  struct Member {
    std::unique_ptr<data_plane::Episode> episode;
    std::vector<model::Token> tokens;  // of turns and observations
    std::vector<float> logprobs;
    std::vector<bool> sampled;  // by token: the policy sampled it
    std::vector<Span> spans;
    // The prompt of a question beside the conversation, which the policy answers in another role; empty: none.
    std::vector<model::Token> side_prompt;
    std::size_t turns = 0, side_prompts = 0;
    data_plane::Score score;
    bool ended = false;  // its last turn ended by itself
  };
  struct Group {
    schema::Lease lease;
    std::vector<model::Token> prompt;
    TimePoint begun;
    std::vector<Member> members;
    std::size_t members_unfinished = 0;
  };
  struct Place {
    std::uint64_t lease = 0;
    std::size_t member = 0;
    bool at_task = false;  // not inside the engine
  };
  // Answers of tasks. It outlives the groups, because a task may.
  struct Answers {
    std::mutex mutex;
    std::vector<std::pair<std::uint64_t, Result<data_plane::Step>>> steps;  // by sequence; at most one each
    std::function<void()> wake;
  };

  Sequence next_turn(std::uint64_t lease, std::size_t member);
  std::int64_t tokens_left(const Member& member) const;  // until the limit of a response
  static void append_turn(Member& member, const Response& turn);
  // Continues a member with its task's answer. False if the member has ended.
  Result<bool> continue_member(Member& member, data_plane::Step step) const;
  void end_group(std::uint64_t lease, std::optional<schema::WorkFailed> failed);
  schema::Submission submission(const Group& group) const;
  std::vector<std::uint64_t> remove_group(std::uint64_t lease);

  const Task& task_;
  WorkerId worker_;
  std::map<std::uint64_t, Group> groups_;     // by lease
  std::map<std::uint64_t, Place> sequences_;  // inside the engine or at their task, by id
  std::uint64_t next_ = 0;
  std::vector<Ended> ended_;
  std::shared_ptr<Answers> answers_;
};

}  // namespace echoline::worker

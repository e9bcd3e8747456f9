// Groups in progress. A lease is the learner's order for a group: several rollouts (members) of one problem. Each
// member becomes sequences for an engine. A turn is the text that the policy generates for one sequence. Each turn goes
// to the environment (the task's adapter), whose answer, an observation, is appended before the next turn. This repeats
// until all members are scored. The class calls neither the network nor the engine: the agent passes the messages.
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

// The run's specification, with the objects parsed from it.
struct Task {
  schema::RunSpec spec;
  std::unique_ptr<data_plane::Adapter> adapter;  // null: the learner scores everything
  // Forms prompts and finds the ends of responses. Absent only until make_task() has set it.
  std::optional<model::Phrasing> phrasing;
  model::ModelConfig model;
};

Result<Task> make_task(schema::RunSpec spec);

// The message to the learner that ends a lease.
using LeaseResult = std::variant<schema::Submission, schema::WorkFailed>;

// Returns the submission if the metadata of each rollout in it has at most `metadata_max` bytes, which is the run's
// setting rollout.metadata_max. Otherwise returns WORK_FAILURE_SIZE and the reason for which the learner would refuse
// the submission.
LeaseResult submission_or_failure(const schema::Lease& lease, schema::Submission submission, Bytes metadata_max);

// A group fails as a whole if one of its sequences or its environment fails. Other groups are not affected. The
// environment may answer on any thread; all other calls are on one thread.
class Groups {
 public:
  // `wake` is called on the environment's thread when advance() has work to do; it may be empty. The task must outlive
  // the groups.
  Groups(const Task& task, WorkerId worker, std::function<void()> wake = {});

  // Begins the group of a lease. Returns its first sequences, one per member in order, or why there are none.
  std::variant<std::vector<Sequence>, schema::WorkFailed> begin(schema::Lease lease, TimePoint now);
  // Passes a turn that the engine generated to the environment. Ignores sequences that were abandoned before.
  void on_outcome(Outcome outcome);

  struct Ended {
    TimePoint begun;
    LeaseResult result;
    std::vector<std::uint64_t> abandoned;  // ids of sequences that the engine must abort
  };
  struct Advance {
    std::vector<Sequence> next;  // sequences whose next turn the engine must generate
    std::vector<Ended> ended;
  };
  // Returns the sequences to generate and the ended groups that follow from on_outcome() and from the environment's
  // answers since the last call.
  Advance advance();

  std::vector<std::uint64_t> lease_ids() const;
  std::size_t rollouts() const;                 // of all groups; includes finished rollouts
  std::size_t rollouts_in_environment() const;  // rollouts that wait for the environment's answer
  bool empty() const { return groups_.empty(); }
  // Drops all groups. Returns the ids of the sequences that the engine must abort.
  std::vector<std::uint64_t> drop_all();

 private:
  struct Member {
    std::unique_ptr<data_plane::Episode> episode;
    std::vector<model::Token> tokens;  // of turns and observations, without the group's prompt
    std::vector<float> logprobs;
    std::vector<bool> sampled;          // by token: true if the policy sampled it; false: part of an observation
    std::vector<Span> spans;            // by version; they cover all tokens
    data_plane::RoutedExperts experts;  // of the first tokens of prompt + `tokens`; may lack later ones
    // If the environment is a game of several players: a prompt for another player (data_plane::Step::side_prompt),
    // which the policy answers in place of that player. Empty: the next turn continues the conversation.
    std::vector<model::Token> side_prompt;
    std::size_t turns = 0, side_prompts = 0;  // numbers so far
    data_plane::Score score;
    bool ended_by_itself = false;  // the last turn ended by an ending token or stop string, not at a limit
  };
  struct Group {
    schema::Lease lease;
    std::vector<model::Token> prompt;
    TimePoint begun;
    std::vector<Member> members;
    std::size_t members_unfinished = 0;
  };
  struct SequenceState {
    std::uint64_t lease_id = 0;
    std::size_t member_number = 0;  // index in Group::members
    bool in_environment = false;    // the environment has the turn; false: the engine has it
  };
  // Answers of the environment. They are shared with it, because it may answer after the groups are destroyed.
  struct Answers {
    std::mutex mutex;
    std::vector<std::pair<std::uint64_t, Result<data_plane::Step>>> steps;  // by sequence; at most one each
    std::function<void()> wake;                                             // may be empty
  };

  Sequence next_turn(std::uint64_t lease_id, std::size_t member_number);
  std::int64_t tokens_left(const Member& member) const;  // until response_tokens_max
  static void append_turn(Member& member, const Response& turn);
  // Packs the experts for Trajectory.routed_experts; empty if there are none, or if they exceed `bytes_max`.
  static std::string packed_experts(const Group& group, const Member& member, std::size_t bytes_max);
  // Continues a member with the environment's answer. Returns false if the member has ended.
  Result<bool> continue_member(Member& member, data_plane::Step step) const;
  // Ends the group with `failed` or, if that is absent, with its submission: all members are scored.
  void end_group(std::uint64_t lease_id, std::optional<schema::WorkFailed> failed);
  schema::Submission submission(const Group& group) const;
  // Returns the ids of the group's sequences that the engine must abort.
  std::vector<std::uint64_t> remove_group(std::uint64_t lease_id);

  const Task& task_;
  WorkerId worker_;
  std::map<std::uint64_t, Group> groups_;             // by id of the lease
  std::map<std::uint64_t, SequenceState> sequences_;  // in the engine or the environment, by id
  std::uint64_t next_sequence_id_ = 0;
  std::vector<Ended> ended_groups_;
  std::shared_ptr<Answers> answers_;
};

}  // namespace echoline::worker

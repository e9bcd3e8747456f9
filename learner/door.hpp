// The door of the replay buffer: what a worker hands in is looked at here before anything is stored or trained on.
#pragma once
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.hpp"
#include "base/ids.hpp"
#include "base/result.hpp"
#include "base/token_bucket.hpp"
#include "data_plane/adapters/adapter.hpp"
#include "data_plane/trajectory.hpp"
#include "learner/second_look.hpp"
#include "model/phrasing.hpp"
#include "replay_buffer/job_ledger.hpp"

namespace echoline::learner {

struct DoorOptions {
  std::int64_t vocab_size = 0;
  std::int64_t positions_max = 0;
  std::int64_t response_tokens_max = 0;
  std::int64_t turn_tokens_max = 0;                      // of one turn; 0: what response_tokens_max leaves
  std::uint64_t seed = 0;                                // the run's
  Bytes metadata_max = data_plane::kMetadataMax;         // of a trajectory
  std::function<bool(const schema::Problem&)> unscored;  // whether workers hand in text without a score; empty: never
  // What training refuses is refused here, so that it cannot end the run there.
  std::function<Status(const schema::Trajectory&)> trainable;
};

// The longest message that a worker of such a run has a reason to send.
Bytes worker_message_max(std::int64_t positions_max, std::int64_t response_tokens_max, std::uint32_t group_size,
                         Bytes metadata_max);

// A group as workers are asked for it.
struct Question {
  schema::Problem problem;
  std::vector<model::Token> prompt;  // the problem's prompt in the learner's own tokens
};

// One thread, the desk's. Looking at a trajectory of three tokens takes 0.5 µs, at one of 1000 tokens 15 µs: decoding
// is most of it, and linear.
class Door {
 public:
  // The adapter must outlive the door.
  Door(DoorOptions options, const data_plane::Adapter& adapter, model::Phrasing phrasing);

  // kInvalid when no worker could generate it: its prompt has no tokens, or leaves no room for a response.
  Result<const Question*> question(GroupId group);
  Result<schema::Problem> problem(GroupId group) const { return look_->adapter().problem(group.value); }
  // Called when the group is settled.
  void forget(GroupId group) { questions_.erase(group); }

  Bytes message_max(std::uint32_t group_size) const {
    return worker_message_max(options_.positions_max, options_.response_tokens_max, group_size, options_.metadata_max);
  }

  // Whether the learner alone scores what comes of this problem, and what workers may see of it.
  bool unscored(const schema::Problem& problem) const { return options_.unscored && options_.unscored(problem); }
  schema::Problem shown(const schema::Problem& problem) const;

  std::optional<Refusal> refusal(const schema::Submission& submission);

  // What the learner scores with, for others to use as well.
  std::shared_ptr<const SecondLook> second_look() const { return look_; }

  // Why stored trajectories cannot be trained on.
  Status trainable(std::span<const schema::Trajectory> group) const;

 private:
  std::optional<Refusal> refusal(const schema::Trajectory& trajectory, const Question& question) const;
  std::optional<Refusal> wrong_end(const schema::Trajectory& trajectory,
                                   std::span<const std::span<const model::Token>> turns) const;

  DoorOptions options_;
  std::shared_ptr<const SecondLook> look_;
  std::map<GroupId, std::unique_ptr<Question>> questions_;  // those asked and not settled, within a limit
};

// What the desk thinks of its workers, by identity: neither a new connection nor a new learner wipes it. A broken
// driver is no attack: a worker is told to go only after several bad messages, or when group after group fails on it
// while others get on.
class Conduct {
 public:
  // What was kept of an earlier process.
  void restore(WorkerId worker, const replay_buffer::Misconduct& kept);
  replay_buffer::Misconduct of(WorkerId worker) const;
  // Bad form; true when it was once too often.
  bool malformed(WorkerId worker);
  // A group failed on it; true when the worker is to blame.
  bool failed(WorkerId worker);
  // What it handed in was taken in; `sound`: and is good for something, as it stands.
  void accepted(WorkerId worker, bool sound = true);
  void scored() { failed_in_a_row_ = 0; }

  // A message that brought no trajectories: a request, a sign of progress, a result that was there already. True when
  // it was one of too many.
  bool talked(WorkerId worker, TimePoint now);

  // A group was set aside, before anybody was asked for it or after it had failed; true when so many were in a row that
  // it cannot be the groups.
  bool set_aside(bool unasked);
  // A group was not set aside before anybody was asked for it.
  void asked() { unasked_in_a_row_ = 0; }

 private:
  struct Record {
    std::uint32_t malformed = 0;
    std::uint32_t good_since = 0;          // submissions accepted since the last bad one, or since one was forgiven
    std::uint32_t failures = 0;            // groups in a row
    std::uint64_t successes_at_first = 0;  // of everybody, when the row began
  };
  std::map<WorkerId, Record> records_;
  std::map<WorkerId, TokenBucket> talk_;
  std::uint64_t successes_ = 0;
  std::uint32_t unasked_in_a_row_ = 0, failed_in_a_row_ = 0;  // groups set aside
};

}  // namespace echoline::learner

// The entrance to the replay buffer: checks every submission of a worker before it is stored or used for training.
#pragma once
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/ids.hpp"
#include "base/result.hpp"
#include "data_plane/adapters/adapter.hpp"
#include "data_plane/trajectory.hpp"
#include "learner/second_look.hpp"
#include "model/phrasing.hpp"

namespace echoline::learner {

struct DoorOptions {
  std::int64_t vocab_size = 0;
  std::int64_t positions_max = 0;
  std::int64_t response_tokens_max = 0;
  std::int64_t turn_tokens_max = 0;                      // of one turn; 0: the rest of response_tokens_max
  std::uint64_t seed = 0;                                // the run's
  Bytes metadata_max = data_plane::kMetadataMax;         // of a trajectory
  std::function<bool(const schema::Problem&)> unscored;  // whether workers submit text without a score; empty: never
  // Trajectories that training would refuse are refused here, so that they cannot end the run later.
  std::function<Status(const schema::Trajectory&)> trainable;
};

// The longest message that a worker of such a run needs to send.
Bytes worker_message_max(std::int64_t positions_max, std::int64_t response_tokens_max, std::uint32_t group_size,
                         Bytes metadata_max);

// A group's task for its worker.
struct Question {
  schema::Problem problem;
  std::vector<model::Token> prompt;  // the problem's prompt in the learner's own tokens
};

// One thread, the desk's. Checking a trajectory of three tokens takes 0.5 µs, one of 1000 tokens 15 µs. Decoding takes
// most of the time, which is linear in the length.
class Door {
 public:
  // The adapter must outlive the door.
  Door(DoorOptions options, const data_plane::Adapter& adapter, model::Phrasing phrasing);

  // kInvalid if no worker could generate the group: its prompt has no tokens, or leaves no room for a response.
  Result<const Question*> question(GroupId group);
  Result<schema::Problem> problem(GroupId group) const { return look_->adapter().problem(group.value); }
  // Called when the group is settled.
  void forget(GroupId group) { questions_.erase(group); }

  Bytes message_max(std::uint32_t group_size) const {
    return worker_message_max(options_.positions_max, options_.response_tokens_max, group_size, options_.metadata_max);
  }

  // Whether only the learner scores this problem's responses; and the part of the problem that workers may see.
  bool unscored(const schema::Problem& problem) const { return options_.unscored && options_.unscored(problem); }
  schema::Problem shown(const schema::Problem& problem) const;

  std::optional<Refusal> refusal(const schema::Submission& submission);

  // Shared with the scorers, which call it on their own threads.
  std::shared_ptr<const SecondLook> second_look() const { return look_; }

  // The reason for which stored trajectories cannot be trained on; ok if they can.
  Status trainable(std::span<const schema::Trajectory> group) const;

 private:
  std::optional<Refusal> refusal(const schema::Trajectory& trajectory, const Question& question) const;
  std::optional<Refusal> wrong_end(const schema::Trajectory& trajectory,
                                   std::span<const std::span<const model::Token>> turns) const;

  DoorOptions options_;
  std::shared_ptr<const SecondLook> look_;
  std::map<GroupId, std::unique_ptr<Question>> questions_;  // groups leased and not settled; at most kQuestionsMax
};

}  // namespace echoline::learner

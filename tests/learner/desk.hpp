// A rollout desk with real storage and no network, and workers that talk to it. For tests.
#pragma once
#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <mutex>

#include "data_plane/trajectory.hpp"
#include "learner/batch.hpp"
#include "learner/rollout_desk.hpp"

namespace echoline::learner {

inline constexpr Duration kWait = std::chrono::seconds(10);

// The trajectory of an honest worker for one member of a lease, with the response `text`.
inline schema::Trajectory honest_trajectory(const schema::Lease& lease, std::uint32_t member, const std::string& text,
                                            WorkerId worker, const model::Tokenizer& tokenizer,
                                            const data_plane::Adapter& adapter) {
  schema::Trajectory trajectory;
  trajectory.set_id(std::to_string(lease.id()) + "/" + std::to_string(member));
  trajectory.set_problem_id(lease.problem().id());
  trajectory.set_group(lease.group());
  trajectory.set_member(member);
  const std::vector<model::Token> prompt = *tokenizer.encode(lease.problem().prompt());
  for (const model::Token token : prompt) trajectory.add_prompt_tokens(static_cast<std::uint32_t>(token));
  std::vector<model::Token> response = *tokenizer.encode(text);
  response.push_back(*tokenizer.end_of_text());
  for (const model::Token token : response) {
    trajectory.add_response_tokens(static_cast<std::uint32_t>(token));
    trajectory.add_logprobs(-0.5f);
  }
  trajectory.add_spans()->set_end(static_cast<std::uint32_t>(response.size()));
  trajectory.mutable_spans(0)->set_version(lease.version());
  const data_plane::Score score = *adapter.score(lease.problem(), text);
  trajectory.set_reward(score.reward);
  trajectory.set_correct(score.correct);
  for (const auto& [name, value] : score.components) (*trajectory.mutable_components())[name] = value;
  trajectory.set_text(text);
  trajectory.set_finished(true);
  trajectory.set_policy_digest(lease.policy_digest());
  trajectory.set_lease(lease.id());
  trajectory.set_worker(worker.value);
  return trajectory;
}

class DeskTest : public ::testing::Test {
 protected:
  DeskTest() {
    std::string name = (std::filesystem::temp_directory_path() / "echoline-desk-XXXXXX").string();
    folder_ = ::mkdtemp(name.data());
    options_.file = folder_ / "replay.sqlite";
    options_.pacing = {.staleness = {.budget = 2, .publish_every = 1, .lookahead = 1},
                       .trajectories_per_step = 4,
                       .steps_total = 4,
                       .group_size = 2};
    options_.lease.initial_groups = 64;
    adapter_ = *data_plane::make_adapter("arithmetic", "{}", 1);
    digest_[0] = std::byte{7};
    shape_.vocab_size = tokenizer_.size();
    shape_.positions_max = 32;
    checker_options_.vocab_size = shape_.vocab_size;
    checker_options_.positions_max = shape_.positions_max;
    checker_options_.response_tokens_max = 8;
    checker_options_.trainable = [this](const schema::Trajectory& t) { return check_trainable(t, shape_); };
  }
  ~DeskTest() override {
    desk_.reset();
    std::filesystem::remove_all(folder_);
  }

  void open(std::uint64_t step) {
    desk_.reset();
    DeskEvents events;
    events.send = [this](WorkerId, std::string bytes) {
      const std::lock_guard lock(mutex_);
      received_.push_back(*data_plane::parse_learner_message(bytes));
      changed_.notify_all();
    };
    events.accepted = [this](WorkerId, std::uint64_t rollouts, double) {
      const std::lock_guard lock(mutex_);
      accepted_ += rollouts;
    };
    events.misbehaved = [this](WorkerId, const std::string& reason) {
      if (reason.find("wait to be read") != std::string::npos) {
        flooded_ = 1;
        return;
      }
      const std::lock_guard lock(mutex_);
      misbehaved_ = reason;
      changed_.notify_all();
    };
    events.turned_away = [this](WorkerId worker) {
      const std::lock_guard lock(mutex_);
      turned_away_.push_back(worker.value);
    };
    events.without_work = [this](WorkerId worker, double seconds) {
      const std::lock_guard lock(mutex_);
      seconds_without_work_[worker.value] += seconds;
    };
    events.leaving = [this](WorkerId worker) {
      const std::lock_guard lock(mutex_);
      leaving_.push_back(worker.value);
      return true;
    };
    events.drained = [this](WorkerId worker) {
      const std::lock_guard lock(mutex_);
      drained_.push_back(worker.value);
    };
    events.set_aside = [this](const GroupSetAside& group) {
      const std::lock_guard lock(mutex_);
      set_aside_.push_back(group);
    };
    events.policy_unusable = [this](const PolicyUnusable& policy) {
      const std::lock_guard lock(mutex_);
      unusable_.push_back(policy);
    };
    auto desk =
        RolloutDesk::open(options_, SubmissionChecker(checker_options_, *adapter_, phrasing_), step, std::move(events));
    ASSERT_TRUE(desk) << desk.error().message();
    desk_ = std::move(*desk);
    desk_->finish_publishing(Version{step}, digest_);
  }

  schema::LearnerMessage next_message() {
    std::unique_lock lock(mutex_);
    EXPECT_TRUE(changed_.wait_for(lock, kWait, [this] { return !received_.empty(); }));
    if (received_.empty()) return {};
    schema::LearnerMessage message = std::move(received_.front());
    received_.erase(received_.begin());
    return message;
  }

  std::string digest_bytes() const { return {reinterpret_cast<const char*>(digest_.data()), digest_.size()}; }

  schema::WorkGrant request_work(std::uint64_t version, std::uint32_t groups, WorkerId worker = WorkerId{1}) {
    schema::WorkerMessage message;
    message.mutable_request()->set_version(version);
    message.mutable_request()->set_policy_digest(digest_bytes());
    message.mutable_request()->set_groups_max(groups);
    desk_->receive(worker, message.SerializeAsString());
    return next_message().grant();
  }

  // An honest worker's submission: the right answer of the first member, and wrong answers of the others.
  schema::Submission honest_submission(const schema::Lease& lease, WorkerId worker = WorkerId{1}) {
    schema::Submission submission;
    submission.set_lease(lease.id());
    for (std::uint32_t member = 0; member < lease.rollouts(); ++member) {
      const std::string text = member == 0 ? lease.problem().reference() : "x";
      *submission.add_trajectories() = honest_trajectory(lease, member, text, worker, tokenizer_, *adapter_);
    }
    return submission;
  }

  schema::SubmissionAck submit_and_wait(const schema::Submission& submission, WorkerId worker = WorkerId{1}) {
    schema::WorkerMessage message;
    *message.mutable_submission() = submission;
    desk_->receive(worker, message.SerializeAsString());
    return next_message().ack();
  }
  schema::SubmissionAck submit_and_wait(const schema::Lease& lease) {
    return submit_and_wait(honest_submission(lease));
  }

  void report_failure(const schema::Lease& lease, WorkerId worker, schema::WorkFailure failure) {
    schema::WorkerMessage message;
    message.mutable_failed()->set_lease(lease.id());
    message.mutable_failed()->set_failure(failure);
    message.mutable_failed()->set_detail("because\nof this");
    desk_->receive(worker, message.SerializeAsString());
  }

  std::string misbehaved() {
    (void)desk_->counts();  // everything before it has been handled
    const std::lock_guard lock(mutex_);
    return std::exchange(misbehaved_, {});
  }

  const model::Tokenizer tokenizer_ = *model::Tokenizer::characters(model::kCharacterAlphabet);
  const model::Phrasing phrasing_ =
      *model::Phrasing::from_parts(tokenizer_, {*tokenizer_.end_of_text()}, R"({"text": "{prompt}"})");
  model::ModelConfig shape_;
  SubmissionCheckerOptions checker_options_;
  std::vector<GroupSetAside> set_aside_;
  std::vector<PolicyUnusable> unusable_;
  std::filesystem::path folder_;
  DeskOptions options_;
  std::unique_ptr<data_plane::Adapter> adapter_;
  overlay::Digest digest_{};
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<schema::LearnerMessage> received_;
  std::uint64_t accepted_ = 0;
  std::string misbehaved_;
  std::vector<std::uint64_t> leaving_, drained_, turned_away_;
  std::map<std::uint64_t, double> seconds_without_work_;  // by worker
  std::atomic<int> flooded_ = 0;  // 1: a worker was expelled, because too many of its messages waited to be read
  std::unique_ptr<RolloutDesk> desk_;
};

}  // namespace echoline::learner

// A worker's groups without a network or an engine: what fails, fails alone, and what is whole is scored.
#include "worker/groups.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <stdexcept>

#include "data_plane/trajectory.hpp"

namespace echoline::worker {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

constexpr std::uint32_t kGroup = 4;
const TimePoint kNow = TimePoint(std::chrono::seconds(100));

class Broken final : public data_plane::Adapter {
 public:
  explicit Broken(std::unique_ptr<data_plane::Adapter> sound) : sound_(std::move(sound)) {}
  std::string_view name() const override { return "broken"; }
  Result<schema::Problem> problem(std::uint64_t index) const override { return sound_->problem(index); }
  std::vector<schema::Problem> evaluation() const override { return {}; }
  data_plane::Score score(const schema::Problem& problem, std::string_view response) const override {
    if (problem.id() == "unscorable") throw std::runtime_error("no verdict");
    return sound_->score(problem, response);
  }
  std::optional<std::string> demonstration(const schema::Problem&) const override { return std::nullopt; }

 private:
  std::unique_ptr<data_plane::Adapter> sound_;
};

class GroupsTest : public ::testing::Test {
 protected:
  GroupsTest() {
    schema::RunSpec spec;
    spec.set_seed(5);
    spec.set_model_config_json(model::preset("tiny-64")->to_json());
    spec.set_tokenizer_json(model::Tokenizer::characters(model::kCharacterAlphabet)->to_json());
    spec.add_eos(static_cast<std::uint32_t>(*model::Tokenizer::characters(model::kCharacterAlphabet)->end_of_text()));
    spec.set_prompt_json(R"({"text": "{prompt}"})");
    spec.set_adapter_name("arithmetic");
    spec.set_response_tokens_max(3);
    task_ = *make_task(std::move(spec));
    task_.adapter = std::make_unique<Broken>(std::move(task_.adapter));
    groups_.emplace(task_, WorkerId{9});
  }

  static schema::Lease lease(std::uint64_t id, const std::string& prompt, const std::string& problem = "p") {
    schema::Lease lease;
    lease.set_id(id);
    lease.set_group(id);
    lease.set_version(3);
    lease.set_rollouts(kGroup);
    lease.set_policy_digest("d");
    lease.mutable_problem()->set_id(problem);
    lease.mutable_problem()->set_prompt(prompt);
    lease.mutable_problem()->set_reference("7");
    return lease;
  }
  std::vector<Sequence> begin(const schema::Lease& lease) {
    auto begun = groups_->begin(lease, kNow);
    return std::get<std::vector<Sequence>>(std::move(begun));
  }
  Outcome answered(std::uint64_t id, const std::string& text = "7") const {
    Response r{*task_.phrasing->tokenizer().encode(text), {}, {}, true};
    r.tokens.push_back(task_.phrasing->eos().front());
    r.logprobs.assign(r.tokens.size(), -0.5f);
    r.spans = {{Version{3}, 1}, {Version{5}, r.tokens.size()}};
    return {id, std::move(r)};
  }

  Task task_;
  std::optional<Groups> groups_;
};

TEST_F(GroupsTest, AGroupIsHandedInWhenItsLastResponseIsThere) {
  const auto sequences = begin(lease(1, "3+4="));
  ASSERT_EQ(sequences.size(), kGroup);
  std::set<std::uint64_t> seeds;
  for (const Sequence& s : sequences) {
    EXPECT_EQ(s.prompt, *task_.phrasing->prompt("3+4="));
    EXPECT_EQ(s.tokens_max, 3);
    seeds.insert(s.seed);
  }
  EXPECT_EQ(seeds.size(), kGroup);
  const auto others = begin(lease(2, "1+1="));
  EXPECT_THAT(groups_->leases(), ElementsAre(1u, 2u));
  EXPECT_EQ(groups_->rollouts(), 2u * kGroup);
  for (const std::size_t member : {2u, 0u, 3u}) EXPECT_FALSE(groups_->take(answered(sequences[member].id)));
  auto ended = groups_->take(answered(sequences[1].id, "8"));
  ASSERT_TRUE(ended);
  EXPECT_EQ(ended->begun, kNow);
  EXPECT_THAT(ended->abandoned, IsEmpty());
  const auto& submission = std::get<schema::Submission>(ended->what);
  ASSERT_EQ(submission.trajectories_size(), static_cast<int>(kGroup));
  for (std::uint32_t member = 0; member < kGroup; ++member) {
    const schema::Trajectory& t = submission.trajectories(static_cast<int>(member));
    EXPECT_TRUE(data_plane::check(t)) << data_plane::check(t).error().message();
    EXPECT_EQ(t.member(), member);
    EXPECT_EQ(t.id(), fmt::format("1/{}", member));
    EXPECT_EQ(t.worker(), 9u);
    EXPECT_EQ(t.correct(), member != 1);
    EXPECT_EQ(data_plane::oldest_version(t), Version{3});
    ASSERT_EQ(t.spans_size(), 2);
    EXPECT_EQ(t.spans(1).begin(), 1u);
    EXPECT_EQ(t.spans(1).version(), 5u);
  }
  EXPECT_THAT(groups_->leases(), ElementsAre(2u));
}

TEST_F(GroupsTest, OneBadGroupDoesNotTakeTheOthersWithIt) {
  const auto bad = groups_->begin(lease(1, "\xc3\xa9"), kNow);
  EXPECT_EQ(std::get<schema::WorkFailed>(bad).failure(), schema::WORK_FAILURE_PROMPT);
  EXPECT_TRUE(groups_->empty());
  const auto good = begin(lease(2, "1")), memory = begin(lease(3, "2")), broken = begin(lease(4, "3")),
             unscorable = begin(lease(5, "4", "unscorable")), too_long = begin(lease(6, "5"));
  EXPECT_FALSE(groups_->take(answered(memory[1].id)));
  const auto failure = [&](std::uint64_t id, Code code) {
    auto ended = groups_->take({id, fail(code, "generate", "why")});
    EXPECT_THAT(ended->abandoned.size(), kGroup - (id == memory[0].id ? 2 : 1));
    EXPECT_THAT(std::get<schema::WorkFailed>(ended->what).detail(), HasSubstr("why"));
    return std::get<schema::WorkFailed>(ended->what).failure();
  };
  EXPECT_EQ(failure(memory[0].id, Code::kExhausted), schema::WORK_FAILURE_MEMORY);
  EXPECT_EQ(failure(broken[3].id, Code::kCorrupt), schema::WORK_FAILURE_GENERATION);
  EXPECT_EQ(failure(too_long[0].id, Code::kInvalid), schema::WORK_FAILURE_PROMPT);
  EXPECT_FALSE(groups_->take(answered(memory[2].id))) << "what is abandoned may still come";
  std::optional<Groups::Ended> ended;
  for (const Sequence& s : unscorable) ended = groups_->take(answered(s.id));
  EXPECT_EQ(std::get<schema::WorkFailed>(ended->what).failure(), schema::WORK_FAILURE_SCORING);
  for (const Sequence& s : good) ended = groups_->take(answered(s.id));
  EXPECT_EQ(std::get<schema::Submission>(ended->what).lease(), 2u);
  EXPECT_TRUE(groups_->empty());
}

TEST_F(GroupsTest, WhatIsDroppedIsForgotten) {
  const auto first = begin(lease(1, "1")), second = begin(lease(2, "2"));
  EXPECT_FALSE(groups_->take(answered(first[0].id)));
  EXPECT_EQ(groups_->drop().size(), 2 * kGroup - 1);
  EXPECT_TRUE(groups_->empty());
  EXPECT_EQ(groups_->rollouts(), 0u);
  EXPECT_FALSE(groups_->take(answered(second[0].id)));
  EXPECT_NE(begin(lease(1, "1"))[0].id, first[0].id);
}

}  // namespace
}  // namespace echoline::worker

// An episode of many turns from end to end: a worker's groups make it, and the learner recomputes its score and
// its observations.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "data_plane/adapters/adapter.hpp"
#include "learner/submission_checker.hpp"
#include "worker/groups.hpp"

namespace echoline {
namespace {

using ::testing::HasSubstr;

constexpr std::uint32_t kGroupSize = 3, kResponseTokensMax = 24, kTurnTokensMax = 4;
constexpr std::uint64_t kSeed = 5;
const char* const kOptions = R"({"number_max": 40, "range": 8, "guesses": 4, "evaluation_problems": 16})";

class EpisodeTest : public ::testing::Test {
 protected:
  EpisodeTest() {
    schema::RunSpec spec;
    spec.set_seed(kSeed);
    spec.set_model_config_json(model::preset("tiny-64")->to_json());
    spec.set_tokenizer_json(tokenizer_.to_json());
    spec.add_eos(static_cast<std::uint32_t>(*tokenizer_.end_of_text()));
    spec.set_prompt_json(R"({"text": "{prompt}"})");
    spec.set_adapter_name("guess");
    spec.set_adapter_config_json(kOptions);
    spec.set_response_tokens_max(kResponseTokensMax);
    spec.set_turn_tokens_max(kTurnTokensMax);
    task_ = *worker::make_task(std::move(spec));
    adapter_ = *data_plane::make_adapter("guess", kOptions, kSeed);
    learner::SubmissionCheckerOptions checker_options;
    checker_options.vocab_size = tokenizer_.size();
    checker_options.positions_max = 128;
    checker_options.response_tokens_max = kResponseTokensMax;
    checker_options.turn_tokens_max = kTurnTokensMax;
    checker_options.seed = kSeed;
    checker_.emplace(std::move(checker_options), *adapter_, *task_.phrasing);
  }

  // A submission of a worker whose policy answers `guess`, given the turn. A guess that ends with "!" has no token that
  // ends the turn.
  schema::Submission played(const std::function<std::string(std::size_t turn)>& guess) {
    worker::Groups groups(task_, WorkerId{2});
    schema::Lease lease;
    lease.set_id(4);
    lease.set_group(9);
    lease.set_rollouts(kGroupSize);
    lease.set_version(1);
    lease.set_policy_digest("d");
    *lease.mutable_problem() = *adapter_->problem(9);
    auto begun = groups.begin(lease, TimePoint());
    auto sequences = std::get<std::vector<worker::Sequence>>(std::move(begun));
    for (std::size_t turn = 0;; ++turn) {
      for (const worker::Sequence& sequence : sequences) {
        std::string text = guess(turn);
        const bool ends = !text.ends_with('!');
        if (!ends) text.pop_back();
        worker::Response response{.tokens = *tokenizer_.encode(text), .logprobs = {}, .spans = {}, .ended = ends};
        std::vector<model::Token>& tokens = response.tokens;
        if (ends) tokens.push_back(*tokenizer_.end_of_text());
        if (!ends) tokens.resize(std::min(tokens.size(), static_cast<std::size_t>(sequence.tokens_max)));
        EXPECT_LE(std::ssize(tokens), sequence.tokens_max);
        response.logprobs.assign(tokens.size(), -0.5f);
        response.spans = {{Version{1}, tokens.size()}};
        groups.on_outcome({.id = sequence.id, .response = std::move(response)});
      }
      worker::Groups::Advance advance = groups.advance();
      if (!advance.ended.empty()) return std::get<schema::Submission>(std::move(advance.ended[0].result));
      sequences = std::move(advance.next);
    }
  }
  std::string verdict(const schema::Submission& submission) {
    const auto refused = checker_->refusal(submission);
    return refused ? fmt::format("{}: {}", refused->reason, refused->detail) : "accepted";
  }
  std::uint64_t wanted() const { return std::stoull((*adapter_->problem(9)).reference()); }

  model::Tokenizer tokenizer_ = *model::Tokenizer::characters(model::kCharacterAlphabet);
  worker::Task task_;
  std::unique_ptr<data_plane::Adapter> adapter_;
  std::optional<learner::SubmissionChecker> checker_;
};

TEST_F(EpisodeTest, TheDoorAcceptsHonestEpisodes) {
  const auto guess_right_at_third = [&](std::size_t turn) { return std::to_string(turn == 2 ? wanted() : turn); };
  schema::Submission submission = played(guess_right_at_third);
  EXPECT_EQ(verdict(submission), "accepted");
  const schema::Trajectory& trajectory = submission.trajectories(0);
  EXPECT_TRUE(trajectory.correct());
  EXPECT_TRUE(trajectory.finished());
  EXPECT_DOUBLE_EQ(trajectory.reward(), 0.9);
  EXPECT_EQ(trajectory.components().at("guesses"), 3);
  EXPECT_EQ(trajectory.text(), fmt::format("0<|endoftext|>\n{}\n1<|endoftext|>\n{}\n{}<|endoftext|>",
                                           wanted() > 0 ? "+" : "-", wanted() > 1 ? "+" : "-", wanted()));
  EXPECT_EQ(verdict(played([&](std::size_t) { return std::to_string(wanted()); })), "accepted") << "one turn";
  EXPECT_EQ(verdict(played([&](std::size_t) { return "x"; })), "accepted") << "over after four guesses";
  EXPECT_EQ(verdict(played([&](std::size_t) { return "1234!"; })), "accepted") << "no room for a fourth turn";
  EXPECT_FALSE(played([&](std::size_t) { return "1234!"; }).trajectories(0).finished());
}

TEST_F(EpisodeTest, TheDoorRefusesAlteredEpisodes) {
  const schema::Submission sound = played([&](std::size_t turn) { return turn == 2 ? std::to_string(wanted()) : "x"; });
  ASSERT_EQ(verdict(sound), "accepted");
  const auto verdict_if_spoilt = [&](const std::function<void(schema::Trajectory&)>& spoil) {
    schema::Submission submission = sound;
    spoil(*submission.mutable_trajectories(1));
    return verdict(submission);
  };
  // x <eos> \n ? \n x <eos> \n ? \n NUMBER <eos>
  EXPECT_THAT(verdict_if_spoilt([&](auto& t) { t.set_response_tokens(3, t.response_tokens(0)); }),
              HasSubstr("wrong score: its 3 tokens of observation"));
  EXPECT_THAT(verdict_if_spoilt([](auto& t) { t.set_loss_mask(2, 1); }), HasSubstr("it goes on after token"));
  EXPECT_THAT(verdict_if_spoilt([](auto& t) { t.set_loss_mask(1, 0); }), HasSubstr("it is cut after 1 tokens"));
  EXPECT_THAT(verdict_if_spoilt([](auto& t) { t.set_loss_mask(0, 0); }), HasSubstr("loss mask does not begin and end"));
  EXPECT_THAT(verdict_if_spoilt([](auto& t) { t.clear_loss_mask(); }), HasSubstr("it goes on after token"));
  EXPECT_THAT(verdict_if_spoilt([](auto& t) { t.set_reward(1); }), HasSubstr("wrong score: reward 1"));
  EXPECT_THAT(verdict_if_spoilt([](auto& t) { t.set_finished(false); }), HasSubstr("finished is false"));
  EXPECT_THAT(verdict_if_spoilt([](auto& t) { (*t.mutable_components())["guesses"] = 1; }),
              HasSubstr("the parts of its reward"));
  EXPECT_THAT(verdict_if_spoilt([](auto& t) { t.set_text("x"); }), HasSubstr("its text"));
  const auto shorten = [](schema::Trajectory& t, int tokens) {
    t.mutable_response_tokens()->Truncate(tokens), t.mutable_logprobs()->Truncate(tokens),
        t.mutable_loss_mask()->Truncate(tokens);
    t.mutable_spans(0)->set_end(static_cast<std::uint32_t>(tokens));
  };
  EXPECT_THAT(verdict_if_spoilt([&](auto& t) { shorten(t, 7); }), HasSubstr("its task goes on"));
  EXPECT_THAT(verdict_if_spoilt([&](auto& t) { shorten(t, 8); }), HasSubstr("loss mask does not begin and end"));
}

// Every kind of task gives the same answers to the same responses, at any time.
TEST(Episodes, AreTheSameForTheSameSeed) {
  const auto adapter = *data_plane::make_adapter("guess", "{}", 3);
  for (std::uint64_t index = 0; index < 50; ++index) {
    const auto problem = *adapter->problem(index);
    const auto transcript = [&] {
      std::string text;
      const auto episode = *adapter->begin(problem, data_plane::episode_seed(3, index, 1));
      for (int turn = 0; turn < 64; ++turn) {
        const auto step = *data_plane::step_and_wait(*episode, std::to_string(turn * 7 + static_cast<int>(index)));
        text += fmt::format("{} {} {};", step.score.reward, step.done, step.observation.text);
        if (step.done) break;
      }
      return text;
    };
    EXPECT_EQ(transcript(), transcript());
  }
}

TEST(Episodes, BisectionFindsEveryNumber) {
  const auto adapter = *data_plane::make_adapter("guess", "{}", 3);
  for (const auto& problem : adapter->evaluation()) {
    std::uint64_t low = std::stoull(problem.prompt()), high = low + 16,
                  guess = std::stoull(*adapter->demonstration(problem));
    const auto episode = *adapter->begin(problem, 1);
    data_plane::Step step;
    for (int turn = 0; turn < 5; ++turn, guess = low + (high - low) / 2) {
      step = *data_plane::step_and_wait(*episode, std::to_string(guess));
      if (step.done) break;
      const bool is_greater = step.observation.text == "+";
      (is_greater ? low : high) = guess + (is_greater ? 1 : 0);
    }
    EXPECT_TRUE(step.score.correct) << problem.id();
  }
}

// A task that does not say what one response is worth, says so.
TEST(Episodes, ManyTurnsHaveNoScoreOfOneResponse) {
  const auto adapter = *data_plane::make_adapter("guess", "{}", 3);
  const auto score = adapter->score(*adapter->problem(0), "1");
  ASSERT_FALSE(score);
  EXPECT_THAT(score.error().message(), HasSubstr("many turns"));
}

}  // namespace
}  // namespace echoline

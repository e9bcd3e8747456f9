// Scores of answers to held-out problems, from any source.
#include "learner/held_out.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "base/random.hpp"

namespace echoline::learner {
namespace {

TEST(HeldOut, IntervalsAreWilsons) {
  const Interval half = wilson_interval(0.5, 10);
  EXPECT_NEAR(half.low, 0.2366, 1e-4);
  EXPECT_NEAR(half.high, 0.7634, 1e-4);
  const Interval none = wilson_interval(0, 10);
  EXPECT_NEAR(none.low, 0, 1e-12);
  EXPECT_NEAR(none.high, 0.2775, 1e-4);
  EXPECT_EQ(wilson_interval(0.5, 0).high, 1);
}

// The reference counts the choices of k among n answers that contain a correct one. Each bit of `chosen_answers` is an
// answer; the lowest bits are the correct ones.
TEST(HeldOut, PassAtKCountsChoices) {
  for (unsigned n = 1; n <= 8; ++n)
    for (unsigned correct = 0; correct <= n; ++correct)
      for (unsigned k = 1; k <= n; ++k) {
        const unsigned correct_answers = (1u << correct) - 1;
        unsigned choices = 0, hits = 0;
        for (unsigned chosen_answers = 0; chosen_answers < 1u << n; ++chosen_answers) {
          if (static_cast<unsigned>(__builtin_popcount(chosen_answers)) != k) continue;
          ++choices;
          hits += (chosen_answers & correct_answers) != 0;
        }
        EXPECT_NEAR(pass_at(n, correct, k), static_cast<double>(hits) / choices, 1e-12)
            << n << " " << correct << " " << k;
      }
}

class HeldOutTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto adapter = data_plane::make_adapter("arithmetic", R"({"operations": ["+"], "evaluation_problems": 200})", 3);
    ASSERT_TRUE(adapter) << adapter.error().message();
    adapter_ = *std::move(adapter);
    problems_ = adapter_->evaluation();
  }
  void answer(HeldOut& held_out, std::size_t problem, bool right) { answer(held_out, problem, 0, 1, right); }
  void answer(HeldOut& held_out, std::size_t problem, int sample, int samples, bool right) {
    const auto observation = held_out.submit_turn(
        problem * samples + sample, right ? problems_[problem].reference() : "wrong", true, right ? 2 : 6);
    ASSERT_TRUE(observation) << observation.error().message();
    EXPECT_EQ(*observation, std::nullopt);
  }
  std::unique_ptr<data_plane::Adapter> adapter_;
  std::vector<schema::Problem> problems_;
};

TEST_F(HeldOutTest, CountsAnswersLengthsAndRefusals) {
  problems_.resize(10);
  HeldOut held_out(*adapter_, problems_, 1, 0);
  for (std::size_t i = 0; i < 8; ++i) answer(held_out, i, i < 4);
  ASSERT_TRUE(held_out.submit_turn(8, "12345", false, std::nullopt));
  held_out.record_refusal(9, "too long\nfor it");
  const auto result = held_out.result();
  EXPECT_EQ(result["accuracy"], 0.4);
  EXPECT_EQ(result["reward_mean"], 0.4);
  EXPECT_NEAR(result["accuracy_low"].get<double>(), wilson_interval(0.4, 10).low, 1e-12);
  EXPECT_TRUE(result["pass_at"].empty());
  EXPECT_EQ(result["response_tokens"]["known"], 8);
  EXPECT_EQ(result["response_tokens"]["mean"], 4);
  EXPECT_EQ(result["response_tokens"]["max"], 6);
  EXPECT_EQ(result["truncated_fraction"], 0.1);
  EXPECT_EQ(result["refused"], (nlohmann::json{{R"(too long\nfor it)", 1}}));
}

// If all answers to a problem agree, the interval's width follows from the number of problems. If they are independent,
// it follows from the number of answers.
TEST_F(HeldOutTest, AnswersToOneProblemWeighByTheirInformation) {
  HeldOut alike(*adapter_, problems_, 8, 0), unlike(*adapter_, problems_, 8, 0);
  Random random(5);
  double correct = 0;
  for (std::size_t i = 0; i < problems_.size(); ++i)
    for (int sample = 0; sample < 8; ++sample) {
      answer(alike, i, sample, 8, i % 2 == 0);
      const bool right = random.below(2) == 0;
      correct += right;
      answer(unlike, i, sample, 8, right);
    }
  const auto result_alike = alike.result(), result_unlike = unlike.result();
  const auto width = [](const auto& result) {
    return result["accuracy_high"].template get<double>() - result["accuracy_low"].template get<double>();
  };
  const auto wilson_width = [](double share, double answers) {
    return wilson_interval(share, answers).high - wilson_interval(share, answers).low;
  };
  EXPECT_NEAR(width(result_alike), wilson_width(0.5, 200), 0.002);
  EXPECT_NEAR(width(result_unlike), wilson_width(correct / 1600, 1600), 0.008);
  EXPECT_EQ(result_alike["pass_at"].back()["share"], 0.5) << "the same problems every time";
  EXPECT_EQ(result_alike["pass_at"].back()["k"], 8);
  EXPECT_NEAR(result_unlike["pass_at"].back()["share"].get<double>(), 1 - 1.0 / 256, 0.02);
  EXPECT_EQ(result_unlike["pass_at"].size(), 4u) << "1, 2, 4, 8";
}

// Guessing result_alike number takes several turns. The observations between them are returned, and the answer counts
// once.
TEST(HeldOut, AnAnswerHasAsManyTurnsAsItsTask) {
  const auto adapter = data_plane::make_adapter("guess", "", 3);
  ASSERT_TRUE(adapter) << adapter.error().message();
  const std::vector<schema::Problem> problems = (*adapter)->evaluation();
  HeldOut held_out(**adapter, problems, 1, 7);
  const auto observation = held_out.submit_turn(0, "hm", true, 1);
  ASSERT_TRUE(observation) << observation.error().message();
  ASSERT_TRUE(observation->has_value());
  EXPECT_EQ(held_out.answers(), 0u);
  held_out.end_early(0);
  EXPECT_EQ(held_out.answers(), 1u);
  const auto result = held_out.result();
  EXPECT_EQ(result["response_tokens"]["max"], 1);
  EXPECT_GT(result["truncated_fraction"], 0);
}

TEST(HeldOut, ATextEndsBehindItsFirstStopString) {
  EXPECT_EQ(up_to_stop("a b</x> c", {"</x>", "zz"}), (std::pair<std::string_view, bool>{"a b</x>", true}));
  EXPECT_EQ(up_to_stop("aXbYc", {"Yc", "Xb"}).first, "aXb");
  EXPECT_EQ(up_to_stop("abc", {"x"}), (std::pair<std::string_view, bool>{"abc", false}));
  EXPECT_EQ(up_to_stop("abc", {}).first, "abc");
}

}  // namespace
}  // namespace echoline::learner

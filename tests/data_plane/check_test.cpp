// `adapter check` finds each fault of a task, and none in a sound task.
#include "data_plane/adapters/check/check.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <thread>

#include "base/random.hpp"
#include "data_plane/adapters/check/speed.hpp"

namespace echoline::data_plane {
namespace {

using ::testing::HasSubstr;

// The one fault of an otherwise sound task. Its problems ask for the number in their prompt.
enum class Fault {
  kNone,
  kProblemsChange,
  kIdsTwice,
  kNoPrompt,
  kLeak,
  kHeldOutChanges,
  kDemonstration,
  kReward,
  kPart,
  kFailsOnNothing,
  kFailsOnBytes,
  kBreaks,
  kFlaky,
  kWorkerDiffers,
  kShared,
  kEndless,
  kObservation,
  kEpisodesMix,
  kCut,
  kNothingToLearn
};

struct Task final : Adapter {
  explicit Task(Fault fault, AdapterUse use, int start) : fault(fault), use(use), start(start) {}
  std::string_view name() const override { return "task"; }
  Result<Problem> problem(std::uint64_t index) const override {
    const std::uint64_t row = index % 1000;
    Problem p;
    p.set_id(fault == Fault::kIdsTwice ? "t/0" : fmt::format("t/{}", row));
    if (fault != Fault::kNoPrompt)
      p.set_prompt(fmt::format("{}?", row + (fault == Fault::kProblemsChange ? 1000 * start : 0)));
    if (fault == Fault::kLeak && row == 17) p.set_prompt("-3?");
    p.set_reference(p.prompt().substr(0, p.prompt().find('?')));
    return p;
  }
  std::vector<Problem> evaluation() const override {
    std::vector<Problem> problems;
    for (int i = 1; i <= 20; ++i) {
      Problem p;
      p.set_id(fmt::format("h/{}", i));
      p.set_prompt(fmt::format("-{}?", i));
      p.set_reference(fmt::format("-{}", i + (fault == Fault::kHeldOutChanges ? start : 0)));
      problems.push_back(p);
    }
    return problems;
  }
  Result<Score> score(const Problem& p, std::string_view response) const override {
    if (fault == Fault::kFailsOnNothing && response.empty())
      return fail(Code::kUnavailable, "task", "there is nothing");
    if (fault == Fault::kFailsOnBytes && response.find('\xff') != std::string_view::npos)
      return fail(Code::kUnavailable, "task", "no text");
    if (fault == Fault::kBreaks && response.size() > 100'000 && !broken.exchange(true))
      return fail(Code::kStale, "task", "no answer within 30 s");
    broken = false;
    Score score;
    score.correct = fault != Fault::kNothingToLearn && response == p.reference();
    score.reward = score.correct ? 1 : 0;
    if (fault == Fault::kReward && response.size() > 4000) score.reward = std::nan("");
    if (fault == Fault::kPart) score.components[std::string(200, 'x')] = 1;
    if (fault == Fault::kFlaky) score.reward = static_cast<double>(calls++);
    if (fault == Fault::kWorkerDiffers && use == AdapterUse::kScoring) score.reward += 0.5;
    if (fault == Fault::kShared) {
      const int calls_inside = ++inside;
      for (int i = 0; i < 20; ++i) std::this_thread::yield();
      score.reward += calls_inside > 1 ? 1 : 0;
      --inside;
    }
    return score;
  }
  std::optional<std::string> demonstration(const Problem& p) const override {
    if (fault == Fault::kNothingToLearn) return std::nullopt;
    return fault == Fault::kDemonstration ? p.prompt() : p.reference();
  }

  struct Turns final : QuickEpisode {
    explicit Turns(const Task& task) : task(task) {}
    Result<Step> step_now(std::string_view response) override {
      ++turns;
      Step step;
      step.score.reward = static_cast<double>(response.size() % 7);
      if (task.fault == Fault::kEpisodesMix) step.score.reward += static_cast<double>(++task.calls % 3);
      step.done = turns == 5 && task.fault != Fault::kEndless;
      if (!step.done) step.observation = task.fault == Fault::kObservation ? "\xff" : fmt::format("{} left", 5 - turns);
      return step;
    }
    Score cut() override {
      Score score;
      score.reward = task.fault == Fault::kCut ? -INFINITY : -1;
      return score;
    }
    const Task& task;
    int turns = 0;
  };
  Result<std::unique_ptr<Episode>> begin(const Problem& problem, std::uint64_t seed) const override {
    if (!turns) return Adapter::begin(problem, seed);
    return std::unique_ptr<Episode>(std::make_unique<Turns>(*this));
  }

  const Fault fault;
  const AdapterUse use;
  const int start;
  bool turns = false;
  mutable std::atomic<int> calls = 0, inside = 0;
  mutable std::atomic<bool> broken = false;
};

CheckReport run_check(Fault fault, bool turns = false) {
  CheckOptions options;
  options.time = std::chrono::seconds(3);
  auto starts = std::make_shared<int>(0);
  options.make = [=](std::string_view, AdapterUse use) -> Result<std::unique_ptr<Adapter>> {
    auto task = std::make_unique<Task>(fault, use, (*starts)++);
    task->turns = turns;
    return std::unique_ptr<Adapter>(std::move(task));
  };
  const SystemClock clock;
  auto report = check_adapter(options, clock);
  EXPECT_TRUE(report);
  return report ? *std::move(report) : CheckReport{};
}

void expect_found(Fault fault, bool turns, const std::string& check, const std::string& what, bool wrong = true) {
  const CheckReport report = run_check(fault, turns);
  std::string listing;
  bool is_found = false;
  for (const Finding& f : report.findings) {
    listing += fmt::format("{} {}: {} [{}] [{}]\n", f.wrong ? "wrong" : "note", f.check, f.what, f.problem, f.response);
    is_found = is_found || (f.check == check && f.wrong == wrong && f.what.find(what) != std::string::npos);
    EXPECT_LT(f.response.size(), 600u);
  }
  EXPECT_TRUE(is_found) << check << ", " << what << ", in:\n" << listing;
  EXPECT_EQ(report.is_sound(), !wrong) << listing;
}

TEST(Check, NothingIsWrongWithASoundTask) {
  for (const bool turns : {false, true}) {
    const CheckReport report = run_check(Fault::kNone, turns);
    for (const Finding& f : report.findings) ADD_FAILURE() << f.check << ": " << f.what;
    EXPECT_EQ(report.facts.at("held_out"), 20);
    EXPECT_EQ(report.facts.at("episodes").at("longest"), turns ? 5 : 1);
    EXPECT_GT(report.facts.at("speed").at("per_s"), 100.0);
  }
}

TEST(Check, ProblemsAreAFunctionOfSeedAndIndex) {
  expect_found(Fault::kProblemsChange, false, "problems", "has other content after a second start");
  expect_found(Fault::kIdsTwice, false, "problems", "two different problems have this id");
  expect_found(Fault::kNoPrompt, false, "problems", "no prompt");
}

TEST(Check, HeldOutProblemsStayThatAndAreNotTrainedOn) {
  expect_found(Fault::kLeak, false, "held out", "training problem 17 is a held-out one under another id");
  expect_found(Fault::kHeldOutChanges, false, "held out", "is a different one after a second start");
}

TEST(Check, ScoresAreFoundAgain) {
  expect_found(Fault::kFlaky, false, "scores", "not repeatable although the task declares it: ");
  expect_found(Fault::kWorkerDiffers, false, "worker", "by a worker's copy");
  expect_found(Fault::kShared, false, "threads", "from one of 4 threads");
}

TEST(Check, RewardsAndFailuresAreLookedAt) {
  expect_found(Fault::kReward, false, "rewards", "its reward is nan");
  expect_found(Fault::kPart, false, "rewards", "name of 200 bytes");
  expect_found(Fault::kFailsOnNothing, false, "failures", "at an empty response: task: there is nothing");
  expect_found(Fault::kFailsOnBytes, false, "failures", "scoring failed, so the rollout is returned, at every byte",
               false);
  expect_found(Fault::kBreaks, false, "breaks", "no answer within 30 s");
  expect_found(Fault::kDemonstration, false, "demonstrations", "64 of 64 demonstrations are not correct");
  expect_found(Fault::kNothingToLearn, false, "rewards", "nothing to learn", false);
}

TEST(Check, EpisodesEndAndAreThemselvesAgain) {
  expect_found(Fault::kEndless, true, "episodes", "has not ended after 1024 turns");
  expect_found(Fault::kObservation, true, "episodes", "not UTF-8");
  expect_found(Fault::kEpisodesMix, true, "scores", "not repeatable");
  expect_found(Fault::kCut, true, "rewards", "its reward is -inf");
}

TEST(Check, ATaskThatCannotBeMadeIsAnError) {
  const SystemClock clock;
  CheckOptions options;
  options.name = "arithmetic";
  options.options_json = R"({"digit": 3})";
  const auto report = check_adapter(options, clock);
  ASSERT_FALSE(report);
  EXPECT_EQ(report.error().code, Code::kInvalid);
  EXPECT_THAT(report.error().message(), HasSubstr("did you mean 'digits'?"));
}

TEST(Check, BuiltInTasksAreSound) {
  const SystemClock clock;
  for (const char* name : {"arithmetic", "countdown", "guess", "poker"}) {
    CheckOptions options;
    options.name = name;
    options.options_json = "{}";
    options.time = std::chrono::seconds(3);
    const auto report = check_adapter(options, clock);
    ASSERT_TRUE(report) << report.error().message();
    for (const Finding& f : report->findings)
      EXPECT_FALSE(f.wrong) << name << ": " << f.check << ": " << f.what << " [" << f.response << "]";
  }
}

}  // namespace
}  // namespace echoline::data_plane

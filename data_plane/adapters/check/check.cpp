// Implements check_adapter() for `echoline adapter check`: the checks of responses, episodes, threads and speed.
#include "data_plane/adapters/check/check.hpp"

#include <algorithm>
#include <cmath>
#include <set>
#include <thread>

#include "base/random.hpp"
#include "base/text.hpp"
#include "data_plane/adapters/check/findings.hpp"
#include "data_plane/adapters/check/probes.hpp"
#include "data_plane/adapters/check/problems.hpp"
#include "data_plane/adapters/check/speed.hpp"
#include "data_plane/adapters/kinds.hpp"

namespace echoline::data_plane {
namespace {

using nlohmann::json;

constexpr Duration kCheapScoreMax = std::chrono::seconds(1), kRecoveryTimeout = std::chrono::seconds(10);
constexpr Duration kRecoveryRetryInterval = std::chrono::milliseconds(20);
constexpr std::size_t kPartNameBytesShown = 40, kObservationBytesShown = 60, kErrorBytesShown = 160;
// The most problems that a check tries (Max), and the fewest that it tries even if the time is spent (Min).
constexpr std::size_t kResponseProblemsMax = 8, kEpisodeProblemsMax = 16;
constexpr std::size_t kDemonstrationsMin = 8, kThreadQuestionsMin = 3;
constexpr std::size_t kLongEpisodeTurns = 64;  // a longer episode is played no further once the time is spent
// Shares of the whole time, after which each check tries no more.
constexpr double kResponsesUntilShare = 0.6, kEpisodesUntilShare = 0.8, kThreadsUntilShare = 0.9;
// Each of these checks takes at most the whole time divided by this number.
constexpr int kDemonstrationsDivisor = 3, kConcurrentDivisor = 8, kSpeedDivisor = 10;

std::string score_text(const Score& score) {
  std::string parts;
  for (const auto& [name, value] : score.components)
    parts += fmt::format(" {}={}", printable(name, kPartNameBytesShown), value);
  return fmt::format("{}{}{}", score.reward, score.correct ? " correct" : "", parts);
}

std::string text_of(const Result<Step>& step) {
  if (!step) return "an error (" + printable(step.error().message(), kErrorBytesShown) + ")";
  if (step->done) return score_text(step->score);
  return fmt::format("{}, then '{}'", score_text(step->score),
                     printable(step->observation.text, kObservationBytesShown));
}

bool is_same_step(const Result<Step>& a, const Result<Step>& b) {
  if (!a || !b) return a.has_value() == b.has_value();
  return a->score.reward == b->score.reward && a->score.correct == b->score.correct &&
         a->score.components == b->score.components && a->done == b->done &&
         (a->done || a->observation == b->observation);
}

// Whether the error shows that the task's program ended, hung or sent an invalid answer. Otherwise the program itself
// has reported the error.
bool task_broke(const Error& error) {
  switch (error.code) {
    case Code::kInvalid:
      return false;
    case Code::kUnavailable:
      return error.operation != "task" && error.operation != "score";
    default:
      return true;
  }
}

class Check {
 public:
  Check(const CheckOptions& options, const Clock& clock)
      : options_(options), clock_(clock), findings_(options.before_call) {}

  Result<CheckReport> run() {
    ECHO_TRY(make_instances());
    problems_ = check_problems(findings_, options_, *adapter_, second_instance_.get());
    if (!problems_.empty()) {
      check_held_out(findings_, options_, clock_, *adapter_, second_instance_.get());
      check_demonstrations();
      check_responses();
      check_episodes();
      check_threads();
      check_speed();
    }
    findings_.report.facts["seconds"] = seconds(clock_.now() - start_);
    return std::move(findings_.report);
  }

 private:
  using AdapterPtr = std::unique_ptr<Adapter>;

  Status make_instances() {
    const auto make_instance = [this](std::string_view options, AdapterUse use) -> Result<AdapterPtr> {
      if (options_.make) return options_.make(options, use);
      return make_adapter(options_.name, options, options_.seed, use);
    };
    findings_.announce_call("making the task");
    ECHO_ASSIGN(adapter_, make_instance(options_.options_json, AdapterUse::kProblems));
    findings_.report.facts["start_seconds"] = seconds(clock_.now() - start_);
    repeatable_ = adapter_->repeatable({}) != Repeatable::kNot;  // {}: no certain problem
    findings_.report.facts["repeatable"] = to_string(adapter_->repeatable({}));
    findings_.announce_call("making it once more");
    if (auto again = make_instance(options_.options_json, AdapterUse::kProblems))
      second_instance_ = *std::move(again);
    else
      findings_.add_error("problems",
                          fmt::format("a second instance of the task cannot be made: {}", again.error().message()));
    findings_.announce_call("making a worker's copy");
    if (auto copy = make_instance(adapter_->options_for_workers(options_.options_json), AdapterUse::kScoring))
      worker_copy_ = *std::move(copy);
    else
      findings_.add_error("worker", fmt::format("a worker's copy cannot be made: {}", copy.error().message()));
    return ok();
  }

  Result<Step> first_step(const Adapter& adapter, const Problem& problem, const std::string& response,
                          std::string_view what) {
    findings_.announce_call(what, problem.id(), Findings::printable_response(response));
    ++first_step_count_;
    auto episode = adapter.begin(problem, options_.seed);
    if (!episode) return std::move(episode).error();
    return step_and_wait(**episode, response);
  }

  // Runs the first step of a response and checks its score.
  Result<Step> check_first_step(const Problem& problem, const Probe& probe) {
    const TimePoint started_at = clock_.now();
    auto step = first_step(*adapter_, problem, probe.text, probe.what);
    const Duration step_time = clock_.now() - started_at;
    slowest_step_ = std::max(slowest_step_, step_time);
    if (step_time > kCheapScoreMax && adapter_->repeatable(problem) == Repeatable::kCheaply)
      findings_.add_note("speed",
                         fmt::format("{} takes {:.1f} s, although the task declares that scoring takes microseconds",
                                     probe.what, seconds(step_time)),
                         problem.id(), probe.text);
    check_step(step, problem, probe.text, probe.plain, probe.what);
    return step;
  }

  // Checks the result of a response. `plain`: every task should be able to score the response, so a failure is an
  // error.
  void check_step(const Result<Step>& step, const Problem& problem, const std::string& response, bool plain,
                  std::string_view what) {
    if (!step) {
      ++failed_step_count_;
      const Error& error = step.error();
      if (error.detail.empty())
        findings_.add_error("failures", fmt::format("no error message, at {}", what), problem.id(), response);
      else if (task_broke(error))
        findings_.add_error("breaks", fmt::format("at {}: {}", what, error.message()), problem.id(), response);
      else if (plain)
        findings_.add_error("failures", fmt::format("at {}: {}", what, error.message()), problem.id(), response);
      else
        findings_.add_note("failures",
                           fmt::format("scoring failed, so the rollout is returned, at {}: {}", what, error.message()),
                           problem.id(), response);
      return;
    }
    check_score(step->score, problem, response);
    if (!step->done && step->observation.text.size() > kPromptBytesMax)
      findings_.add_error("episodes",
                          fmt::format("an observation has {} bytes, at most {} are allowed",
                                      step->observation.text.size(), kPromptBytesMax),
                          problem.id(), response);
    if (!step->done && !is_utf8(step->observation.text))
      findings_.add_error("episodes", "an observation is not UTF-8", problem.id(), response);
  }

  void check_score(const Score& score, const Problem& problem, const std::string& response) {
    const TrajectoryLimits limits;
    if (!std::isfinite(score.reward))
      findings_.add_error("rewards", fmt::format("its reward is {}, expected a finite number", score.reward),
                          problem.id(), response);
    if (score.components.size() > limits.components_max)
      findings_.add_error("rewards",
                          fmt::format("its reward has {} parts, at most {} are allowed", score.components.size(),
                                      limits.components_max),
                          problem.id(), response);
    for (const auto& [name, value] : score.components) {
      if (name.empty() || name.size() > limits.name_bytes_max)
        findings_.add_error("rewards",
                            fmt::format("a part of its reward has a name of {} bytes, expected 1 to {}", name.size(),
                                        limits.name_bytes_max),
                            problem.id(), response);
      if (!std::isfinite(value))
        findings_.add_error("rewards",
                            fmt::format("the part '{}' of its reward is {}, expected a finite number",
                                        printable(name, kPartNameBytesShown), value),
                            problem.id(), response);
    }
    rewards_.insert(std::isfinite(score.reward) ? score.reward : 0);  // a set cannot order NaN
  }

  // Reports that a result is not repeatable. `when` ends a sentence such as "it was worth 1, and 0 the second time".
  void report_difference(const char* check, std::string_view when, const Result<Step>& first, const Result<Step>& again,
                         const Problem& problem, const std::string& response) {
    ++difference_count_;
    if (!repeatable_ || scores_differ_) return;
    // A score that differs between two runs differs in the other checks too, so only the first difference is reported.
    scores_differ_ = check == std::string_view("scores");
    findings_.add_error(check,
                        fmt::format("not repeatable although the task declares it: {}, and {} {}", text_of(first),
                                    text_of(again), when),
                        problem.id(), response);
  }

  // Waits until a task whose program has ended works again: the adapter restarts the program after a pause.
  bool wait_for_recovery(const Problem& problem) {
    findings_.announce_call("waiting for the task to recover", problem.id());
    for (const TimePoint deadline = clock_.now() + kRecoveryTimeout;;) {
      auto episode = adapter_->begin(problem, options_.seed);
      if (episode && step_and_wait(**episode, "42")) return true;
      if (clock_.now() >= deadline) return false;
      std::this_thread::sleep_for(kRecoveryRetryInterval);
    }
  }

  // A demonstration should be a correct response.
  void check_demonstrations() {
    std::uint64_t tried = 0, correct = 0, unfinished = 0;
    Finding first_incorrect;
    for (const Problem& problem : problems_) {
      if (tried >= kDemonstrationsMin && clock_.now() - start_ > options_.time / kDemonstrationsDivisor) break;
      findings_.announce_call("requesting a demonstration", problem.id());
      const auto demonstration = adapter_->demonstration(problem);
      if (!demonstration) continue;
      const auto step = first_step(*adapter_, problem, *demonstration, "its demonstration");
      check_step(step, problem, *demonstration, /*plain=*/true, "its demonstration");
      if (step && !step->done) ++unfinished;
      if (!step || !step->done) continue;
      ++tried;
      if (step->score.correct)
        ++correct;
      else if (first_incorrect.problem.empty())
        first_incorrect = {.check = "demonstrations",
                           .wrong = true,
                           .what = text_of(step),
                           .problem = problem.id(),
                           .response = Findings::printable_response(*demonstration)};
    }
    findings_.report.facts["demonstrations"] = {
        {"tried", tried}, {"correct", correct}, {"first_of_many_turns", unfinished}};
    if (correct == tried || unfinished > 0) return;  // a first turn may be good without being correct
    first_incorrect.wrong = correct == 0;            // if some are correct, the others may be intended
    first_incorrect.what = fmt::format("{} of {} demonstrations are not correct; the first is worth {}",
                                       tried - correct, tried, first_incorrect.what);
    findings_.add(std::move(first_incorrect));
  }

  // Scores from several threads must be those from one.
  void check_threads() {
    std::vector<std::pair<const Problem*, std::string>> questions;
    for (std::size_t i = 0; i < problems_.size(); ++i) {
      const Problem& next_problem = problems_[(i + 1) % problems_.size()];
      for (const std::string& response : {problems_[i].reference(), next_problem.reference(), std::string("42")})
        questions.emplace_back(&problems_[i], response);
    }
    std::vector<Result<Step>> sequential_steps;
    for (const auto& [problem, response] : questions) {
      if (sequential_steps.size() >= kThreadQuestionsMin && spent_more_than(kThreadsUntilShare)) break;
      sequential_steps.push_back(first_step(*adapter_, *problem, response, "a plain response"));
    }
    questions.erase(questions.begin() + static_cast<std::ptrdiff_t>(sequential_steps.size()), questions.end());
    std::vector<std::vector<std::pair<std::size_t, Result<Step>>>> concurrent_steps(options_.threads);
    findings_.announce_call(fmt::format("scoring from {} threads at once", options_.threads));
    {
      std::vector<std::thread> threads;
      const TimePoint deadline = clock_.now() + options_.time / kConcurrentDivisor;
      for (std::size_t thread_index = 0; thread_index < options_.threads; ++thread_index)
        threads.emplace_back([&, thread_index] {
          for (std::size_t i = 0; i < questions.size() && (i < kThreadQuestionsMin || clock_.now() < deadline); ++i) {
            // Each thread starts elsewhere, so that different questions are scored at the same time.
            const std::size_t question = (i + thread_index * questions.size() / options_.threads) % questions.size();
            auto episode = adapter_->begin(*questions[question].first, options_.seed);
            concurrent_steps[thread_index].emplace_back(
                question,
                episode ? step_and_wait(**episode, questions[question].second) : Result<Step>(episode.error()));
            (void)adapter_->problem(i % options_.problems);  // problems are requested meanwhile, too
          }
        });
      for (std::thread& thread : threads) thread.join();
    }
    for (const auto& thread : concurrent_steps)
      for (const auto& [question, step] : thread) {
        ++first_step_count_;
        if (!is_same_step(sequential_steps[question], step))
          report_difference("threads", fmt::format("from one of {} threads", options_.threads),
                            sequential_steps[question], step, *questions[question].first, questions[question].second);
      }
    findings_.report.facts["threads"] = options_.threads;
  }

  // Scores every kind of response: plain, hostile, a second time, and by a worker's copy.
  void check_responses() {
    std::uint64_t kinds_tried = 0, problems_tried = 0;
    const std::size_t rounds = std::min(problems_.size(), kResponseProblemsMax);
    for (std::size_t i = 0; i < rounds && !(i > 0 && spent_more_than(kResponsesUntilShare)); ++i, ++problems_tried) {
      const Problem& problem = problems_[i];
      const auto probes = probes_for(*adapter_, problem, problems_[(i + 1) % problems_.size()]);
      std::uint64_t tried = 0;
      for (const Probe& probe : probes) {
        // The plain responses to the first problem are always tried.
        if (spent_more_than(kResponsesUntilShare) && !(i == 0 && probe.plain)) break;
        ++tried;
        const auto first = check_first_step(problem, probe);
        if (!first && task_broke(first.error())) {  // not tried a second time: it might hang just as long
          if (wait_for_recovery(problem)) continue;
          findings_.add_error("breaks", "the task did not recover after that; other responses were not tried",
                              problem.id(), probe.text);
          break;
        }
        const auto again = first_step(*adapter_, problem, probe.text, probe.what);
        if (!is_same_step(first, again))
          report_difference("scores", "the second time", first, again, problem, probe.text);
        if (!worker_copy_) continue;
        const auto worker_step = first_step(*worker_copy_, problem, probe.text, probe.what);
        if (!is_same_step(first, worker_step))
          report_difference("worker", "by a worker's copy", first, worker_step, problem, probe.text);
      }
      kinds_tried = std::max(kinds_tried, tried);
      if (i == 0 && tried < probes.size())
        findings_.add_note(
            "speed",
            fmt::format("only {} of {} kinds of responses could be tried within the time; --seconds gives more", tried,
                        probes.size()));
    }
    findings_.report.facts["responses"] = {{"kinds", kinds_tried},
                                           {"problems", problems_tried},
                                           {"scores", first_step_count_},
                                           {"failed", failed_step_count_},
                                           {"differences", difference_count_},
                                           {"rewards", rewards_.size()},
                                           {"slowest_seconds", seconds(slowest_step_)}};
    if (rewards_.size() == 1)
      findings_.add_note("rewards",
                         fmt::format("every response is worth {}: there may be nothing to learn", *rewards_.begin()));
  }

  // The responses given in an episode, and the task's result of each.
  struct PlayedEpisode {
    std::vector<std::string> responses;
    std::vector<Result<Step>> steps;
    bool ended = false;
  };

  // A random response, as from an untrained policy.
  std::string random_response(const Problem& problem, Random& random) {
    switch (random.below(5)) {
      case 0:
        return std::to_string(random.below(100));
      case 1:
        return problem.reference();
      case 2:
        return adapter_->demonstration(problem).value_or("yes");
      case 3:
        return "";
      default:
        return std::string(1 + random.below(12), static_cast<char>('a' + random.below(26)));
    }
  }

  // Plays an episode with the recorded responses or, if null, with random ones.
  PlayedEpisode play(const Adapter& adapter, const Problem& problem, std::uint64_t seed,
                     const std::vector<std::string>* recorded_responses) {
    PlayedEpisode played;
    Random random(seed);
    findings_.announce_call("beginning an episode", problem.id());
    auto episode = adapter.begin(problem, seed);
    if (!episode) {
      played.steps.emplace_back(episode.error());
      return played;
    }
    while (played.steps.size() < kTurnsMax && !played.ended) {
      if (recorded_responses && played.steps.size() == recorded_responses->size()) break;
      const std::string response =
          recorded_responses ? (*recorded_responses)[played.steps.size()] : random_response(problem, random);
      findings_.announce_call(fmt::format("turn {} of an episode", played.steps.size() + 1), problem.id(),
                              Findings::printable_response(response));
      played.responses.push_back(response);
      played.steps.push_back(step_and_wait(**episode, response));
      const auto& step = played.steps.back();
      ++turn_count_;
      if (!step) break;
      played.ended = step->done;
      if (spent_more_than(/*share=*/1.0) && played.steps.size() > kLongEpisodeTurns) break;
    }
    return played;
  }

  // Reports the first turn in which a replay of an episode has another result.
  void compare_replay(const char* check, std::string_view when, const PlayedEpisode& first, const PlayedEpisode& again,
                      const Problem& problem) {
    for (std::size_t i = 0; i < first.steps.size(); ++i) {
      if (i < again.steps.size() && is_same_step(first.steps[i], again.steps[i])) continue;
      if (i >= again.steps.size()) return;  // the time was spent; a replay that ended early would differ before
      return report_difference(check, fmt::format("in turn {} of the same episode{}", i + 1, when), first.steps[i],
                               again.steps[i], problem, first.responses.at(i));
    }
  }

  // Plays whole episodes with random responses, and replays them.
  void check_episodes() {
    std::uint64_t count = 0, longest = 0;
    for (std::size_t i = 0;
         i < std::min(problems_.size(), kEpisodeProblemsMax) && !(i > 0 && spent_more_than(kEpisodesUntilShare));
         ++i, ++count) {
      const Problem& problem = problems_[i];
      const std::uint64_t seed = episode_seed(options_.seed, /*group=*/i, /*member=*/0);
      const PlayedEpisode first = play(*adapter_, problem, seed, /*recorded_responses=*/nullptr);
      longest = std::max<std::uint64_t>(longest, first.steps.size());
      for (std::size_t turn = 0; turn < first.steps.size(); ++turn)
        check_step(first.steps[turn], problem, turn < first.responses.size() ? first.responses[turn] : "",
                   /*plain=*/true, fmt::format("turn {} of an episode", turn + 1));
      if (first.steps.size() == kTurnsMax && !first.ended)
        findings_.add_error(
            "episodes", fmt::format("the episode has not ended after {} turns, the most that are allowed", kTurnsMax),
            problem.id());
      compare_replay("episodes", " played again", first, play(*adapter_, problem, seed, &first.responses), problem);
      if (worker_copy_)
        compare_replay("worker", " on a worker's copy", first, play(*worker_copy_, problem, seed, &first.responses),
                       problem);
      if (first.steps.size() > 1) {
        check_alternation(problem, seed, first);
        check_cut(problem, seed, first);
      }
      check_abandoned(problem, seed);
    }
    findings_.report.facts["episodes"] = {{"played", count}, {"turns", turn_count_}, {"longest", longest}};
  }

  // Plays two equal episodes in alternation: neither may influence the other.
  void check_alternation(const Problem& problem, std::uint64_t seed, const PlayedEpisode& first) {
    auto first_episode = adapter_->begin(problem, seed), second_episode = adapter_->begin(problem, seed);
    if (!first_episode || !second_episode) return;
    for (std::size_t turn = 0; turn < first.responses.size() && !spent_more_than(/*share=*/1.0); ++turn)
      for (auto* episode : {&first_episode, &second_episode}) {
        findings_.announce_call(fmt::format("turn {} of two episodes in alternation", turn + 1), problem.id(),
                                Findings::printable_response(first.responses[turn]));
        const auto step = step_and_wait(***episode, first.responses[turn]);
        if (!is_same_step(first.steps[turn], step))
          return report_difference("episodes",
                                   fmt::format("in turn {} when alternating with another episode", turn + 1),
                                   first.steps[turn], step, problem, first.responses[turn]);
      }
  }

  // Cuts the episode off after half of its turns, as the token limit does.
  void check_cut(const Problem& problem, std::uint64_t seed, const PlayedEpisode& first) {
    const auto cut_once = [&]() -> std::optional<Score> {
      auto episode = adapter_->begin(problem, seed);
      if (!episode) return std::nullopt;
      const std::size_t turns_before_end = first.steps.size() - 1;
      const std::size_t turns_before_cut = std::min(turns_before_end / 2 + 1, turns_before_end);
      for (std::size_t turn = 0; turn < turns_before_cut; ++turn)
        if (!step_and_wait(**episode, first.responses[turn])) return std::nullopt;
      findings_.announce_call("an episode that is cut off", problem.id());
      return (*episode)->cut();
    };
    const auto first_score = cut_once(), second_score = cut_once();
    if (!first_score || !second_score) return;
    check_score(*first_score, problem, "");
    if (first_score->reward != second_score->reward || first_score->components != second_score->components) {
      ++difference_count_;
      if (repeatable_)
        findings_.add_error(
            "episodes",
            fmt::format("not repeatable although the task declares it: cut off it is worth {}, and {} the second time",
                        score_text(*first_score), score_text(*second_score)),
            problem.id());
    }
  }

  // Destroys an episode while its step is running, as a run does with a group that it drops. It must not crash.
  void check_abandoned(const Problem& problem, std::uint64_t seed) {
    findings_.announce_call("an episode that is destroyed during a step", problem.id());
    if (auto episode = adapter_->begin(problem, seed)) (*episode)->step("42", [](const Result<Step>&) {});
  }

  void check_speed() {
    std::vector<Question> questions;
    for (const Problem& problem : problems_)
      for (const std::string& response : {problem.reference(), std::string("42")})
        questions.push_back({problem, response});
    findings_.announce_call("measuring");
    const Speed speed = measure_speed(*adapter_, questions, options_.batch, options_.time / kSpeedDivisor, clock_);
    findings_.report.facts["speed"] = {{"calls", speed.calls},   {"median_us", speed.median_us},
                                       {"p99_us", speed.p99_us}, {"max_us", speed.max_us},
                                       {"batch", speed.batch},   {"per_s", speed.per_s}};
    if (speed.failed > 0)
      findings_.add_note("speed", fmt::format("{} of {} plain responses failed during the speed measurement",
                                              speed.failed, speed.calls + speed.batched));
  }

  // Whether more than this share of the time for all checks has passed.
  bool spent_more_than(double share) const { return seconds(clock_.now() - start_) > share * seconds(options_.time); }

  const CheckOptions& options_;
  const Clock& clock_;
  const TimePoint start_ = clock_.now();
  Findings findings_;
  AdapterPtr adapter_, second_instance_;  // as the learner makes it; another with the same seed, or null
  AdapterPtr worker_copy_;                // as a worker makes it, without data files; or null
  bool repeatable_ = true;                // the task declares that scoring again gives the same score
  bool scores_differ_ = false;            // reported already
  std::vector<Problem> problems_;
  std::set<double> rewards_;
  std::uint64_t first_step_count_ = 0, failed_step_count_ = 0, difference_count_ = 0, turn_count_ = 0;
  Duration slowest_step_{};  // time of the slowest first step
};

}  // namespace

Result<CheckReport> check_adapter(const CheckOptions& options, const Clock& clock) {
  return Check(options, clock).run();
}

}  // namespace echoline::data_plane

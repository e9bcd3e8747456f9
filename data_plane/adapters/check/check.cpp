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

std::string score_text(const Score& score) {
  std::string parts;
  for (const auto& [name, value] : score.components) parts += fmt::format(" {}={}", printable(name, 40), value);
  return fmt::format("{}{}{}", score.reward, score.correct ? " correct" : "", parts);
}

std::string text_of(const Result<Step>& step) {
  if (!step) return "an error (" + printable(step.error().message(), 160) + ")";
  if (step->done) return score_text(step->score);
  return fmt::format("{}, then '{}'", score_text(step->score), printable(step->observation.text, 60));
}

bool is_same_step(const Result<Step>& a, const Result<Step>& b) {
  if (!a || !b) return a.has_value() == b.has_value();
  return a->score.reward == b->score.reward && a->score.correct == b->score.correct &&
         a->score.components == b->score.components && a->done == b->done &&
         (a->done || a->observation == b->observation);
}

// Whether the task's program ended, hung or sent an invalid answer, rather than reported the error.
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
  Check(const CheckOptions& o, const Clock& clock) : options_(o), clock_(clock), findings_(o.doing) {}

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
    findings_.doing("making the task");
    ECHO_ASSIGN(adapter_, make_instance(options_.options_json, AdapterUse::kProblems));
    findings_.report.facts["start_seconds"] = seconds(clock_.now() - start_);
    repeatable_ = adapter_->repeatable({}) != Repeatable::kNot;
    findings_.report.facts["repeatable"] = to_string(adapter_->repeatable({}));
    findings_.doing("making it once more");
    if (auto again = make_instance(options_.options_json, AdapterUse::kProblems))
      second_instance_ = *std::move(again);
    else
      findings_.add_error("problems",
                          fmt::format("a second instance of the task cannot be made: {}", again.error().message()));
    findings_.doing("making a worker's copy");
    if (auto copy = make_instance(adapter_->options_for_workers(options_.options_json), AdapterUse::kScoring))
      worker_copy_ = *std::move(copy);
    else
      findings_.add_error("worker", fmt::format("a worker's copy cannot be made: {}", copy.error().message()));
    return ok();
  }

  Result<Step> first_step(const Adapter& adapter, const Problem& problem, const std::string& response,
                          std::string_view what) {
    findings_.doing(what, problem.id(), Findings::printable_response(response));
    ++first_steps_;
    auto episode = adapter.begin(problem, options_.seed);
    if (!episode) return std::move(episode).error();
    return step_and_wait(**episode, response);
  }

  // Runs the first step of a response and checks its score.
  Result<Step> check_first_step(const Problem& problem, const Probe& probe) {
    const TimePoint before = clock_.now();
    auto step = first_step(*adapter_, problem, probe.text, probe.what);
    const Duration took = clock_.now() - before;
    slowest_ = std::max(slowest_, took);
    if (took > kCheapScoreMax && adapter_->repeatable(problem) == Repeatable::kCheaply)
      findings_.add_note("speed",
                         fmt::format("{} takes {:.1f} s, although the task declares that scoring takes microseconds",
                                     probe.what, seconds(took)),
                         problem.id(), probe.text);
    check_step(step, problem, probe.text, probe.plain, probe.what);
    return step;
  }

  void check_step(const Result<Step>& step, const Problem& problem, const std::string& response, bool plain,
                  std::string_view what) {
    if (!step) {
      ++failed_;
      const Error& error = step.error();
      if (error.detail.empty())
        findings_.add_error("failures", fmt::format("without a word, at {}", what), problem.id(), response);
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
    if (!step->done && step->observation.text.size() > kPromptBytes)
      findings_.add_error("episodes",
                          fmt::format("an observation has {} bytes, at most {} are allowed",
                                      step->observation.text.size(), kPromptBytes),
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
        findings_.add_error(
            "rewards",
            fmt::format("the part '{}' of its reward is {}, expected a finite number", printable(name, 40), value),
            problem.id(), response);
    }
    rewards_.insert(std::isfinite(score.reward) ? score.reward : 0);
  }

  void report_difference(const char* check, std::string_view when, const Result<Step>& first, const Result<Step>& again,
                         const Problem& problem, const std::string& response) {
    ++differences_;
    if (!repeatable_ || flaky_) return;
    // A score that differs between runs also differs elsewhere, so it is reported once.
    flaky_ = check == std::string_view("scores");
    findings_.add_error(check,
                        fmt::format("not repeatable although the task declares it: {}, and {} {}", text_of(first),
                                    text_of(again), when),
                        problem.id(), response);
  }

  // Waits for a program that ended to be restarted after its pause.
  bool wait_for_recovery(const Problem& problem) {
    findings_.doing("waiting for the task to recover", problem.id());
    for (const TimePoint until = clock_.now() + kRecoveryTimeout;;) {
      auto episode = adapter_->begin(problem, options_.seed);
      if (episode && step_and_wait(**episode, "42")) return true;
      if (clock_.now() >= until) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
  }

  void check_demonstrations() {
    std::uint64_t tried = 0, right = 0, first_of_many = 0;
    Finding worst;
    for (const Problem& problem : problems_) {
      if (tried >= 8 && clock_.now() - start_ > options_.time / 3) break;
      findings_.doing("requesting a demonstration", problem.id());
      const auto demonstration = adapter_->demonstration(problem);
      if (!demonstration) continue;
      const auto step = first_step(*adapter_, problem, *demonstration, "its demonstration");
      check_step(step, problem, *demonstration, true, "its demonstration");
      if (step && !step->done) ++first_of_many;
      if (!step || !step->done) continue;
      ++tried;
      if (step->score.correct)
        ++right;
      else if (worst.problem.empty())
        worst = {"demonstrations", true, text_of(step), problem.id(), Findings::printable_response(*demonstration)};
    }
    findings_.report.facts["demonstrations"] = {
        {"tried", tried}, {"correct", right}, {"first_of_many_turns", first_of_many}};
    if (right == tried || first_of_many > 0) return;  // a first turn may be good without being correct
    worst.wrong = right == 0;
    worst.what =
        fmt::format("{} of {} demonstrations are not correct; the first is worth {}", tried - right, tried, worst.what);
    findings_.add(std::move(worst));
  }

  void check_threads() {
    std::vector<std::pair<const Problem*, std::string>> questions;
    for (std::size_t i = 0; i < problems_.size(); ++i) {
      const Problem& other = problems_[(i + 1) % problems_.size()];
      for (const std::string& response : {problems_[i].reference(), other.reference(), std::string("42")})
        questions.emplace_back(&problems_[i], response);
    }
    std::vector<Result<Step>> sequential_steps;
    for (const auto& [problem, response] : questions) {
      if (sequential_steps.size() >= 3 && spent_more_than(0.9)) break;
      sequential_steps.push_back(first_step(*adapter_, *problem, response, "a plain response"));
    }
    questions.erase(questions.begin() + static_cast<std::ptrdiff_t>(sequential_steps.size()), questions.end());
    std::vector<std::vector<std::pair<std::size_t, Result<Step>>>> concurrent_steps(options_.threads);
    findings_.doing(fmt::format("scoring from {} threads at once", options_.threads));
    {
      std::vector<std::thread> threads;
      const TimePoint deadline = clock_.now() + options_.time / 8;
      for (std::size_t t = 0; t < options_.threads; ++t)
        threads.emplace_back([&, t] {
          for (std::size_t i = 0; i < questions.size() && (i < 3 || clock_.now() < deadline); ++i) {
            const std::size_t question = (i + t * questions.size() / options_.threads) % questions.size();
            auto episode = adapter_->begin(*questions[question].first, options_.seed);
            concurrent_steps[t].emplace_back(question, episode ? step_and_wait(**episode, questions[question].second)
                                                               : Result<Step>(episode.error()));
            (void)adapter_->problem(i % options_.problems);
          }
        });
      for (std::thread& thread : threads) thread.join();
    }
    for (const auto& thread : concurrent_steps)
      for (const auto& [question, step] : thread) {
        ++first_steps_;
        if (!is_same_step(sequential_steps[question], step))
          report_difference("threads", fmt::format("from one of {} threads", options_.threads),
                            sequential_steps[question], step, *questions[question].first, questions[question].second);
      }
    findings_.report.facts["threads"] = options_.threads;
  }

  void check_responses() {
    std::uint64_t kinds = 0, problems_tried = 0;
    const std::size_t rounds = std::min<std::size_t>(problems_.size(), 8);
    for (std::size_t i = 0; i < rounds && !(i > 0 && spent_more_than(0.6)); ++i, ++problems_tried) {
      const Problem& problem = problems_[i];
      const auto probes = probes_for(*adapter_, problem, problems_[(i + 1) % problems_.size()]);
      std::uint64_t tried = 0;
      for (const Probe& probe : probes) {
        if (spent_more_than(0.6) && !(i == 0 && probe.plain)) break;
        ++tried;
        const auto first = check_first_step(problem, probe);
        if (!first && task_broke(first.error())) {  // it would hang just as long again
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
      kinds = std::max(kinds, tried);
      if (i == 0 && tried < probes.size())
        findings_.add_note(
            "speed",
            fmt::format("only {} of {} kinds of responses could be tried within the time; --seconds gives more", tried,
                        probes.size()));
    }
    findings_.report.facts["responses"] = {{"kinds", kinds},
                                           {"problems", problems_tried},
                                           {"scores", first_steps_},
                                           {"failed", failed_},
                                           {"differences", differences_},
                                           {"rewards", rewards_.size()},
                                           {"slowest_seconds", seconds(slowest_)}};
    if (rewards_.size() == 1)
      findings_.add_note("rewards",
                         fmt::format("every response is worth {}: there may be nothing to learn", *rewards_.begin()));
  }

  struct Played {
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

  Played play(const Adapter& adapter, const Problem& problem, std::uint64_t seed,
              const std::vector<std::string>* recorded_responses) {
    Played played;
    Random random(seed);
    findings_.doing("beginning an episode", problem.id());
    auto episode = adapter.begin(problem, seed);
    if (!episode) {
      played.steps.emplace_back(episode.error());
      return played;
    }
    while (played.steps.size() < kTurnsMax && !played.ended) {
      if (recorded_responses && played.steps.size() == recorded_responses->size()) break;
      const std::string response =
          recorded_responses ? (*recorded_responses)[played.steps.size()] : random_response(problem, random);
      findings_.doing(fmt::format("turn {} of an episode", played.steps.size() + 1), problem.id(),
                      Findings::printable_response(response));
      played.responses.push_back(response);
      played.steps.push_back(step_and_wait(**episode, response));
      const auto& step = played.steps.back();
      ++turns_;
      if (!step) break;
      played.ended = step->done;
      if (spent_more_than(1.0) && played.steps.size() > 64) break;
    }
    return played;
  }

  void compare_replay(const char* check, std::string_view when, const Played& first, const Played& again,
                      const Problem& problem) {
    for (std::size_t i = 0; i < first.steps.size(); ++i) {
      if (i < again.steps.size() && is_same_step(first.steps[i], again.steps[i])) continue;
      if (i >= again.steps.size()) return;
      return report_difference(check, fmt::format("in turn {} of the same episode{}", i + 1, when), first.steps[i],
                               again.steps[i], problem, first.responses.at(i));
    }
  }

  void check_episodes() {
    std::uint64_t count = 0, longest = 0;
    for (std::size_t i = 0; i < std::min<std::size_t>(problems_.size(), 16) && !(i > 0 && spent_more_than(0.8));
         ++i, ++count) {
      const Problem& problem = problems_[i];
      const std::uint64_t seed = episode_seed(options_.seed, i, 0);
      const Played first = play(*adapter_, problem, seed, nullptr);
      longest = std::max<std::uint64_t>(longest, first.steps.size());
      for (std::size_t t = 0; t < first.steps.size(); ++t)
        check_step(first.steps[t], problem, t < first.responses.size() ? first.responses[t] : "", true,
                   fmt::format("turn {} of an episode", t + 1));
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
    findings_.report.facts["episodes"] = {{"played", count}, {"turns", turns_}, {"longest", longest}};
  }

  // Plays two equal episodes in alternation: neither may influence the other.
  void check_alternation(const Problem& problem, std::uint64_t seed, const Played& first) {
    auto one = adapter_->begin(problem, seed), other = adapter_->begin(problem, seed);
    if (!one || !other) return;
    for (std::size_t t = 0; t < first.responses.size() && !spent_more_than(1.0); ++t)
      for (auto* episode : {&one, &other}) {
        findings_.doing(fmt::format("turn {} of two episodes in alternation", t + 1), problem.id(),
                        Findings::printable_response(first.responses[t]));
        const auto step = step_and_wait(***episode, first.responses[t]);
        if (!is_same_step(first.steps[t], step))
          return report_difference("episodes", fmt::format("in turn {} when alternating with another episode", t + 1),
                                   first.steps[t], step, problem, first.responses[t]);
      }
  }

  // Cuts the episode off, as if no room were left after some turns.
  void check_cut(const Problem& problem, std::uint64_t seed, const Played& first) {
    const auto cut_once = [&]() -> std::optional<Score> {
      auto episode = adapter_->begin(problem, seed);
      if (!episode) return std::nullopt;
      for (std::size_t t = 0; t < (first.steps.size() - 1) / 2 + 1 && t < first.steps.size() - 1; ++t)
        if (!step_and_wait(**episode, first.responses[t])) return std::nullopt;
      findings_.doing("an episode that is cut off", problem.id());
      return (*episode)->cut();
    };
    const auto one = cut_once(), again = cut_once();
    if (!one || !again) return;
    check_score(*one, problem, "");
    if (one->reward != again->reward || one->components != again->components) {
      ++differences_;
      if (repeatable_)
        findings_.add_error(
            "episodes",
            fmt::format("not repeatable although the task declares it: cut off it is worth {}, and {} the second time",
                        score_text(*one), score_text(*again)),
            problem.id());
    }
  }

  // Destroys an episode while its step is running.
  void check_abandoned(const Problem& problem, std::uint64_t seed) {
    findings_.doing("an episode that is destroyed during a step", problem.id());
    if (auto episode = adapter_->begin(problem, seed)) (*episode)->step("42", [](const Result<Step>&) {});
  }

  void check_speed() {
    std::vector<Question> questions;
    for (const Problem& problem : problems_)
      for (const std::string& response : {problem.reference(), std::string("42")})
        questions.push_back({problem, response});
    findings_.doing("measuring");
    const Speed s = measure_speed(*adapter_, questions, options_.batch, options_.time / 10, clock_);
    findings_.report.facts["speed"] = {{"calls", s.calls},   {"median_us", s.median_us}, {"p99_us", s.p99_us},
                                       {"max_us", s.max_us}, {"batch", s.batch},         {"per_s", s.per_s}};
    if (s.failed > 0)
      findings_.add_note("speed", fmt::format("{} of {} plain responses failed during the speed measurement", s.failed,
                                              s.calls + s.batched));
  }

  bool spent_more_than(double share) const { return seconds(clock_.now() - start_) > share * seconds(options_.time); }

  const CheckOptions& options_;
  const Clock& clock_;
  const TimePoint start_ = clock_.now();
  Findings findings_;
  AdapterPtr adapter_, second_instance_, worker_copy_;
  bool repeatable_ = true, flaky_ = false;
  std::vector<Problem> problems_;
  std::set<double> rewards_;
  std::uint64_t first_steps_ = 0, failed_ = 0, differences_ = 0, turns_ = 0;
  Duration slowest_{};
};

}  // namespace

Result<CheckReport> check_adapter(const CheckOptions& options, const Clock& clock) {
  return Check(options, clock).run();
}

}  // namespace echoline::data_plane

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

constexpr Duration kSlow = std::chrono::seconds(1), kComesBack = std::chrono::seconds(10);

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

bool same(const Result<Step>& a, const Result<Step>& b) {
  if (!a || !b) return a.has_value() == b.has_value();
  return a->score.reward == b->score.reward && a->score.correct == b->score.correct &&
         a->score.components == b->score.components && a->done == b->done &&
         (a->done || a->observation == b->observation);
}

// Whether the error is not one that the task reported: its program ended, hung or sent an invalid answer.
bool broke(const Error& error) {
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
  Check(const CheckOptions& o, const Clock& clock) : o_(o), clock_(clock), found_(o.doing) {}

  Result<CheckReport> run() {
    ECHO_TRY(make());
    problems_ = check_problems(found_, o_, *a_, b_.get());
    if (!problems_.empty()) {
      check_held_out(found_, o_, clock_, *a_, b_.get());
      demonstrations();
      responses();
      episodes();
      from_threads();
      speed();
    }
    found_.report.facts["seconds"] = seconds(clock_.now() - start_);
    return std::move(found_.report);
  }

 private:
  using Made = std::unique_ptr<Adapter>;

  Status make() {
    const auto making = [this](std::string_view options, AdapterUse use) -> Result<Made> {
      if (o_.make) return o_.make(options, use);
      return make_adapter(o_.name, options, o_.seed, use);
    };
    found_.doing("making the task");
    ECHO_ASSIGN(a_, making(o_.options_json, AdapterUse::kProblems));
    found_.report.facts["start_seconds"] = seconds(clock_.now() - start_);
    repeatable_ = a_->repeatable({}) != Repeatable::kNot;
    found_.report.facts["repeatable"] = to_string(a_->repeatable({}));
    found_.doing("making it once more");
    if (auto again = making(o_.options_json, AdapterUse::kProblems))
      b_ = *std::move(again);
    else
      found_.wrong("problems",
                   fmt::format("a second instance of the task cannot be made: {}", again.error().message()));
    found_.doing("making a worker's copy");
    if (auto copy = making(a_->options_for_workers(o_.options_json), AdapterUse::kScoring))
      worker_ = *std::move(copy);
    else
      found_.wrong("worker", fmt::format("a worker's copy cannot be made: {}", copy.error().message()));
    return ok();
  }

  Result<Step> first_step(const Adapter& adapter, const Problem& problem, const std::string& response,
                          std::string_view what) {
    found_.doing(what, problem.id(), found_.shown(response));
    ++asked_;
    auto episode = adapter.begin(problem, o_.seed);
    if (!episode) return std::move(episode).error();
    return step_and_wait(**episode, response);
  }

  // Runs the first step of a response and checks its score.
  Result<Step> looked_at(const Problem& problem, const Probe& probe) {
    const TimePoint before = clock_.now();
    auto step = first_step(*a_, problem, probe.text, probe.what);
    const Duration took = clock_.now() - before;
    slowest_ = std::max(slowest_, took);
    if (took > kSlow && a_->repeatable(problem) == Repeatable::kCheaply)
      found_.note("speed",
                  fmt::format("{} takes {:.1f} s, although the task declares that scoring takes microseconds",
                              probe.what, seconds(took)),
                  problem.id(), probe.text);
    sound_step(step, problem, probe.text, probe.plain, probe.what);
    return step;
  }

  void sound_step(const Result<Step>& step, const Problem& problem, const std::string& response, bool plain,
                  std::string_view what) {
    if (!step) {
      ++failed_;
      const Error& error = step.error();
      if (error.detail.empty())
        found_.wrong("failures", fmt::format("without a word, at {}", what), problem.id(), response);
      else if (broke(error))
        found_.wrong("breaks", fmt::format("at {}: {}", what, error.message()), problem.id(), response);
      else if (plain)
        found_.wrong("failures", fmt::format("at {}: {}", what, error.message()), problem.id(), response);
      else
        found_.note("failures",
                    fmt::format("scoring failed, so the rollout is returned, at {}: {}", what, error.message()),
                    problem.id(), response);
      return;
    }
    sound(step->score, problem, response);
    if (!step->done && step->observation.text.size() > kPromptBytes)
      found_.wrong("episodes",
                   fmt::format("an observation has {} bytes, at most {} are allowed", step->observation.text.size(),
                               kPromptBytes),
                   problem.id(), response);
    if (!step->done && !utf8(step->observation.text))
      found_.wrong("episodes", "an observation is not UTF-8", problem.id(), response);
  }

  void sound(const Score& score, const Problem& problem, const std::string& response) {
    const TrajectoryLimits limits;
    if (!std::isfinite(score.reward))
      found_.wrong("rewards", fmt::format("its reward is {}, expected a finite number", score.reward), problem.id(),
                   response);
    if (score.components.size() > limits.components_max)
      found_.wrong("rewards",
                   fmt::format("its reward has {} parts, at most {} are allowed", score.components.size(),
                               limits.components_max),
                   problem.id(), response);
    for (const auto& [name, value] : score.components) {
      if (name.empty() || name.size() > limits.name_bytes_max)
        found_.wrong("rewards",
                     fmt::format("a part of its reward has a name of {} bytes, expected 1 to {}", name.size(),
                                 limits.name_bytes_max),
                     problem.id(), response);
      if (!std::isfinite(value))
        found_.wrong(
            "rewards",
            fmt::format("the part '{}' of its reward is {}, expected a finite number", printable(name, 40), value),
            problem.id(), response);
    }
    rewards_.insert(std::isfinite(score.reward) ? score.reward : 0);
  }

  void differs(const char* check, std::string_view when, const Result<Step>& first, const Result<Step>& again,
               const Problem& problem, const std::string& response) {
    ++differences_;
    if (!repeatable_ || flaky_) return;
    // A score that differs between runs also differs elsewhere, so it is reported once.
    flaky_ = check == std::string_view("scores");
    found_.wrong(check,
                 fmt::format("not repeatable although the task declares it: {}, and {} {}", text_of(first),
                             text_of(again), when),
                 problem.id(), response);
  }

  // Waits for a program that ended to be restarted after its pause.
  bool recovers(const Problem& problem) {
    found_.doing("waiting for the task to recover", problem.id());
    for (const TimePoint until = clock_.now() + kComesBack;;) {
      auto episode = a_->begin(problem, o_.seed);
      if (episode && step_and_wait(**episode, "42")) return true;
      if (clock_.now() >= until) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
  }

  void demonstrations() {
    std::uint64_t tried = 0, right = 0, first_of_many = 0;
    Finding worst;
    for (const Problem& problem : problems_) {
      if (tried >= 8 && clock_.now() - start_ > o_.time / 3) break;
      found_.doing("requesting a demonstration", problem.id());
      const auto demonstration = a_->demonstration(problem);
      if (!demonstration) continue;
      const auto step = first_step(*a_, problem, *demonstration, "its demonstration");
      sound_step(step, problem, *demonstration, true, "its demonstration");
      if (step && !step->done) ++first_of_many;
      if (!step || !step->done) continue;
      ++tried;
      if (step->score.correct)
        ++right;
      else if (worst.problem.empty())
        worst = {"demonstrations", true, text_of(step), problem.id(), found_.shown(*demonstration)};
    }
    found_.report.facts["demonstrations"] = {
        {"tried", tried}, {"correct", right}, {"first_of_many_turns", first_of_many}};
    if (right == tried || first_of_many > 0) return;  // a first turn may be good without being correct
    worst.wrong = right == 0;
    worst.what =
        fmt::format("{} of {} demonstrations are not correct; the first is worth {}", tried - right, tried, worst.what);
    found_.add(std::move(worst));
  }

  void from_threads() {
    std::vector<std::pair<const Problem*, std::string>> asked;
    for (std::size_t i = 0; i < problems_.size(); ++i) {
      const Problem& other = problems_[(i + 1) % problems_.size()];
      for (const std::string& response : {problems_[i].reference(), other.reference(), std::string("42")})
        asked.emplace_back(&problems_[i], response);
    }
    std::vector<Result<Step>> alone;
    for (const auto& [problem, response] : asked) {
      if (alone.size() >= 3 && late(0.9)) break;
      alone.push_back(first_step(*a_, *problem, response, "a plain response"));
    }
    asked.erase(asked.begin() + static_cast<std::ptrdiff_t>(alone.size()), asked.end());
    std::vector<std::vector<std::pair<std::size_t, Result<Step>>>> others(o_.threads);
    found_.doing(fmt::format("scoring from {} threads at once", o_.threads));
    {
      std::vector<std::thread> threads;
      const TimePoint until = clock_.now() + o_.time / 8;
      for (std::size_t t = 0; t < o_.threads; ++t)
        threads.emplace_back([&, t] {
          for (std::size_t i = 0; i < asked.size() && (i < 3 || clock_.now() < until); ++i) {
            const std::size_t at = (i + t * asked.size() / o_.threads) % asked.size();
            auto episode = a_->begin(*asked[at].first, o_.seed);
            others[t].emplace_back(
                at, episode ? step_and_wait(**episode, asked[at].second) : Result<Step>(episode.error()));
            (void)a_->problem(i % o_.problems);
          }
        });
      for (std::thread& thread : threads) thread.join();
    }
    for (const auto& thread : others)
      for (const auto& [at, step] : thread) {
        ++asked_;
        if (!same(alone[at], step))
          differs("threads", fmt::format("from one of {} threads", o_.threads), alone[at], step, *asked[at].first,
                  asked[at].second);
      }
    found_.report.facts["threads"] = o_.threads;
  }

  void responses() {
    std::uint64_t kinds = 0, put_to = 0;
    const std::size_t rounds = std::min<std::size_t>(problems_.size(), 8);
    for (std::size_t i = 0; i < rounds && !(i > 0 && late(0.6)); ++i, ++put_to) {
      const Problem& problem = problems_[i];
      const auto probes = probes_for(*a_, problem, problems_[(i + 1) % problems_.size()]);
      std::uint64_t tried = 0;
      for (const Probe& probe : probes) {
        if (late(0.6) && !(i == 0 && probe.plain)) break;
        ++tried;
        const auto first = looked_at(problem, probe);
        if (!first && broke(first.error())) {  // it would hang just as long again
          if (recovers(problem)) continue;
          found_.wrong("breaks", "the task did not recover after that; other responses were not tried", problem.id(),
                       probe.text);
          break;
        }
        const auto again = first_step(*a_, problem, probe.text, probe.what);
        if (!same(first, again)) differs("scores", "the second time", first, again, problem, probe.text);
        if (!worker_) continue;
        const auto there = first_step(*worker_, problem, probe.text, probe.what);
        if (!same(first, there)) differs("worker", "by a worker's copy", first, there, problem, probe.text);
      }
      kinds = std::max(kinds, tried);
      if (i == 0 && tried < probes.size())
        found_.note("speed",
                    fmt::format("only {} of {} kinds of responses could be tried within the time; --seconds gives more",
                                tried, probes.size()));
    }
    found_.report.facts["responses"] = {{"kinds", kinds},
                                        {"problems", put_to},
                                        {"scores", asked_},
                                        {"failed", failed_},
                                        {"differences", differences_},
                                        {"rewards", rewards_.size()},
                                        {"slowest_seconds", seconds(slowest_)}};
    if (rewards_.size() == 1)
      found_.note("rewards",
                  fmt::format("every response is worth {}: there may be nothing to learn", *rewards_.begin()));
  }

  struct Played {
    std::vector<std::string> responses;
    std::vector<Result<Step>> steps;
    bool ended = false;
  };

  // A random response, as from an untrained policy.
  std::string guess(const Problem& problem, Random& random) {
    switch (random.below(5)) {
      case 0:
        return std::to_string(random.below(100));
      case 1:
        return problem.reference();
      case 2:
        return a_->demonstration(problem).value_or("yes");
      case 3:
        return "";
      default:
        return std::string(1 + random.below(12), static_cast<char>('a' + random.below(26)));
    }
  }

  Played play(const Adapter& adapter, const Problem& problem, std::uint64_t seed,
              const std::vector<std::string>* as_before) {
    Played played;
    Random random(seed);
    found_.doing("beginning an episode", problem.id());
    auto episode = adapter.begin(problem, seed);
    if (!episode) {
      played.steps.emplace_back(episode.error());
      return played;
    }
    while (played.steps.size() < kTurnsMax && !played.ended) {
      if (as_before && played.steps.size() == as_before->size()) break;
      const std::string response = as_before ? (*as_before)[played.steps.size()] : guess(problem, random);
      found_.doing(fmt::format("turn {} of an episode", played.steps.size() + 1), problem.id(), found_.shown(response));
      played.responses.push_back(response);
      played.steps.push_back(step_and_wait(**episode, response));
      const auto& step = played.steps.back();
      ++turns_;
      if (!step) break;
      played.ended = step->done;
      if (late(1.0) && played.steps.size() > 64) break;
    }
    return played;
  }

  void replayed(const char* check, std::string_view when, const Played& first, const Played& again,
                const Problem& problem) {
    for (std::size_t i = 0; i < first.steps.size(); ++i) {
      if (i < again.steps.size() && same(first.steps[i], again.steps[i])) continue;
      if (i >= again.steps.size()) return;
      return differs(check, fmt::format("in turn {} of the same episode{}", i + 1, when), first.steps[i],
                     again.steps[i], problem, first.responses.at(i));
    }
  }

  void episodes() {
    std::uint64_t count = 0, longest = 0;
    for (std::size_t i = 0; i < std::min<std::size_t>(problems_.size(), 16) && !(i > 0 && late(0.8)); ++i, ++count) {
      const Problem& problem = problems_[i];
      const std::uint64_t seed = episode_seed(o_.seed, i, 0);
      const Played first = play(*a_, problem, seed, nullptr);
      longest = std::max<std::uint64_t>(longest, first.steps.size());
      for (std::size_t t = 0; t < first.steps.size(); ++t)
        sound_step(first.steps[t], problem, t < first.responses.size() ? first.responses[t] : "", true,
                   fmt::format("turn {} of an episode", t + 1));
      if (first.steps.size() == kTurnsMax && !first.ended)
        found_.wrong("episodes",
                     fmt::format("the episode has not ended after {} turns, the most that are allowed", kTurnsMax),
                     problem.id());
      replayed("episodes", " played again", first, play(*a_, problem, seed, &first.responses), problem);
      if (worker_)
        replayed("worker", " on a worker's copy", first, play(*worker_, problem, seed, &first.responses), problem);
      if (first.steps.size() > 1) {
        side_by_side(problem, seed, first);
        cut(problem, seed, first);
      }
      abandoned(problem, seed);
    }
    found_.report.facts["episodes"] = {{"played", count}, {"turns", turns_}, {"longest", longest}};
  }

  // Plays two equal episodes in alternation: neither may influence the other.
  void side_by_side(const Problem& problem, std::uint64_t seed, const Played& first) {
    auto one = a_->begin(problem, seed), other = a_->begin(problem, seed);
    if (!one || !other) return;
    for (std::size_t t = 0; t < first.responses.size() && !late(1.0); ++t)
      for (auto* episode : {&one, &other}) {
        found_.doing(fmt::format("turn {} of two episodes in alternation", t + 1), problem.id(),
                     found_.shown(first.responses[t]));
        const auto step = step_and_wait(***episode, first.responses[t]);
        if (!same(first.steps[t], step))
          return differs("episodes", fmt::format("in turn {} when alternating with another episode", t + 1),
                         first.steps[t], step, problem, first.responses[t]);
      }
  }

  // Cuts the episode off, as if no room were left after some turns.
  void cut(const Problem& problem, std::uint64_t seed, const Played& first) {
    const auto cut_once = [&]() -> std::optional<Score> {
      auto episode = a_->begin(problem, seed);
      if (!episode) return std::nullopt;
      for (std::size_t t = 0; t < (first.steps.size() - 1) / 2 + 1 && t < first.steps.size() - 1; ++t)
        if (!step_and_wait(**episode, first.responses[t])) return std::nullopt;
      found_.doing("an episode that is cut off", problem.id());
      return (*episode)->cut();
    };
    const auto one = cut_once(), again = cut_once();
    if (!one || !again) return;
    sound(*one, problem, "");
    if (one->reward != again->reward || one->components != again->components) {
      ++differences_;
      if (repeatable_)
        found_.wrong(
            "episodes",
            fmt::format("not repeatable although the task declares it: cut off it is worth {}, and {} the second time",
                        score_text(*one), score_text(*again)),
            problem.id());
    }
  }

  // Destroys an episode while its step is running.
  void abandoned(const Problem& problem, std::uint64_t seed) {
    found_.doing("an episode that is destroyed during a step", problem.id());
    if (auto episode = a_->begin(problem, seed)) (*episode)->step("42", [](const Result<Step>&) {});
  }

  void speed() {
    std::vector<Question> questions;
    for (const Problem& problem : problems_)
      for (const std::string& response : {problem.reference(), std::string("42")})
        questions.push_back({problem, response});
    found_.doing("measuring");
    const Speed s = measure_speed(*a_, questions, o_.batch, o_.time / 10, clock_);
    found_.report.facts["speed"] = {{"calls", s.calls},   {"median_us", s.median_us}, {"p99_us", s.p99_us},
                                    {"max_us", s.max_us}, {"batch", s.batch},         {"per_s", s.per_s}};
    if (s.failed > 0)
      found_.note("speed", fmt::format("{} of {} plain responses failed during the speed measurement", s.failed,
                                       s.calls + s.batched));
  }

  bool late(double share) const { return seconds(clock_.now() - start_) > share * seconds(o_.time); }

  const CheckOptions& o_;
  const Clock& clock_;
  const TimePoint start_ = clock_.now();
  Findings found_;
  Made a_, b_, worker_;
  bool repeatable_ = true, flaky_ = false;
  std::vector<Problem> problems_;
  std::set<double> rewards_;
  std::uint64_t asked_ = 0, failed_ = 0, differences_ = 0, turns_ = 0;
  Duration slowest_{};
};

}  // namespace

Result<CheckReport> check_adapter(const CheckOptions& options, const Clock& clock) {
  return Check(options, clock).run();
}

}  // namespace echoline::data_plane

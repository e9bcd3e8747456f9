// The task "guess": "20-35=" asks for a number from 20 to 35. The policy receives '+' (the number is higher), '-'
// (lower) or '?' (its response was no number) and guesses again. It is the smallest task of many turns in which a
// strategy can be learned: bisection.
#include <algorithm>
#include <charconv>

#include "base/random.hpp"
#include "data_plane/adapters/adapter_config.hpp"

namespace echoline::data_plane {
namespace {

// A problem is a range of consecutive numbers, and one of them, which the policy must guess.
struct Options {
  std::uint64_t number_max = 99, range = 16, guesses = 5, evaluation_problems = 256;
  double guess_cost = 0.05;

  // The range can begin at 0 to number_max + 1 - range, and each of its numbers can be the right one.
  std::uint64_t problem_count() const { return (number_max - range + 2) * range; }

  void read(ConfigSection s, AdapterUse) {
    s.read("number_max", number_max, {.min = 9, .max = 999'999'999}, "the largest number; the least is 0");
    s.read("range", range, {.min = 2, .max = 1'000'000}, "how many consecutive numbers the prompt leaves possible");
    s.read("guesses", guesses, {.min = 1, .max = 64}, "most guesses of an episode");
    s.read("guess_cost", guess_cost, {.min = 0.0, .max = 1.0},
           "cost of every guess but the first; the right number is worth 1");
    s.read("evaluation_problems", evaluation_problems, {.min = 1, .max = 100'000},
           "problems held out of training, determined by the seed; at most half of all problems");
    if (range > number_max + 1)
      s.error("range", fmt::format("there are only {} numbers from 0 to number_max", number_max + 1));
    else if (evaluation_problems > problem_count() / 2)
      s.error("evaluation_problems",
              fmt::format("{} out of {} problems leave too few for training; raise number_max or lower it",
                          evaluation_problems, problem_count()));
  }
};

std::optional<std::uint64_t> parse_number(std::string_view text) {
  const auto begin = text.find_first_not_of(" \t\r\n");
  if (begin == std::string_view::npos) return std::nullopt;
  const auto end = text.find_last_not_of(" \t\r\n") + 1;
  std::uint64_t number = 0;
  const auto parsed = std::from_chars(text.data() + begin, text.data() + end, number);
  if (parsed.ec != std::errc{} || parsed.ptr != text.data() + end) return std::nullopt;
  return number;
}

class Guessing final : public QuickEpisode {
 public:
  Guessing(const Options& options, std::uint64_t wanted) : options_(options), wanted_(wanted) {}

  Result<Step> step_now(std::string_view response) override {
    const auto guess = parse_number(response);
    ++guesses_;
    Step step;
    step.score.correct = guess == wanted_;
    step.score.reward = (step.score.correct ? 1.0 : 0.0) - (guesses_ > 1 ? options_.guess_cost : 0.0);
    step.score.components = {
        {"guesses", 1.0}, {"found", step.score.correct ? 1.0 : 0.0}, {"no number", guess ? 0.0 : 1.0}};
    step.done = step.score.correct || guesses_ == options_.guesses;
    if (!step.done) step.observation.text.push_back(!guess ? '?' : *guess < wanted_ ? '+' : '-');
    return step;
  }

 private:
  const Options options_;
  const std::uint64_t wanted_;
  std::uint64_t guesses_ = 0;
};

class Guess final : public Adapter {
 public:
  Guess(const Options& options, std::uint64_t seed) : options_(options), shuffle_key_(mix64(seed)) {}

  std::string_view name() const override { return "guess"; }
  bool has_one_response() const override { return false; }
  Result<Problem> problem(std::uint64_t index) const override {
    return problem_at(options_.evaluation_problems +
                      shuffled_cycle(index, options_.problem_count() - options_.evaluation_problems, shuffle_key_ + 1));
  }
  std::vector<Problem> evaluation() const override {
    std::vector<Problem> problems;
    for (std::uint64_t i = 0; i < options_.evaluation_problems; ++i) problems.push_back(problem_at(i));
    return problems;
  }
  Result<std::unique_ptr<Episode>> begin(const Problem& problem, std::uint64_t) const override {
    const auto wanted = parse_number(problem.reference());
    if (!wanted)
      return fail(Code::kInvalid, "guess", "'{}': expected a number to guess, found '{}'", problem.id(),
                  problem.reference());
    return std::unique_ptr<Episode>(std::make_unique<Guessing>(options_, *wanted));
  }
  // The first guess of a bisection.
  std::optional<std::string> demonstration(const Problem& problem) const override {
    std::uint64_t low = 0;
    if (std::from_chars(problem.prompt().data(), problem.prompt().data() + problem.prompt().size(), low).ec !=
        std::errc{})
      return std::nullopt;
    return std::to_string(low + options_.range / 2);
  }

 private:
  // The problem at a position of the seeded permutation, which puts the held-out problems first.
  Problem problem_at(std::uint64_t position) const {
    const std::uint64_t number = permuted(position, options_.problem_count(), shuffle_key_);
    const std::uint64_t low = number / options_.range, wanted = low + number % options_.range;
    Problem problem;
    problem.set_id(fmt::format("guess/{}-{}/{}", low, low + options_.range - 1, wanted));
    problem.set_prompt(fmt::format("{}-{}=", low, low + options_.range - 1));
    problem.set_reference(std::to_string(wanted));
    return problem;
  }

  const Options options_;
  const std::uint64_t shuffle_key_;  // chooses the permutation of all problems; plus 1, the order of the training ones
};

}  // namespace

const BuiltIn kGuess{
    .name = "guess",
    .meaning =
        "Guess a number in several turns, with the answer '+' (higher) or '-' (lower) after each; the "
        "right number is worth 1",
    .read_options = [](ConfigSection s) { Options().read(s, AdapterUse::kProblems); },
    .make = [](std::string_view json, std::uint64_t seed, AdapterUse use) -> Result<std::unique_ptr<Adapter>> {
      ECHO_ASSIGN(const Options options, options_from_json<Options>("guess", json, use));
      return std::unique_ptr<Adapter>(std::make_unique<Guess>(options, seed));
    },
    .many_turns = true};

}  // namespace echoline::data_plane

// Several tasks in one run, combined into one adapter. Problems are drawn by weight; their ids begin with the task's
// name ("sums:arithmetic/1+2").
#include <algorithm>
#include <nlohmann/json.hpp>
#include <numeric>

#include "base/config.hpp"
#include "base/random.hpp"
#include "data_plane/adapters/adapter_config.hpp"
#include "data_plane/limits.hpp"
#include "data_plane/policy_input.hpp"

namespace echoline::data_plane {
namespace {

using nlohmann::json;

constexpr std::string_view kPromptPlaceholder = "{prompt}";
// Makes the order of the rounds independent of the order within the parts, which have the same seed. Any number that no
// part uses.
constexpr std::uint64_t kRoundOrderStream = 0x7461736b73;

// One of the tasks. A round is the shortest sequence of problems in which every part has its weight's share: with
// weights 2 and 4, a round has one problem of the first part and two of the second. A slot is a place in a round.
struct Part {
  std::string name;
  std::unique_ptr<Adapter> adapter;
  std::string adapter_name, options_json;
  std::uint64_t weight = 1;      // number of slots in a round, once Several has made the weights as small as possible
  std::uint64_t first_slot = 0;  // the part's first slot in a round
  std::string head, tail;        // text before and after each problem's prompt
  bool scored_by_workers = true;
};

class Several final : public Adapter {
 public:
  Several(std::vector<Part> parts, std::uint64_t seed)
      : parts_(std::move(parts)), shuffle_key_(mix64(seed ^ kRoundOrderStream)) {
    std::uint64_t common_divisor = 0;
    for (const Part& part : parts_) common_divisor = std::gcd(common_divisor, part.weight);
    for (Part& part : parts_) {
      part.weight /= common_divisor;
      part.first_slot = slots_per_round_;
      slots_per_round_ += part.weight;
    }
  }

  std::string_view name() const override { return kSeveralTasksAdapter; }

  // Each round has as many problems as the sum of all weights, in its own order. So each part goes through its own
  // problems without gaps, and has its share in every round.
  Result<Problem> problem(std::uint64_t index) const override {
    const std::uint64_t round = index / slots_per_round_, slot = shuffled_cycle(index, slots_per_round_, shuffle_key_);
    const auto part = std::find_if(parts_.begin(), parts_.end(), [&](const Part& candidate) {
      return slot < candidate.first_slot + candidate.weight;
    });
    ECHO_ASSIGN(Problem problem, part->adapter->problem(round * part->weight + slot - part->first_slot));
    return to_run_problem(*part, std::move(problem));
  }

  // Alternates between the parts, so that the first problems of the list come from all of them.
  std::vector<Problem> evaluation() const override {
    std::vector<std::vector<Problem>> by_part;
    std::size_t longest = 0;
    for (const Part& part : parts_) {
      by_part.push_back(part.adapter->evaluation());
      longest = std::max(longest, by_part.back().size());
    }
    std::vector<Problem> alternating;
    for (std::size_t i = 0; i < longest; ++i)
      for (std::size_t part = 0; part < parts_.size(); ++part)
        if (i < by_part[part].size())
          if (auto problem = to_run_problem(parts_[part], std::move(by_part[part][i])))
            alternating.push_back(*std::move(problem));
    return alternating;
  }

  Result<Score> score(const Problem& problem, std::string_view response) const override {
    ECHO_ASSIGN(const Part* part, part_of(problem));
    return part->adapter->score(to_part_problem(*part, problem), response);
  }
  Result<std::unique_ptr<Episode>> begin(const Problem& problem, std::uint64_t seed) const override {
    ECHO_ASSIGN(const Part* part, part_of(problem));
    return part->adapter->begin(to_part_problem(*part, problem), seed);
  }
  Repeatable repeatable(const Problem& problem) const override {
    const auto part = part_of(problem);
    return part ? (*part)->adapter->repeatable(to_part_problem(**part, problem)) : Repeatable::kNot;
  }
  std::optional<std::string> demonstration(const Problem& problem) const override {
    const auto part = part_of(problem);
    return part ? (*part)->adapter->demonstration(to_part_problem(**part, problem)) : std::nullopt;
  }

  // Includes only the parts that workers score.
  std::string options_for_workers(std::string) const override {
    json tasks = json::array();
    for (const Part& part : parts_)
      if (part.scored_by_workers)
        tasks.push_back({{"name", part.name},
                         {"adapter", part.adapter_name},
                         {"prompt", part.head + std::string(kPromptPlaceholder) + part.tail},
                         {"options", json::parse(part.adapter->options_for_workers(part.options_json), nullptr,
                                                 /*allow_exceptions=*/false)}});
    return json{{"tasks", std::move(tasks)}}.dump();
  }

 private:
  // The part's problem as the run sees it: with the part's name in its id and the part's text around its prompt.
  Result<Problem> to_run_problem(const Part& part, Problem problem) const {
    problem.set_id(fmt::format("{}:{}", part.name, problem.id()));
    if (!part.head.empty() || !part.tail.empty())
      change_user_text(problem, [&](std::string& text) { text = part.head + text + part.tail; });
    if (problem.id().size() > kProblemIdBytesMax || problem.prompt().size() > kPromptBytesMax)
      return fail(Code::kInvalid, "problem", "'{}': an id of {} bytes and a prompt of {}, expected at most {} and {}",
                  problem.id().substr(0, kProblemIdBytesMax), problem.id().size(), problem.prompt().size(),
                  kProblemIdBytesMax, kPromptBytesMax);
    return problem;
  }

  Result<const Part*> part_of(const Problem& problem) const {
    const std::string_view name = task_of(problem.id());
    for (const Part& part : parts_)
      if (part.name == name && problem.id().size() > name.size()) return &part;  // an id that is only a name has no ':'
    return fail(Code::kInvalid, "task", "'{}' belongs to no task that is scored here", problem.id());
  }

  // The inverse of to_run_problem(): the problem with the id and the prompt that the part gave it.
  static Problem to_part_problem(const Part& part, const Problem& problem) {
    Problem problem_of_part = problem;
    problem_of_part.set_id(problem.id().substr(part.name.size() + 1));
    if (part.head.empty() && part.tail.empty()) return problem_of_part;
    change_user_text(problem_of_part, [&](std::string& text) {
      if (text.size() >= part.head.size() + part.tail.size() && text.starts_with(part.head) &&
          text.ends_with(part.tail))
        text = text.substr(part.head.size(), text.size() - part.head.size() - part.tail.size());
    });
    return problem_of_part;
  }

  // Changes the text of a prompt, or the last of its messages if a user wrote it.
  template <class Change>
  static void change_user_text(Problem& problem, Change change) {
    PolicyInput input = prompt_of(problem);
    if (input.messages.empty()) {
      change(input.text);
    } else if (input.messages.back().role == "user") {
      change(input.messages.back().content);
      input = PolicyInput(std::move(input.messages));  // makes its text from the messages again
    }
    set_prompt(problem, std::move(input));
  }

  std::vector<Part> parts_;
  const std::uint64_t shuffle_key_;    // chooses the order within each round
  std::uint64_t slots_per_round_ = 0;  // number of slots in a round
};

}  // namespace

std::string_view task_of(std::string_view problem_id) { return problem_id.substr(0, problem_id.find(':')); }

std::string several_tasks_options(const std::vector<WeightedTask>& tasks) {
  json list = json::array();
  for (const WeightedTask& task : tasks)
    list.push_back({{"name", task.name},
                    {"adapter", task.adapter},
                    {"weight", task.weight},
                    {"prompt", task.prompt},
                    {"scored_by", task.scored_by_workers ? "worker" : "learner"},
                    {"options", json::parse(task.options_json, nullptr, /*allow_exceptions=*/false)}});
  return json{{"tasks", std::move(list)}}.dump();
}

Result<std::unique_ptr<Adapter>> make_several(std::string_view options_json, std::uint64_t seed, AdapterUse use) {
  ECHO_ASSIGN(ConfigFile file, ConfigFile::parse_json(options_json, "options of several tasks"));
  ConfigSection root = file.root();
  std::vector<Part> parts;
  for (ConfigSection s : root.sections("tasks")) {
    Part part;
    std::string prompt(kPromptPlaceholder);
    s.require("name", part.name);
    s.require("adapter", part.adapter_name);
    s.read("weight", part.weight, {.min = 1, .max = kTaskWeightMax});
    s.read("prompt", prompt);
    s.read_choice("scored_by", part.scored_by_workers, {{"worker", true}, {"learner", false}});
    part.options_json = s.json("options");
    const auto placeholder_begin = prompt.find(kPromptPlaceholder);
    if (placeholder_begin == std::string::npos) {
      s.error("prompt", "expected a text with {prompt} in it");
      continue;
    }
    part.head = prompt.substr(0, placeholder_begin);
    part.tail = prompt.substr(placeholder_begin + kPromptPlaceholder.size());
    parts.push_back(std::move(part));
  }
  ECHO_TRY(file.finish());
  if (parts.size() > kTasksMax)
    return fail(Code::kInvalid, "tasks", "{} tasks, at most {} are allowed", parts.size(), kTasksMax);
  if (parts.empty() && use == AdapterUse::kProblems) return fail(Code::kInvalid, "tasks", "expected at least one");
  for (Part& part : parts) {
    auto adapter = make_adapter(part.adapter_name, part.options_json, seed, use);
    if (!adapter)
      return fail(adapter.error().code, adapter.error().operation, "task '{}': {}", part.name, adapter.error().detail);
    part.adapter = *std::move(adapter);
    if (part.scored_by_workers) continue;
    // The run file's check knows only adapters that always have many turns; this one knows the options as well.
    if (const Status scorable = can_be_scored_later(*part.adapter); !scorable)
      return fail(scorable.error().code, "task.scored_by", "task '{}': {}", part.name, scorable.error().detail);
  }
  return std::unique_ptr<Adapter>(std::make_unique<Several>(std::move(parts), seed));
}

}  // namespace echoline::data_plane

// Reads the task and rollout sections of the run file. The learner reads the other sections.
#include "data_plane/settings.hpp"

#include <algorithm>
#include <set>

#include "base/config.hpp"
#include "base/names.hpp"

namespace echoline::data_plane {
namespace {

bool read_scored_by(ConfigSection& s, const std::string& adapter) {
  bool by_workers = true;
  s.read_choice(
      "scored_by", by_workers, {{"worker", true}, {"learner", false}},
      "the scorer of responses: the worker that generated them, whose scores the learner checks (worker), or the "
      "learner alone, so that workers see only a problem's prompt and none of the adapter's options (learner)");
  if (!by_workers && has_many_turns(adapter))
    s.error("scored_by",
            fmt::format("expected 'worker': {} has many turns, and its observations depend on the policy's answers",
                        adapter));
  return by_workers;
}

// `help`: describes the options in the documentation if the adapter is not known.
void read_adapter(ConfigSection& s, const std::string& adapter, std::string& options_json, ConfigDoc help) {
  const auto options = read_adapter_options(adapter, s);
  if (options) {
    options_json = *options;
  } else {
    if (!adapter.empty()) s.error("adapter", options.error().detail);
    s.json("options", help);  // without a known adapter, the options cannot be checked
  }
}

}  // namespace

void read(ConfigSection s, TaskSettings& settings, bool lists_tasks) {
  constexpr const char* kAdapterHelp = "the task: it supplies problems and scores responses; one of the adapters below";
  if (lists_tasks) {
    for (const char* key : {"adapter", "options", "scored_by"})
      if (s.has(key)) s.error(key, "applies to a run of one task, but this run lists `tasks`: set it there");
    // Reads the keys all the same, so that they are documented and not reported as unknown.
    s.read("adapter", settings.adapter, kAdapterHelp);
    s.json("options");
    read_scored_by(s, /*adapter=*/"");
  } else {
    s.require("adapter", settings.adapter, kAdapterHelp);
    settings.scored_by_workers = read_scored_by(s, settings.adapter);
    read_adapter(s, settings.adapter, settings.options_json, /*help=*/{});
  }
}

void read_list(ConfigSection root, TaskSettings& settings) {
  std::set<std::string> names;
  const bool lists_tasks = root.has("tasks");
  // Without `tasks`, these hold one empty section, from which the documentation is made.
  std::vector<ConfigSection> sections =
      root.sections("tasks",
                    "Instead of task.adapter: a list of tasks, whose problems are drawn by weight. The text around "
                    "every problem (chat, system, turn, prompt) is still in `task`.");
  if (lists_tasks && (sections.empty() || sections.size() > kTasksMax))
    root.error("tasks", fmt::format("expected 1 to {} tasks, found {}", kTasksMax, sections.size()));
  for (ConfigSection& s : sections) {
    WeightedTask task;
    s.read("adapter", task.adapter, {"as task.adapter", "it is needed"});
    if (lists_tasks && task.adapter.empty()) s.error("adapter", "expected the name of an adapter");
    task.name = task.adapter;
    s.read("name", task.name,
           {"the prefix of its problems' ids and its name in reports; unique, of letters, digits, '-', '_' and '.'",
            "`adapter`"});
    if (lists_tasks && (!has_only_name_characters(task.name) || task.name.size() > kTaskNameBytesMax))
      s.error("name", fmt::format("expected at most {} letters, digits, '-', '_' and '.', found '{}'",
                                  kTaskNameBytesMax, task.name.substr(0, 64)));
    if (lists_tasks && !task.name.empty() && !names.insert(task.name).second)
      s.error(s.has("name") ? "name" : "adapter",
              fmt::format("two tasks are called '{}': give one of them another `name`", task.name));
    s.read("weight", task.weight, {.min = 1, .max = kTaskWeightMax},
           "its share of the problems, relative to the other tasks' weights");
    s.read("prompt", task.prompt,
           "text around its problems, inside the text around all problems; {prompt} is where the problem goes");
    if (task.prompt.find("{prompt}") == std::string::npos)
      s.error("prompt", fmt::format("expected a text with {{prompt}} where the problem goes, found '{}'", task.prompt));
    task.scored_by_workers = read_scored_by(s, task.adapter);
    read_adapter(s, task.adapter, task.options_json, {"the options of this adapter, as in task.options", "none"});
    if (lists_tasks) settings.listed_tasks.push_back(std::move(task));
  }
  if (!lists_tasks) return;
  settings.adapter = kSeveralTasksAdapter;
  settings.options_json = several_tasks_options(settings.listed_tasks);
}

bool TaskSettings::scored_by_learner(std::string_view problem_id) const {
  if (listed_tasks.empty()) return !scored_by_workers;
  const std::string_view name = task_of(problem_id);
  return std::ranges::any_of(listed_tasks,
                             [&](const WeightedTask& task) { return task.name == name && !task.scored_by_workers; });
}

bool TaskSettings::any_scored_by_workers() const {
  return listed_tasks.empty()
             ? scored_by_workers
             : std::ranges::any_of(listed_tasks, [](const WeightedTask& task) { return task.scored_by_workers; });
}

void read(ConfigSection s, RolloutSettings& settings) {
  s.read("prompts_per_step", settings.prompts_per_step, {.min = 1, .max = 1'000'000}, "problems in a learner step");
  s.read("group_size", settings.group_size, {.min = 2, .max = 1024},
         "G, the responses to each problem; R = `prompts_per_step` * G trajectories make a step");
  s.read("temperature", settings.temperature, {.min = 1e-3, .max = 10.0}, "divides the logits before sampling");
  s.read("top_p", settings.top_p, {.min = 1e-3, .max = 1.0},
         "sample from the most likely tokens that together have this probability; 1: from all");
  s.read("top_k", settings.top_k, {.min = 0, .max = 1'000'000},
         "sample from at most this many of the most likely tokens; 0: from all");
  s.read("min_p", settings.min_p, {.min = 0.0, .max = 1.0},
         "sample from tokens at least this fraction as likely as the most likely one; 0: from all");
  s.read("response_tokens_max", settings.response_tokens_max, {.min = 1, .max = 1'000'000},
         "tokens at which a response is cut; in a task of many turns, of all turns and the observations between them");
  s.read("turn_tokens_max", settings.turn_tokens_max, {.min = 1, .max = 1'000'000},
         {"tokens at which one turn is cut", "the rest of the response's tokens"});
  s.read_choice(
      "on_new_policy", settings.on_new_policy,
      {{"continue", schema::ON_NEW_POLICY_CONTINUE},
       {"finish", schema::ON_NEW_POLICY_FINISH},
       {"abort", schema::ON_NEW_POLICY_ABORT}},
      "what a worker does with unfinished responses when it gets a new policy: it continues them, each token with its "
      "own version (continue), finishes them first (finish), or discards them and starts others (abort)");
  s.read("metadata_max", settings.metadata_max, {.min = Bytes{0}, .max = kMetadataLimitMax},
         "limit of a trajectory's metadata, which is stored with it; a trajectory with more is refused");
}

void RolloutSettings::write_to(schema::RunSpec& spec) const {
  spec.set_group_size(group_size);
  spec.set_temperature(temperature);
  spec.set_top_p(top_p);
  spec.set_top_k(top_k);
  spec.set_min_p(min_p);
  spec.set_on_new_policy(on_new_policy);
  spec.set_turn_tokens_max(turn_tokens_max.value_or(0));
  spec.set_response_tokens_max(response_tokens_max);
  spec.set_metadata_bytes_max(metadata_max.count);
}

}  // namespace echoline::data_plane

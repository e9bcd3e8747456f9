#include "learner/task_config.hpp"

#include <algorithm>
#include <cctype>
#include <set>

#include "data_plane/adapters/adapter.hpp"

namespace echoline::learner {
namespace {

bool read_scored_by(ConfigSection& s, const std::string& adapter) {
  bool by_workers = true;
  s.read_choice("scored_by", by_workers, {{"worker", true}, {"learner", false}},
                "who finds out what a response is worth: the worker that has generated it, which the learner checks "
                "(worker), or the learner "
                "alone, so that workers see no more of a problem than its prompt, and nothing of the adapter's options "
                "(learner)");
  if (!by_workers && data_plane::has_many_turns(adapter))
    s.error("scored_by",
            fmt::format("expected 'worker': {} has many turns, and what the policy is told depends on its answers",
                        adapter));
  return by_workers;
}

void read_adapter(ConfigSection& s, const std::string& adapter, std::string& options_json, ConfigDoc doc) {
  const auto options = data_plane::read_adapter_options(adapter, s);
  if (options) {
    options_json = *options;
  } else {
    if (!adapter.empty()) s.error("adapter", options.error().detail);
    s.json("options", doc);  // whose they are is not known
  }
}

void read_several(ConfigSection root, TaskSection& c) {
  std::set<std::string> names;
  const bool given = root.has("tasks");
  std::vector<ConfigSection> all = root.sections("tasks",
                                                 "Instead of task.adapter: a list of tasks, whose problems are drawn "
                                                 "by weight. What the model is told beside them (chat, system, turn "
                                                 "and what is around every problem) is in `task` as ever.");
  if (given && (all.empty() || all.size() > data_plane::kTasksMax))
    root.error("tasks", fmt::format("expected 1 to {} tasks, found {}", data_plane::kTasksMax, all.size()));
  for (ConfigSection& s : all) {
    data_plane::TaskOfSeveral task;
    s.read("adapter", task.adapter, {"as task.adapter", "it is needed"});
    if (given && task.adapter.empty()) s.error("adapter", "expected the name of an adapter");
    task.name = task.adapter;
    s.read("name", task.name,
           {"begins the ids of its problems and names it in reports; each another one, of letters, digits, '-', '_' "
            "and '.'",
            "`adapter`"});
    const bool plain = std::ranges::all_of(
        task.name, [](unsigned char ch) { return std::isalnum(ch) != 0 || ch == '-' || ch == '_' || ch == '.'; });
    if (given && (!plain || task.name.size() > data_plane::kTaskNameBytesMax))
      s.error("name", fmt::format("expected at most {} letters, digits, '-', '_' and '.', found '{}'",
                                  data_plane::kTaskNameBytesMax, task.name.substr(0, 64)));
    if (given && !task.name.empty() && !names.insert(task.name).second)
      s.error(s.has("name") ? "name" : "adapter",
              fmt::format("two tasks are called '{}': give one of them another `name`", task.name));
    s.read("weight", task.weight, {.min = 1, .max = data_plane::kTaskWeightMax},
           "its share of the problems, against those of the others");
    s.read("prompt", task.prompt,
           "text around its problems, inside what is around all of them; {prompt} is where the problem goes");
    if (task.prompt.find("{prompt}") == std::string::npos)
      s.error("prompt", fmt::format("expected a text with {{prompt}} where the problem goes, found '{}'", task.prompt));
    task.scored_by_workers = read_scored_by(s, task.adapter);
    read_adapter(s, task.adapter, task.options_json, {"as task.options, of this adapter", "none"});
    if (given) c.several.push_back(std::move(task));
  }
  if (!given) return;
  c.adapter = data_plane::kSeveral;
  c.options_json = data_plane::several_options(c.several);
}

void read_task(ConfigSection s, TaskSection& c, bool several) {
  constexpr const char* kAdapter =
      "the task: where problems come from and what a response is worth; one of the adapters below";
  if (several) {
    for (const char* key : {"adapter", "options", "scored_by"})
      if (s.has(key)) s.error(key, "is for a run of one task, and this one has `tasks`: say it there");
    s.read("adapter", c.adapter, kAdapter);
    s.json("options");
    read_scored_by(s, "");
  } else {
    s.require("adapter", c.adapter, kAdapter);
    c.scored_by_workers = read_scored_by(s, c.adapter);
    read_adapter(s, c.adapter, c.options_json, {});
  }
  s.read("prompt", c.prompt, "text around a problem; {prompt} is where the problem goes");
  if (c.prompt.find("{prompt}") == std::string::npos)
    s.error("prompt", fmt::format("expected a text with {{prompt}} where the problem goes, found '{}'", c.prompt));
  s.read("turn", c.turn,
         "without `chat`: text around what the policy is told between two turns; {observation} is where that goes");
  if (c.turn.find("{observation}") == std::string::npos)
    s.error("turn", fmt::format("expected a text with {{observation}} where that goes, found '{}'", c.turn));
  s.read("chat", c.chat,
         "put it into the model's chat template, as the message of a user, with the beginning of an answer");
  s.read("system", c.system, "a message before it; needs `chat`");
  c.chat_options_json = s.json("chat_options", "more names for the chat template, such as {enable_thinking: false}");
  if (!c.system.empty() && !c.chat) s.error("system", "is a message of a chat: set task.chat as well");
  if (c.chat_options_json != "{}" && !c.chat) s.error("chat_options", "are for a chat: set task.chat as well");
}

}  // namespace

void read_tasks(ConfigSection root, TaskSection& task) {
  read_task(root.section("task", "What the model learns."), task, root.has("tasks"));
  read_several(root, task);
}

bool TaskSection::scored_by_learner(std::string_view problem_id) const {
  if (several.empty()) return !scored_by_workers;
  const std::string_view name = data_plane::task_of(problem_id);
  return std::ranges::any_of(
      several, [&](const data_plane::TaskOfSeveral& task) { return task.name == name && !task.scored_by_workers; });
}

}  // namespace echoline::learner

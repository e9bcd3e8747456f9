// echoline adapter list: lists the built-in task adapters, or shows the options of one.
#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/config_reference.hpp"
#include "cli/adapter_verbs.hpp"
#include "cli/live_table.hpp"
#include "cli/output.hpp"
#include "cli/verbs.hpp"
#include "data_plane/adapters/kinds.hpp"
#include "learner/run_config.hpp"

namespace echoline::cli {
namespace {

using data_plane::AdapterKind;
using nlohmann::json;

constexpr std::size_t kWideColumns = 100;     // screens this wide show the meaning in a column beside the facts
constexpr std::size_t kDefaultColumns = 120;  // without a terminal

struct Arguments {
  std::string name;
  bool as_json = false;
};

// The columns of the list. "varies": the task's own options or program decide.
std::string turns_text(const AdapterKind& kind) {
  return !kind.many_turns ? "varies" : *kind.many_turns ? "many" : "one";
}
std::string repeatable_text(const AdapterKind& kind) {
  return kind.repeatable ? std::string(to_string(*kind.repeatable)) : "varies";
}
std::string needs_text(const AdapterKind& kind) {
  return kind.needs_file && kind.needs_sandbox ? "file, sandbox"
         : kind.needs_file                     ? "file"
         : kind.needs_sandbox                  ? "sandbox"
                                               : "-";
}

json as_json(const AdapterKind& kind) {
  return {{"name", kind.name},
          {"meaning", kind.meaning},
          {"turns", kind.many_turns ? json(*kind.many_turns ? "many" : "one") : json(nullptr)},
          {"repeatable", kind.repeatable ? json(to_string(*kind.repeatable)) : json(nullptr)},
          {"needs_file", kind.needs_file},
          {"needs_sandbox", kind.needs_sandbox}};
}

// The keys of run files that are options of this adapter. run_file_keys() marks them with the condition `when`.
std::vector<ConfigKey> option_keys_of(std::string_view name) {
  std::vector<ConfigKey> keys;
  for (ConfigKey& key : learner::run_file_keys())
    if (key.when == fmt::format("adapter: {}", name)) keys.push_back(std::move(key));
  return keys;
}

void print_all(const std::vector<AdapterKind>& kinds) {
  const auto columns = screen_columns();
  const bool is_narrow = columns && *columns < kWideColumns;
  fmt::print("{:<11} {:<8} {:<11} {}\n", "adapter", "turns", "repeatable",
             is_narrow ? "needs" : "needs         meaning");
  for (const AdapterKind& kind : kinds) {
    const std::string facts =
        fmt::format("{:<11} {:<8} {:<11} {:<14}", kind.name, turns_text(kind), repeatable_text(kind), needs_text(kind));
    if (is_narrow)  // the meaning has lines of its own
      fmt::print("{}\n{}", facts.substr(0, facts.find_last_not_of(' ') + 1),
                 wrap_text(kind.meaning, /*first_indent=*/2, /*next_indent=*/2, *columns));
    else if (columns)
      fmt::print("{}{}", facts,
                 wrap_text(kind.meaning, /*first_indent=*/0, /*next_indent=*/facts.size(), *columns - facts.size()));
    else  // not a terminal
      fmt::print("{}{}\n", facts, kind.meaning);
  }
  fmt::print(
      "\n{}",
      wrap_text("`echoline adapter list NAME` shows the options of one; docs/run-file.md has the options of all.",
                /*first_indent=*/0, /*next_indent=*/0, columns.value_or(kDefaultColumns)));
}

void print_one(const AdapterKind& kind, const std::vector<ConfigKey>& options) {
  const std::size_t columns = screen_columns().value_or(kDefaultColumns);
  fmt::print("{}",
             wrap_text(fmt::format("{}: {}", kind.name, kind.meaning), /*first_indent=*/0, /*next_indent=*/2, columns));
  fmt::print("turns: {}; repeatable: {}; needs: {}\n", turns_text(kind), repeatable_text(kind), needs_text(kind));
  for (const ConfigKey& key : options) {
    if (key.type == "section") {
      if (key.path != "task.options")  // the adapter's meaning, printed above, describes that section
        fmt::print("\n{}", wrap_text(fmt::format("{}: {}", key.path, key.meaning), /*first_indent=*/0,
                                     /*next_indent=*/2, columns));
      continue;
    }
    const std::string required_or_default = key.required               ? "required"
                                            : key.default_text.empty() ? ""
                                                                       : "default " + key.default_text;
    std::string facts = key.type;
    for (const std::string& fact : {key.range, required_or_default})
      if (!fact.empty()) facts += "; " + fact;
    fmt::print("\n{}{}",
               wrap_text(fmt::format("{}  ({})", key.path, facts), /*first_indent=*/0, /*next_indent=*/4, columns),
               wrap_text(key.meaning, /*first_indent=*/2, /*next_indent=*/2, columns));
  }
}

Status list(const Arguments& args) {
  const std::vector<AdapterKind> kinds = data_plane::adapter_kinds();
  if (args.name.empty()) {
    if (!args.as_json) {
      print_all(kinds);
      return ok();
    }
    json rows = json::array();
    for (const AdapterKind& kind : kinds) rows.push_back(as_json(kind));
    fmt::print("{}\n", json{{"schema_version", 1}, {"adapters", rows}}.dump(2));
    return ok();
  }
  const auto kind = std::ranges::find(kinds, args.name, &AdapterKind::name);
  if (kind == kinds.end()) {
    const std::vector<std::string> names = data_plane::adapter_names();
    return fail(Code::kInvalid, "", "no adapter is called '{}'{}; `echoline adapter list` shows all", args.name,
                did_you_mean(args.name, names));
  }
  const std::vector<ConfigKey> options = option_keys_of(kind->name);
  if (!args.as_json) {
    print_one(*kind, options);
    return ok();
  }
  json description = as_json(*kind);
  description["schema_version"] = 1;
  description["options"] = json::parse(reference_json(options)).at("keys");
  fmt::print("{}\n", description.dump(2));
  return ok();
}

}  // namespace

void add_adapter_list(Verb& adapter, int& exit_code) {
  auto* verb = adapter.add_verb("list", "List the built-in tasks, or show the options of one");
  auto args = std::make_shared<Arguments>();
  verb->add_option("name", args->name, "show the options of this adapter");
  verb->add_flag("--json", args->as_json, "print JSON");
  verb->footer(
      "turns: the number of answers in an episode. repeatable: whether the learner can recompute a score: `cheaply`, "
      "`costly`, or `not`, and then it must trust the worker. varies: the task itself decides. needs: a file of "
      "problems, or a sandbox (bubblewrap) on the machines that grade responses.");
  verb->callback([args, &exit_code] {
    const Status done = list(*args);
    exit_code = done ? 0 : report_error("adapter list", done.error());
  });
}

}  // namespace echoline::cli

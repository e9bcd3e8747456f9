// echoline config: describes the keys of run files, as the reader knows them.
#include <cstdio>

#include "base/config_reference.hpp"
#include "cli/verbs.hpp"
#include "learner/run_config.hpp"
#include "study/sim_run_config.hpp"

namespace echoline::cli {
namespace {

constexpr const char* kPage =
    "# The run file\n\n"
    "Made by `echoline config reference`, from the reader of run files; `--yaml` prints it as a file to fill in, "
    "`--json` "
    "for\n"
    "programs. `configs/quickstart.yaml` is an example.\n\n"
    "A run file is YAML without anchors, aliases and tags. Every mistake in it is reported at once, as\n"
    "`file:line:column: what was expected, what was found`; an unknown key is a mistake.\n\n"
    "- Quantities carry their unit: a duration `30 s` (ns us ms s min h), a size `64 KiB` (B kB MB GB KiB MiB GiB; MB "
    "is "
    "10^6\n  bytes, MiB 2^20), a rate `24 Mbit/s` (bit/s kbit/s Mbit/s Gbit/s). Numbers have none; `1_000_000` is a "
    "whole "
    "number.\n"
    "- A relative path refers to the folder of the file that names it.\n"
    "- `--set key=value` of `up`, `plan`, `doctor` and `learner` overrides one key: `--set run.steps=50`. The value is "
    "taken\n  as it stands, lists and mappings are in brackets: `--set 'model={path: my-model}'`. A relative path in "
    "it "
    "refers to\n  the working directory.\n"
    "- `config.yaml` in a run's folder is the resolved run file, with defaults and absolute paths. It is itself a "
    "run file.\n";

struct Arguments {
  bool json = false, yaml = false;
};

void reference(const Arguments& a) {
  const std::vector<ConfigKey> keys = learner::run_file_keys();
  if (a.json)
    fmt::print("{}", reference_json(keys));
  else if (a.yaml)
    fmt::print("{}", reference_yaml(keys));
  else
    fmt::print("{}{}", kPage, reference_markdown(keys));
}

// Covers run files and the keys of simulated runs. The section `sweep` is left out: its own verb reads it.
void schema() {
  std::vector<ConfigKey> keys = learner::run_file_keys();
  for (ConfigKey& key : keys)
    if (key.path == "task.adapter") key.required = false;  // a run with several tasks has `tasks` instead
  for (ConfigKey& key : study::simulation_keys()) keys.push_back(std::move(key));
  ConfigKey sweep;
  sweep.path = "sweep";
  sweep.type = "mapping";
  sweep.meaning = "The variations of `echoline sweep`.";
  keys.push_back(std::move(sweep));
  fmt::print("{}", reference_schema(keys));
}

}  // namespace

void add_config(Verb& app, int& exit_code) {
  auto* verb = app.add_verb("config", "Describe the keys of a run file");
  verb->require_verb();
  auto* page = verb->add_verb("reference", "Print every key of a run file: unit, range, default and meaning");
  auto a = std::make_shared<Arguments>();
  auto* json = page->add_flag("--json", a->json, "print JSON");
  page->add_flag("--yaml", a->yaml, "print a run file to fill in; keys with a default are commented out")
      ->excludes(json);
  auto* form = verb->add_verb("schema", "Print a JSON Schema of run files, for editors");
  form->footer(
      "echoline config schema > run-file.schema.json, and as the first line of a run file:\n"
      "# yaml-language-server: $schema=run-file.schema.json");
  form->callback([&exit_code] {
    schema();
    exit_code = 0;
  });
  page->footer("docs/run-file.md is its output.");
  page->callback([a, &exit_code] {
    reference(*a);
    exit_code = 0;
  });
}

}  // namespace echoline::cli

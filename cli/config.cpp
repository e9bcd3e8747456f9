// echoline config: prints the keys of run files, as the parser of run files defines them.
#include <cstdio>

#include "base/config_reference.hpp"
#include "cli/verbs.hpp"
#include "learner/run_config.hpp"
#include "study/sim_run_config.hpp"

namespace echoline::cli {
namespace {

constexpr const char* kReferenceIntro =
    "# The run file\n\n"
    "Made by `echoline config reference`, from the reader of run files; `--yaml` prints it as a file to fill in, "
    "`--json` "
    "for\nprograms. `configs/quickstart.yaml` is an example.\n\n"
    "A run file is YAML without anchors, aliases and tags. Every mistake in it is reported at once, as\n"
    "`file:line:column: what was expected, what was found`; an unknown key is a mistake.\n\n"
    "- Quantities carry their unit: a duration `30 s` (ns us ms s min h), a size `64 KiB` (B kB MB GB KiB MiB GiB; MB "
    "is "
    "10^6\n  bytes, MiB 2^20), a rate `24 Mbit/s` (bit/s kbit/s Mbit/s Gbit/s). Numbers have none; `1_000_000` is a "
    "whole number.\n"
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

void print_reference(const Arguments& args) {
  const std::vector<ConfigKey> keys = learner::run_file_keys();
  if (args.json)
    fmt::print("{}", reference_json(keys));
  else if (args.yaml)
    fmt::print("{}", reference_yaml(keys));
  else
    fmt::print("{}{}", kReferenceIntro, reference_markdown(keys));
}

// Prints the schema of run files, with the keys of simulated runs. The section `sweep` is allowed, but its keys are
// left out, because `echoline sweep` checks them.
void print_schema() {
  std::vector<ConfigKey> keys = learner::run_file_keys();
  for (ConfigKey& key : keys)
    if (key.path == "task.adapter") key.required = false;  // a run with several tasks has `tasks` instead
  for (ConfigKey& key : study::simulation_keys()) keys.push_back(std::move(key));
  ConfigKey sweep_section;
  sweep_section.path = "sweep";
  sweep_section.type = "mapping";
  sweep_section.meaning = "The variations of `echoline sweep`.";
  keys.push_back(std::move(sweep_section));
  fmt::print("{}", reference_schema(keys));
}

}  // namespace

void add_config(Verb& program, int& exit_code) {
  auto* verb = program.add_verb("config", "Describe the keys of a run file");
  verb->require_verb();
  auto* reference_verb = verb->add_verb("reference", "Print every key of a run file: unit, range, default and meaning");
  auto args = std::make_shared<Arguments>();
  auto* json = reference_verb->add_flag("--json", args->json, "print JSON");
  reference_verb->add_flag("--yaml", args->yaml, "print a run file to fill in; keys with a default are commented out")
      ->excludes(json);
  auto* schema_verb = verb->add_verb("schema", "Print a JSON Schema of run files, for editors");
  schema_verb->footer(
      "echoline config schema > run-file.schema.json, and as the first line of a run file:\n"
      "# yaml-language-server: $schema=run-file.schema.json");
  schema_verb->callback([&exit_code] {
    print_schema();
    exit_code = 0;
  });
  reference_verb->footer("docs/run-file.md is the output of this command.");
  reference_verb->callback([args, &exit_code] {
    print_reference(*args);
    exit_code = 0;
  });
}

}  // namespace echoline::cli

#include "cli/command_tree.hpp"

namespace echoline::cli {
namespace {

void collect(const CLI::App& app, const std::string& path, std::vector<Command>& out) {
  Command command{path, app.get_description(), app.get_footer(), {}, {}};
  for (const CLI::Option* option : app.get_options()) {
    Option o;
    for (const std::string& name : option->get_snames()) o.names.push_back("-" + name);
    for (const std::string& name : option->get_lnames()) o.names.push_back("--" + name);
    o.positional = o.names.empty();
    if (o.positional) o.names.push_back(option->get_name(true));
    o.meaning = option->get_description();
    o.fallback = option->get_default_str();
    o.takes_value = option->get_items_expected_max() > 0;
    o.required = option->get_required();
    command.options.push_back(std::move(o));
  }
  const auto verbs = app.get_subcommands([](const CLI::App*) { return true; });
  for (const CLI::App* verb : verbs) command.verbs.push_back(verb->get_name());
  out.push_back(std::move(command));
  for (const CLI::App* verb : verbs) collect(*verb, path.empty() ? verb->get_name() : path + " " + verb->get_name(), out);
}

}  // namespace

std::vector<Command> command_tree(const CLI::App& app) {
  std::vector<Command> commands;
  collect(app, "", commands);
  return commands;
}

}  // namespace echoline::cli

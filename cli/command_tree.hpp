// The program's verbs and options as data, from the CLI11 tree that parses them: what completion and man pages are
// made of.
#pragma once
#include <string>
#include <vector>

namespace echoline::cli {

class Verb;

struct Option {
  std::vector<std::string> names;  // "-o", "--output"; of a positional one, its name
  std::string meaning, fallback;
  bool positional = false, takes_value = false, required = false;
};

struct Command {
  std::string path;  // "delta diff"; empty for the program itself
  std::string meaning, footer;
  std::vector<Option> options;
  std::vector<std::string> verbs;  // names of its own subcommands
};

// The program first, then every verb, a verb before what is below it.
std::vector<Command> command_tree(const Verb& program);

std::string bash_completion(const std::vector<Command>& commands, const std::vector<std::string>& run_file_keys);
std::string zsh_completion(const std::vector<Command>& commands, const std::vector<std::string>& run_file_keys);
std::string fish_completion(const std::vector<Command>& commands, const std::vector<std::string>& run_file_keys);

// "echoline-delta-diff": the page of a command.
std::string man_name(const Command& command);
// Its page, in the man macros.
std::string man_page(const Command& command, const std::vector<Command>& all, const std::string& version);

}  // namespace echoline::cli

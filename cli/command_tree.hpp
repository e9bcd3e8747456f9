// The program's verbs and options as data, read from the CLI11 tree that parses them. Completion scripts and man pages
// are made from it.
#pragma once
#include <string>
#include <vector>

namespace echoline::cli {

class Verb;

struct Option {
  std::vector<std::string> names;  // short form first: "-o", "--output"; of a positional argument, its name
  std::string help_text, default_value;
  bool positional = false, takes_value = false, required = false;
};

// A verb, or the program itself.
struct Command {
  std::string path;  // names of the verbs that lead to it, "delta diff"; empty for the program
  std::string help_text, footer;
  std::vector<Option> options;
  std::vector<std::string> verbs;  // names of its direct subcommands
};

// Returns the program first, then all verbs, each before its subcommands.
std::vector<Command> command_tree(const Verb& program);

std::string bash_completion(const std::vector<Command>& commands, const std::vector<std::string>& run_file_keys);
std::string zsh_completion(const std::vector<Command>& commands, const std::vector<std::string>& run_file_keys);
std::string fish_completion(const std::vector<Command>& commands, const std::vector<std::string>& run_file_keys);

// Returns the name of a command's manual page, such as "echoline-delta-diff".
std::string man_name(const Command& command);
// Returns the manual page, written with the man macros. `all`: the commands of the whole program.
std::string man_page(const Command& command, const std::vector<Command>& all, const std::string& version);

}  // namespace echoline::cli

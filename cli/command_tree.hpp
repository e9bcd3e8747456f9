// The program's verbs and options as data, read from the CLI11 tree that parses them. Completion scripts and man pages
// are made from it.
#pragma once
#include <string>
#include <vector>

namespace echoline::cli {

class Verb;

struct Option {
  std::vector<std::string> names;  // short form first: "-o", "--output"; of a positional argument, its name
  std::string meaning, default_value;
  bool positional = false, takes_value = false, required = false;
};

struct Command {
  std::string path;  // "delta diff"; empty for the program
  std::string meaning, footer;
  std::vector<Option> options;
  std::vector<std::string> verbs;  // names of its direct subcommands
};

// The program first, then all verbs, each before its subcommands.
std::vector<Command> command_tree(const Verb& program);

std::string bash_completion(const std::vector<Command>& commands, const std::vector<std::string>& run_file_keys);
std::string zsh_completion(const std::vector<Command>& commands, const std::vector<std::string>& run_file_keys);
std::string fish_completion(const std::vector<Command>& commands, const std::vector<std::string>& run_file_keys);

// The name of a command's page, such as "echoline-delta-diff".
std::string man_name(const Command& command);
// The page, written with the man macros.
std::string man_page(const Command& command, const std::vector<Command>& all, const std::string& version);

}  // namespace echoline::cli

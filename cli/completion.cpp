// echoline completion: prints scripts with which bash, zsh and fish complete verbs, options and keys of run files.
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>

#include "base/config.hpp"
#include "cli/command_tree.hpp"
#include "cli/verbs.hpp"
#include "learner/run_config.hpp"

namespace echoline::cli {
namespace {

// Returns the text in single quotes, with spaces for newlines. All three shells take it literally except for a quote in
// it, which becomes `escaped_quote`.
std::string single_quoted(const std::string& text, const char* escaped_quote) {
  std::string result = "'";
  for (const char c : text) result += c == '\'' ? std::string(escaped_quote) : std::string(1, c == '\n' ? ' ' : c);
  return result + "'";
}

std::vector<std::string> option_names(const Command& command, bool with_value_only) {
  std::vector<std::string> names;
  for (const Option& option : command.options)
    if (!option.positional && (option.takes_value || !with_value_only))
      names.insert(names.end(), option.names.begin(), option.names.end());
  return names;
}

// Whether the command's positional argument is a run.
bool takes_run(const Command& command) {
  return std::any_of(command.options.begin(), command.options.end(),
                     [](const Option& option) { return option.positional && option.names.front() == "run"; });
}

// All verbs' options that take a value, except --set.
std::vector<std::string> value_option_names(const std::vector<Command>& commands) {
  std::vector<std::string> names;
  for (const Command& command : commands)
    for (const std::string& name : option_names(command, /*with_value_only=*/true))
      if (name != "--set" && std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  return names;
}

// Returns a shell pattern for "<verbs so far> <next word>", such as ' up'|'delta diff'. It matches if the two together
// are the path of a verb.
std::string verb_pattern(const std::vector<Command>& commands) {
  std::string pattern;
  for (const Command& command : commands) {
    if (command.path.empty()) continue;
    // At the first word no verb has been seen yet, so the text begins with the space.
    const std::string path = command.path.find(' ') == std::string::npos ? " " + command.path : command.path;
    pattern += (pattern.empty() ? "" : "|") + single_quoted(path, "'\\''");
  }
  return pattern;
}

}  // namespace

std::string bash_completion(const std::vector<Command>& commands, const std::vector<std::string>& run_file_keys) {
  std::string out =
      "# bash completion for echoline: source <(echoline completion bash)\n"
      "_echoline() {\n"
      "  local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} verb='' options='' verbs='' i\n"
      "  for ((i = 1; i < COMP_CWORD; ++i)); do\n"
      "    case \"$verb ${COMP_WORDS[i]}\" in\n";
  out += fmt::format("      {}) verb=\"${{verb:+$verb }}${{COMP_WORDS[i]}}\" ;;\n", verb_pattern(commands));
  out += "    esac\n  done\n  COMPREPLY=()\n  case \"$prev\" in\n";
  out += fmt::format(
      "    --set)\n"
      "      compopt -o nospace 2>/dev/null\n"
      "      COMPREPLY=($(compgen -S = -W '{}' -- \"$cur\"))\n"
      "      return ;;\n"
      "    {}) return ;;  # a value: files\n"
      "  esac\n"
      "  case \"$verb\" in\n",
      fmt::join(run_file_keys, " "), fmt::join(value_option_names(commands), "|"));
  for (const Command& command : commands) {  // a command takes either verbs or a run, so one of the two is empty
    const std::string runs = takes_run(command) ? "$(command ls runs 2>/dev/null)" : "";
    out += fmt::format("    {}) options='{}' verbs=\"{}{}\" ;;\n", single_quoted(command.path, ""),
                       fmt::join(option_names(command, /*with_value_only=*/false), " "), fmt::join(command.verbs, " "),
                       runs);
  }
  out +=
      "  esac\n"
      "  if [[ $cur == -* ]]; then\n"
      "    COMPREPLY=($(compgen -W \"$options\" -- \"$cur\"))\n"
      "  else\n"
      "    COMPREPLY=($(compgen -W \"$verbs\" -- \"$cur\"))\n"
      "  fi\n"
      "}\n"
      "complete -o default -F _echoline echoline\n";
  return out;
}

std::string zsh_completion(const std::vector<Command>& commands, const std::vector<std::string>& run_file_keys) {
  std::string out =
      "#compdef echoline\n"
      "# zsh completion for echoline: save it as _echoline in a folder of $fpath\n"
      "_echoline() {\n"
      "  local verb='' i\n"
      "  local -a verbs options\n"
      "  for ((i = 2; i < CURRENT; ++i)); do\n"
      "    case \"$verb $words[i]\" in\n";
  out += fmt::format("      {}) verb=\"${{verb:+$verb }}$words[i]\" ;;\n", verb_pattern(commands));
  out += "    esac\n  done\n  case \"$words[CURRENT-1]\" in\n";
  out +=
      fmt::format("    --set) compadd -S = -- {}; return ;;\n    {}) _files; return ;;\n  esac\n  case \"$verb\" in\n",
                  fmt::join(run_file_keys, " "), fmt::join(value_option_names(commands), "|"));
  const auto name_and_help = [](std::string name, const std::string& help_text) {
    return single_quoted(name + ":" + help_text, "'\\''");
  };
  // In zsh's glob runs/*(N:t), N means that no match is no error, and t takes the last part of each path.
  for (const Command& command : commands) {
    std::string verbs, options;
    for (const Command& subcommand : commands)
      for (const std::string& verb : command.verbs)
        if (subcommand.path == (command.path.empty() ? verb : command.path + " " + verb))
          verbs += " " + name_and_help(verb, subcommand.help_text);
    for (const Option& option : command.options)
      if (!option.positional)
        for (const std::string& name : option.names) options += " " + name_and_help(name, option.help_text);
    out += fmt::format("    {})\n      verbs=({} )\n      options=({} )\n      {};;\n", single_quoted(command.path, ""),
                       verbs, options, takes_run(command) ? "verbs+=(runs/*(N:t))\n      " : "");
  }
  out +=
      "  esac\n"
      "  if [[ $words[CURRENT] == -* ]]; then _describe -o option options\n"
      "  else (( $#verbs )) && _describe argument verbs || _files\n"
      "  fi\n"
      "}\n"
      "_echoline \"$@\"\n";
  return out;
}

std::string fish_completion(const std::vector<Command>& commands, const std::vector<std::string>& run_file_keys) {
  std::string out = "# fish completion for echoline: echoline completion fish | source\n";
  const auto seen_subcommand_condition = [](const std::string& words) {
    return "__fish_seen_subcommand_from " + words;
  };
  for (const Command& command : commands) {
    std::string condition = "__fish_use_subcommand";
    if (!command.path.empty()) {
      condition.clear();
      std::string path = command.path;
      for (std::size_t start = 0; start < path.size();) {
        const std::size_t end = std::min(path.find(' ', start), path.size());
        condition += (condition.empty() ? "" : "; and ") + seen_subcommand_condition(path.substr(start, end - start));
        start = end + 1;
      }
      if (!command.verbs.empty())
        condition +=
            fmt::format("; and not {}", seen_subcommand_condition(fmt::format("{}", fmt::join(command.verbs, " "))));
    }
    const std::string complete_command = "complete -c echoline -n " + single_quoted(condition, "\\'");
    for (const std::string& verb : command.verbs)
      for (const Command& subcommand : commands)
        if (subcommand.path == (command.path.empty() ? verb : command.path + " " + verb))
          out += fmt::format("{} -f -a {} -d {}\n", complete_command, verb, single_quoted(subcommand.help_text, "\\'"));
    if (takes_run(command)) out += complete_command + " -a '(command ls runs 2>/dev/null)'\n";
    for (const Option& option : command.options) {
      if (option.positional) continue;
      std::string names;
      for (const std::string& name : option.names)
        names += name.starts_with("--") ? " -l " + name.substr(2) : " -s " + name.substr(1);
      std::string values;
      if (option.names.back() == "--set") values = fmt::format(" -f -a '{}='", fmt::join(run_file_keys, "= "));
      out += fmt::format("{}{}{}{} -d {}\n", complete_command, names, option.takes_value ? " -r" : "", values,
                         single_quoted(option.help_text, "\\'"));
    }
  }
  return out;
}

void add_completion(Verb& program, int& exit_code) {
  auto* verb =
      program.add_verb("completion", "Print a script for the completion of verbs, options and keys in a shell");
  auto shell = std::make_shared<std::string>();
  verb->add_option("shell", *shell, "bash, zsh or fish")->required()->one_of({"bash", "zsh", "fish"});
  verb->callback([&program, shell, &exit_code] {
    std::vector<std::string> keys;
    for (const ConfigKey& key : learner::run_file_keys())
      if (key.type != "section" && key.type != "list" && std::find(keys.begin(), keys.end(), key.path) == keys.end())
        keys.push_back(key.path);
    const std::vector<Command> commands = command_tree(program);
    fmt::print("{}", *shell == "bash"  ? bash_completion(commands, keys)
                     : *shell == "zsh" ? zsh_completion(commands, keys)
                                       : fish_completion(commands, keys));
    exit_code = 0;
  });
}

}  // namespace echoline::cli

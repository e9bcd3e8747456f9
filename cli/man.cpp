// echoline man: prints manual pages, one for the program and one for each verb.
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>

#include "base/files.hpp"
#include "cli/command_tree.hpp"
#include "cli/examples.hpp"
#include "cli/verbs.hpp"

namespace echoline::cli {
namespace {

// Escapes the characters that man macros interpret.
std::string escape_man(const std::string& text) {
  std::string escaped;
  bool at_line_start = true;
  for (const char c : text) {
    if (at_line_start && (c == '.' || c == '\'')) escaped += "\\&";  // would begin a macro
    if (c == '\\')
      escaped += "\\e";
    else if (c == '-')
      escaped += "\\-";
    else
      escaped += c;
    at_line_start = c == '\n';
  }
  return escaped;
}

std::string synopsis(const Command& command) {
  std::string text = "echoline" + (command.path.empty() ? "" : " " + command.path);
  if (!command.verbs.empty()) text += " VERB";
  for (const Option& option : command.options) {
    if (option.positional) {
      const std::string name = option.names.front();
      text += option.required ? " " + name : " [" + name + "]";
    } else if (option.required) {
      text += " " + option.names.back() + " VALUE";  // the last name is the long form
    }
  }
  return text + " [options]";
}

std::string path_of_subcommand(const Command& parent, const std::string& verb) {
  return parent.path.empty() ? verb : parent.path + " " + verb;
}

}  // namespace

std::string man_name(const Command& command) {
  std::string name = command.path.empty() ? "echoline" : "echoline-" + command.path;
  std::replace(name.begin(), name.end(), ' ', '-');
  return name;
}

std::string man_page(const Command& command, const std::vector<Command>& all, const std::string& version) {
  std::string page =
      fmt::format(".TH {} 1 \"\" \"echoline {}\" \"echoline\"\n", escape_man(man_name(command)), version);
  page += fmt::format(".SH NAME\n{} \\- {}\n", escape_man(man_name(command)), escape_man(command.help_text));
  page += fmt::format(".SH SYNOPSIS\n.B {}\n", escape_man(synopsis(command)));
  if (!command.verbs.empty()) {
    page += ".SH VERBS\n";
    for (const Command& subcommand : all)
      for (const std::string& verb : command.verbs)
        if (subcommand.path == path_of_subcommand(command, verb))
          page +=
              fmt::format(".TP\n.BR {} (1)\n{}\n", escape_man(man_name(subcommand)), escape_man(subcommand.help_text));
  }
  page += ".SH EXAMPLES\n.nf\n";
  for (const char* const example : examples_of(command.path)) page += escape_man(example) + "\n";
  page += ".fi\n.SH OPTIONS\n";
  for (const Option& option : command.options) {
    std::string names = fmt::format("{}", fmt::join(option.names, ", "));
    if (!option.positional && option.takes_value) names += " VALUE";
    page += fmt::format(
        ".TP\n.B {}\n{}{}{}\n", escape_man(names), escape_man(option.help_text), option.required ? " (required)" : "",
        option.default_value.empty() ? "" : fmt::format(" (default: {})", escape_man(option.default_value)));
  }
  if (!command.footer.empty()) page += ".SH NOTES\n.nf\n" + escape_man(command.footer) + "\n.fi\n";
  if (!command.path.empty()) {
    const std::size_t last_space = command.path.rfind(' ');
    Command parent;
    if (last_space != std::string::npos) parent.path = command.path.substr(0, last_space);
    page += fmt::format(".SH SEE ALSO\n.BR {} (1)\n", escape_man(man_name(parent)));
  }
  return page;
}

namespace {

struct Arguments {
  std::vector<std::string> verb_path;  // "delta", "diff"
  std::string folder;
};

int run(const Verb& program, const Arguments& args) {
  const std::vector<Command> commands = command_tree(program);
  if (!args.folder.empty()) {
    Status written = make_folders(args.folder);
    for (const Command& command : commands)
      if (written)
        written = write_file_atomic(std::filesystem::path(args.folder) / (man_name(command) + ".1"),
                                    man_page(command, commands, ECHOLINE_VERSION));
    return written ? 0 : report_error("man", written.error());
  }
  const std::string path = fmt::format("{}", fmt::join(args.verb_path, " "));
  for (const Command& command : commands)
    if (command.path == path) {
      fmt::print("{}", man_page(command, commands, ECHOLINE_VERSION));
      return 0;
    }
  return report_error("man", fail(Code::kInvalid, "", "there is no verb '{}'; `echoline --help` lists them", path));
}

}  // namespace

void add_man(Verb& program, int& exit_code) {
  auto* verb = program.add_verb("man", "Print the manual page of the program or of a verb");
  auto args = std::make_shared<Arguments>();
  verb->add_option("verb", args->verb_path, "verb to describe, e.g. delta diff; without it, the program");
  verb->add_option("--folder", args->folder, "write all pages into this folder, such as share/man/man1");
  verb->footer("If echoline is installed, `man echoline-up` works too.");
  verb->callback([&program, args, &exit_code] { exit_code = run(program, *args); });
}

}  // namespace echoline::cli

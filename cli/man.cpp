// echoline man: prints manual pages, one for the program and one for each verb.
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>

#include "base/files.hpp"
#include "cli/command_tree.hpp"
#include "cli/verbs.hpp"

namespace echoline::cli {
namespace {

// Escapes the characters that man macros interpret.
std::string escape_man(const std::string& text) {
  std::string out;
  bool at_start = true;
  for (const char c : text) {
    if (at_start && (c == '.' || c == '\'')) out += "\\&";
    if (c == '\\')
      out += "\\e";
    else if (c == '-')
      out += "\\-";
    else
      out += c;
    at_start = c == '\n';
  }
  return out;
}

std::string synopsis(const Command& command) {
  std::string text = "echoline" + (command.path.empty() ? "" : " " + command.path);
  if (!command.verbs.empty()) text += " VERB";
  for (const Option& o : command.options) {
    if (o.positional) {
      const std::string name = o.names.front();
      text += o.required ? " " + name : " [" + name + "]";
    } else if (o.required) {
      text += " " + o.names.back() + " VALUE";  // the long form is last
    }
  }
  return text + " [options]";
}

std::string path_of_child(const Command& parent, const std::string& verb) {
  return parent.path.empty() ? verb : parent.path + " " + verb;
}

}  // namespace

std::string man_name(const Command& command) {
  std::string name = command.path.empty() ? "echoline" : "echoline-" + command.path;
  std::replace(name.begin(), name.end(), ' ', '-');
  return name;
}

std::string man_page(const Command& command, const std::vector<Command>& all, const std::string& version) {
  std::string out = fmt::format(".TH {} 1 \"\" \"echoline {}\" \"echoline\"\n", escape_man(man_name(command)), version);
  out += fmt::format(".SH NAME\n{} \\- {}\n", escape_man(man_name(command)), escape_man(command.meaning));
  out += fmt::format(".SH SYNOPSIS\n.B {}\n", escape_man(synopsis(command)));
  if (!command.verbs.empty()) {
    out += ".SH VERBS\n";
    for (const Command& subcommand : all)
      for (const std::string& verb : command.verbs)
        if (subcommand.path == path_of_child(command, verb))
          out += fmt::format(".TP\n.BR {} (1)\n{}\n", escape_man(man_name(subcommand)), escape_man(subcommand.meaning));
  }
  out += ".SH OPTIONS\n";
  for (const Option& o : command.options) {
    std::string names = fmt::format("{}", fmt::join(o.names, ", "));
    if (!o.positional && o.takes_value) names += " VALUE";
    out +=
        fmt::format(".TP\n.B {}\n{}{}{}\n", escape_man(names), escape_man(o.meaning), o.required ? " (required)" : "",
                    o.default_value.empty() ? "" : fmt::format(" (default: {})", escape_man(o.default_value)));
  }
  if (!command.footer.empty()) out += ".SH NOTES\n.nf\n" + escape_man(command.footer) + "\n.fi\n";
  if (!command.path.empty()) {
    const std::size_t last_space = command.path.rfind(' ');
    Command parent;
    if (last_space != std::string::npos) parent.path = command.path.substr(0, last_space);
    out += fmt::format(".SH SEE ALSO\n.BR {} (1)\n", escape_man(man_name(parent)));
  }
  return out;
}

namespace {

struct Arguments {
  std::vector<std::string> verb_path;  // "delta", "diff"
  std::string folder;
};

int run(const Verb& program, const Arguments& a) {
  const std::vector<Command> commands = command_tree(program);
  if (!a.folder.empty()) {
    Status written = make_folders(a.folder);
    for (const Command& command : commands)
      if (written)
        written = write_file_atomic(std::filesystem::path(a.folder) / (man_name(command) + ".1"),
                                    man_page(command, commands, ECHOLINE_VERSION));
    return written ? 0 : report_error("man", written.error());
  }
  const std::string path = fmt::format("{}", fmt::join(a.verb_path, " "));
  for (const Command& command : commands)
    if (command.path == path) {
      fmt::print("{}", man_page(command, commands, ECHOLINE_VERSION));
      return 0;
    }
  return report_error("man", fail(Code::kInvalid, "", "there is no verb '{}'; `echoline --help` lists them", path));
}

}  // namespace

void add_man(Verb& app, int& exit_code) {
  auto* verb = app.add_verb("man", "Print the manual page of the program or of a verb");
  auto a = std::make_shared<Arguments>();
  verb->add_option("verb", a->verb_path, "verb to describe, e.g. delta diff; without it, the program");
  verb->add_option("--folder", a->folder, "write all pages into this folder, such as share/man/man1");
  verb->footer(
      "  echoline man up | man -l -    # shows a page\n"
      "If echoline is installed, `man echoline-up` works too.");
  verb->callback([&app, a, &exit_code] { exit_code = run(app, *a); });
}

}  // namespace echoline::cli

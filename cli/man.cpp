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
std::string plain(const std::string& text) {
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
      text += " " + o.names.back() + " VALUE";
    }
  }
  return text + " [options]";
}

}  // namespace

std::string man_name(const Command& command) {
  std::string name = command.path.empty() ? "echoline" : "echoline-" + command.path;
  std::replace(name.begin(), name.end(), ' ', '-');
  return name;
}

std::string man_page(const Command& command, const std::vector<Command>& all, const std::string& version) {
  std::string out = fmt::format(".TH {} 1 \"\" \"echoline {}\" \"echoline\"\n", plain(man_name(command)), version);
  out += fmt::format(".SH NAME\n{} \\- {}\n", plain(man_name(command)), plain(command.meaning));
  out += fmt::format(".SH SYNOPSIS\n.B {}\n", plain(synopsis(command)));
  if (!command.verbs.empty()) {
    out += ".SH VERBS\n";
    for (const Command& below : all)
      for (const std::string& verb : command.verbs)
        if (below.path == (command.path.empty() ? verb : command.path + " " + verb))
          out += fmt::format(".TP\n.BR {} (1)\n{}\n", plain(man_name(below)), plain(below.meaning));
  }
  out += ".SH OPTIONS\n";
  for (const Option& o : command.options) {
    std::string names = fmt::format("{}", fmt::join(o.names, ", "));
    if (!o.positional && o.takes_value) names += " VALUE";
    out += fmt::format(".TP\n.B {}\n{}{}{}\n", plain(names), plain(o.meaning), o.required ? " (required)" : "",
                       o.fallback.empty() ? "" : fmt::format(" (default: {})", plain(o.fallback)));
  }
  if (!command.footer.empty()) out += ".SH NOTES\n.nf\n" + plain(command.footer) + "\n.fi\n";
  if (!command.path.empty()) {
    const std::size_t last = command.path.rfind(' ');
    Command above;
    if (last != std::string::npos) above.path = command.path.substr(0, last);
    out += fmt::format(".SH SEE ALSO\n.BR {} (1)\n", plain(man_name(above)));
  }
  return out;
}

namespace {

struct Arguments {
  std::vector<std::string> verb;
  std::string folder;
};

int run(const Verb& app, const Arguments& a) {
  const std::vector<Command> commands = command_tree(app);
  if (!a.folder.empty()) {
    Status written = make_folders(a.folder);
    for (const Command& command : commands)
      if (written)
        written = write_file_atomic(std::filesystem::path(a.folder) / (man_name(command) + ".1"),
                                    man_page(command, commands, ECHOLINE_VERSION));
    return written ? 0 : complain("man", written.error());
  }
  const std::string path = fmt::format("{}", fmt::join(a.verb, " "));
  for (const Command& command : commands)
    if (command.path == path) {
      fmt::print("{}", man_page(command, commands, ECHOLINE_VERSION));
      return 0;
    }
  return complain("man", fail(Code::kInvalid, "", "there is no verb '{}'; `echoline --help` lists them", path));
}

}  // namespace

void add_man(Verb& app, int& exit) {
  auto* verb = app.add_verb("man", "Print the manual page of the program or of a verb");
  auto a = std::make_shared<Arguments>();
  verb->add_option("verb", a->verb, "verb to describe, e.g. delta diff; without it, the program");
  verb->add_option("--folder", a->folder, "write all pages into this folder, such as share/man/man1");
  verb->footer(
      "  echoline man up | man -l -    # shows a page\n"
      "An installed echoline has its pages where man finds them.");
  verb->callback([&app, a, &exit] { exit = run(app, *a); });
}

}  // namespace echoline::cli

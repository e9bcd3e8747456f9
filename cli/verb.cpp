// Builds the program's verbs with CLI11, for main() and the add_ functions of verbs.hpp.
#include "cli/verb.hpp"

#include <CLI/CLI.hpp>

#include "cli/command_tree.hpp"
#include "cli/examples.hpp"
#include "cli/json_errors.hpp"
#include "cli/output.hpp"

namespace echoline::cli {
namespace {

// Describes `app` and, recursively, its verbs as commands. `path`: the names of the verbs that lead to `app`.
void collect_commands(const CLI::App& app, const std::string& path, std::vector<Command>& commands) {
  Command command;
  command.path = path;
  command.help_text = app.get_description();
  command.footer = app.get_footer();
  for (const CLI::Option* option : app.get_options()) {
    Option entry;
    for (const std::string& name : option->get_snames()) entry.names.push_back("-" + name);
    for (const std::string& name : option->get_lnames()) entry.names.push_back("--" + name);
    entry.positional = entry.names.empty();
    if (entry.positional) entry.names.push_back(option->get_name(/*positional=*/true));
    entry.help_text = option->get_description();
    entry.default_value = option->get_default_str();
    entry.takes_value = option->get_items_expected_max() > 0;
    entry.required = option->get_required();
    command.options.push_back(std::move(entry));
  }
  // With a filter, CLI11 returns all subcommands; without one, only those that the user named.
  const auto verbs = app.get_subcommands([](const CLI::App*) { return true; });
  for (const CLI::App* verb : verbs) command.verbs.push_back(verb->get_name());
  commands.push_back(std::move(command));
  for (const CLI::App* verb : verbs)
    collect_commands(*verb, path.empty() ? verb->get_name() : path + " " + verb->get_name(), commands);
}

// The names of the verbs that lead to `app`, such as "delta diff".
std::string path_of(const CLI::App& app) {
  if (app.get_parent() == nullptr) return "";
  const std::string parents = path_of(*app.get_parent());
  return parents.empty() ? app.get_name() : parents + " " + app.get_name();
}

constexpr std::size_t kHelpColumns = 80;
constexpr std::size_t kUsageIndent = 7;  // the width of "Usage: "

// Formats help pages that are kHelpColumns wide.
class HelpPages : public CLI::Formatter {
  std::string make_usage(const CLI::App* app, std::string name) const override {
    std::string usage = CLI::Formatter::make_usage(app, std::move(name));
    usage.erase(usage.find_last_not_of('\n') + 1);
    return wrap_text(usage, /*first_indent=*/0, /*next_indent=*/kUsageIndent, kHelpColumns);
  }
  // Describes the verb and gives examples of its use.
  std::string make_description(const CLI::App* app) const override {
    std::string text = wrap_text(app->get_description(), /*first_indent=*/0, /*next_indent=*/0, kHelpColumns) + "\n";
    for (const char* const example : examples_of(path_of(*app))) text += fmt::format("  {}\n", example);
    return text + "\n";
  }
  std::string make_option(const CLI::Option* option, bool is_positional) const override {
    return two_columns(make_option_name(option, is_positional) + make_option_opts(option), make_option_desc(option));
  }
  std::string make_subcommand(const CLI::App* verb) const override {
    return two_columns(verb->get_display_name(/*with_aliases=*/true), verb->get_description());
  }

  // Puts the names on the left and their help text in a column on the right.
  std::string two_columns(const std::string& names, const std::string& help_text) const {
    const std::size_t help_column = get_column_width();
    std::string left = wrap_text(names, /*first_indent=*/2, /*next_indent=*/4, kHelpColumns);
    const std::string right = wrap_text(help_text, help_column, help_column, kHelpColumns);
    if (help_text.empty()) return left;
    // `left` ends with a newline. rfind() returns npos for a single line; npos + 1 is 0.
    const std::size_t last_line_start = left.rfind('\n', left.size() - 2) + 1;
    const std::size_t last_line_width = left.size() - 1 - last_line_start;
    if (last_line_width + 1 > help_column) return left + right;
    // The help text begins on the last line of the names, so its indent is shortened by their width.
    left.pop_back();
    return left + right.substr(last_line_width);
  }
};

}  // namespace

VerbOption* VerbOption::required() {
  option_->required();
  return this;
}
VerbOption* VerbOption::value_count(int min, int max) {
  option_->expected(min, max);
  return this;
}
VerbOption* VerbOption::delimiter(char between_values) {
  option_->delimiter(between_values);
  return this;
}
VerbOption* VerbOption::one_value_each() {
  option_->allow_extra_args(false);
  return this;
}
VerbOption* VerbOption::excludes(VerbOption* other) {
  option_->excludes(other->option_);
  return this;
}
VerbOption* VerbOption::show_default() {
  option_->capture_default_str();
  return this;
}
VerbOption* VerbOption::one_of(std::vector<std::string> values) {
  option_->check(CLI::IsMember(std::move(values)));
  return this;
}
template <class Number>
VerbOption* VerbOption::range(Number min, Number max) {
  option_->check(CLI::Range(min, max));
  return this;
}
VerbOption* VerbOption::positive() {
  option_->check(CLI::PositiveNumber);
  return this;
}
VerbOption* VerbOption::non_negative() {
  option_->check(CLI::NonNegativeNumber);
  return this;
}

Verb::Verb(const std::string& help_text) : owned_(std::make_unique<CLI::App>(help_text)), app_(owned_.get()) {
  app_->formatter(std::make_shared<HelpPages>());  // the verbs inherit it
}
Verb::Verb(CLI::App* app) : app_(app) {}
Verb::~Verb() = default;

Verb* Verb::add_verb(const std::string& name, const std::string& help_text) {
  children_.push_back(std::unique_ptr<Verb>(new Verb(app_->add_subcommand(name, help_text))));
  return children_.back().get();
}

VerbOption* Verb::wrap_option(CLI::Option* option) { return &options_.emplace_back(option); }

template <class Value>
VerbOption* Verb::add_option(const std::string& names, Value& value, const std::string& help_text) {
  return wrap_option(app_->add_option(names, value, help_text));
}
VerbOption* Verb::add_flag(const std::string& names, bool& value, const std::string& help_text) {
  return wrap_option(app_->add_flag(names, value, help_text));
}

void Verb::footer(const std::string& text) {
  std::string page;
  for (std::size_t line_start = 0; line_start < text.size();) {
    const std::size_t line_end = std::min(text.find('\n', line_start), text.size());
    const std::string line = text.substr(line_start, line_end - line_start);
    const std::size_t indent = std::min(line.find_first_not_of(' '), line.size());
    page += wrap_text(line.substr(indent), indent, indent, kHelpColumns);
    line_start = line_end + 1;
  }
  page.pop_back();  // the last newline: CLI11 adds one
  app_->footer(page);
}
void Verb::version(const std::string& text) { app_->set_version_flag("--version", text); }
void Verb::require_verb() { app_->require_subcommand(1); }
void Verb::callback(std::function<void()> run) { app_->callback(std::move(run)); }
bool Verb::subverb_was_given() const { return !app_->get_subcommands().empty(); }

std::vector<std::string> Verb::verbs() const {
  std::vector<std::string> names;
  for (const CLI::App* verb : app_->get_subcommands([](const CLI::App*) { return true; }))
    names.push_back(verb->get_name());
  return names;
}

int Verb::parse(int argc, const char* const* argv) {
  try {
    app_->parse(argc, argv);
    return 0;
  } catch (const CLI::ParseError& error) {
    if (app_->exit(error) == 0) return 0;  // --help, --version
    print_error_if_json(fail(Code::kInvalid, "", "{}", error.what()));
    return 2;
  }
}

std::vector<Command> command_tree(const Verb& program) {
  std::vector<Command> commands;
  collect_commands(*program.app_, "", commands);
  return commands;
}

// The types that range() and add_option() can be called with.
template VerbOption* VerbOption::range(int, int);
template VerbOption* VerbOption::range(unsigned, unsigned);
template VerbOption* VerbOption::range(std::size_t, std::size_t);
template VerbOption* VerbOption::range(double, double);
template VerbOption* Verb::add_option(const std::string&, std::string&, const std::string&);
template VerbOption* Verb::add_option(const std::string&, std::optional<std::string>&, const std::string&);
template VerbOption* Verb::add_option(const std::string&, std::vector<std::string>&, const std::string&);
template VerbOption* Verb::add_option(const std::string&, std::vector<std::size_t>&, const std::string&);
template VerbOption* Verb::add_option(const std::string&, int&, const std::string&);
template VerbOption* Verb::add_option(const std::string&, unsigned&, const std::string&);
template VerbOption* Verb::add_option(const std::string&, std::optional<unsigned>&, const std::string&);
template VerbOption* Verb::add_option(const std::string&, std::optional<std::uint64_t>&, const std::string&);
template VerbOption* Verb::add_option(const std::string&, std::uint16_t&, const std::string&);
template VerbOption* Verb::add_option(const std::string&, std::int64_t&, const std::string&);
template VerbOption* Verb::add_option(const std::string&, std::uint64_t&, const std::string&);
template VerbOption* Verb::add_option(const std::string&, double&, const std::string&);
template VerbOption* Verb::add_option(const std::string&, std::optional<double>&, const std::string&);

}  // namespace echoline::cli

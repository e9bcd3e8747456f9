#include "cli/verb.hpp"

#include <CLI/CLI.hpp>

#include "cli/command_tree.hpp"
#include "cli/json_errors.hpp"
#include "cli/output.hpp"

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
  for (const CLI::App* verb : verbs)
    collect(*verb, path.empty() ? verb->get_name() : path + " " + verb->get_name(), out);
}

constexpr std::size_t kHelpColumns = 80;

// Formats help pages that are kHelpColumns wide.
class HelpPages : public CLI::Formatter {
  std::string make_usage(const CLI::App* app, std::string name) const override {
    std::string usage = CLI::Formatter::make_usage(app, std::move(name));
    usage.erase(usage.find_last_not_of('\n') + 1);
    return wrapped(usage, 0, 7, kHelpColumns);
  }
  std::string make_description(const CLI::App* app) const override {
    return wrapped(app->get_description(), 0, 0, kHelpColumns);
  }
  std::string make_option(const CLI::Option* option, bool is_positional) const override {
    return entry(make_option_name(option, is_positional) + make_option_opts(option), make_option_desc(option));
  }
  std::string make_subcommand(const CLI::App* verb) const override {
    return entry(verb->get_display_name(true), verb->get_description());
  }

  // Names on the left, their meaning in a column on the right.
  std::string entry(const std::string& names, const std::string& meaning) const {
    const std::size_t column = get_column_width();
    std::string left = wrapped(names, 2, 4, kHelpColumns), right = wrapped(meaning, column, column, kHelpColumns);
    const std::size_t used = left.size() - 1 - (left.rfind('\n', left.size() - 2) + 1);
    if (meaning.empty() || used + 1 > column) return meaning.empty() ? left : left + right;
    left.pop_back();
    return left + right.substr(used);
  }
};

}  // namespace

VerbOption* VerbOption::required() { return option_->required(), this; }
VerbOption* VerbOption::expected(int least, int most) { return option_->expected(least, most), this; }
VerbOption* VerbOption::delimiter(char between_values) { return option_->delimiter(between_values), this; }
VerbOption* VerbOption::one_value_each() { return option_->allow_extra_args(false), this; }
VerbOption* VerbOption::excludes(VerbOption* other) { return option_->excludes(other->option_), this; }
VerbOption* VerbOption::show_default() { return option_->capture_default_str(), this; }
VerbOption* VerbOption::one_of(std::vector<std::string> values) {
  return option_->check(CLI::IsMember(std::move(values))), this;
}
template <class Number>
VerbOption* VerbOption::range(Number least, Number most) {
  return option_->check(CLI::Range(least, most)), this;
}
VerbOption* VerbOption::positive() { return option_->check(CLI::PositiveNumber), this; }
VerbOption* VerbOption::non_negative() { return option_->check(CLI::NonNegativeNumber), this; }

Verb::Verb(const std::string& meaning) : owned_(std::make_unique<CLI::App>(meaning)), app_(owned_.get()) {
  app_->formatter(std::make_shared<HelpPages>());  // the verbs inherit it
}
Verb::Verb(CLI::App* app) : app_(app) {}
Verb::~Verb() = default;

Verb* Verb::add_verb(const std::string& name, const std::string& meaning) {
  below_.push_back(std::unique_ptr<Verb>(new Verb(app_->add_subcommand(name, meaning))));
  return below_.back().get();
}

VerbOption* Verb::keep(CLI::Option* option) { return &options_.emplace_back(option); }

template <class Value>
VerbOption* Verb::add_option(const std::string& names, Value& value, const std::string& meaning) {
  return keep(app_->add_option(names, value, meaning));
}
VerbOption* Verb::add_flag(const std::string& names, bool& value, const std::string& meaning) {
  return keep(app_->add_flag(names, value, meaning));
}

void Verb::footer(const std::string& text) {
  std::string page;
  for (std::size_t start = 0; start < text.size();) {
    const std::size_t end = std::min(text.find('\n', start), text.size());
    const std::string line = text.substr(start, end - start);
    const std::size_t indent = std::min(line.find_first_not_of(' '), line.size());
    page += wrapped(line.substr(indent), indent, indent, kHelpColumns);
    start = end + 1;
  }
  page.pop_back();
  app_->footer(page);
}
void Verb::version(const std::string& text) { app_->set_version_flag("--version", text); }
void Verb::needs_verb() { app_->require_subcommand(1); }
void Verb::callback(std::function<void()> run) { app_->callback(std::move(run)); }
bool Verb::went_below() const { return !app_->get_subcommands().empty(); }

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
    print_json_error(fail(Code::kInvalid, "", "{}", error.what()));
    return 2;
  }
}

std::vector<Command> command_tree(const Verb& program) {
  std::vector<Command> commands;
  collect(*program.app_, "", commands);
  return commands;
}

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
template VerbOption* Verb::add_option(const std::string&, std::uint16_t&, const std::string&);
template VerbOption* Verb::add_option(const std::string&, std::int64_t&, const std::string&);
template VerbOption* Verb::add_option(const std::string&, std::uint64_t&, const std::string&);
template VerbOption* Verb::add_option(const std::string&, double&, const std::string&);

}  // namespace echoline::cli

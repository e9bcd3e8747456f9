// Verbs and options of the program. A verb is a word of the command line, such as `delta` or its subcommand `diff`.
// Only verb.cpp includes CLI11, the parser behind these classes, whose header costs each file four seconds of
// compiling.
#pragma once
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace echoline::cli {

struct Command;  // a verb as data, for reference pages and completion (command_tree.hpp)

// An option, flag or positional argument of a verb. Functions return `this`, so that calls can be chained.
class VerbOption {
 public:
  explicit VerbOption(CLI::Option* option) : option_(option) {}
  VerbOption* required();
  VerbOption* value_count(int min, int max);   // how many values the option may have
  VerbOption* delimiter(char between_values);  // "1,2,3" then has three values
  VerbOption* one_value_each();                // "--set a=1 --set b=2", never "--set a=1 b=2"
  VerbOption* excludes(VerbOption* other);
  VerbOption* show_default();  // --help shows the value that the variable has now
  VerbOption* one_of(std::vector<std::string> values);
  // `Number` is int, unsigned, std::size_t or double.
  template <class Number>
  VerbOption* range(Number min, Number max);
  VerbOption* positive();
  VerbOption* non_negative();

 private:
  CLI::Option* option_;
};

// The program, or one of its verbs. Addresses of verbs and options do not change. Variables are bound by reference and
// must exist until the verb's callback has run.
class Verb {
 public:
  explicit Verb(const std::string& help_text);  // creates the program, the root of all verbs
  ~Verb();
  Verb(const Verb&) = delete;
  Verb& operator=(const Verb&) = delete;

  Verb* add_verb(const std::string& name, const std::string& help_text);
  // `names` is "-o,--output", or a bare name for a positional argument. --help prints `help_text`. The end of verb.cpp
  // lists the types that `Value` can be.
  template <class Value>
  VerbOption* add_option(const std::string& names, Value& value, const std::string& help_text);
  VerbOption* add_flag(const std::string& names, bool& value, const std::string& help_text);
  // Text at the end of --help. Lines wider than the page are wrapped, so break a longer example command yourself, with
  // a backslash at the end of each line.
  void footer(const std::string& text);
  void version(const std::string& text);
  void require_verb();  // parse() then refuses a command line without a verb below this one
  void callback(std::function<void()> run);
  bool subverb_was_given() const;          // whether the command line names a verb below this one
  std::vector<std::string> verbs() const;  // names of the verbs below this one
  // Runs the callback of the named verb. Returns 0 if the callback ran or --help was printed, 2 if an argument is
  // invalid.
  int parse(int argc, const char* const* argv);

 private:
  friend std::vector<Command> command_tree(const Verb& program);
  explicit Verb(CLI::App* app);
  VerbOption* wrap_option(CLI::Option* option);

  std::unique_ptr<CLI::App> owned_;  // null except in the root, whose CLI::App owns those of all verbs
  CLI::App* app_;
  std::deque<std::unique_ptr<Verb>> children_;
  std::deque<VerbOption> options_;
};

}  // namespace echoline::cli

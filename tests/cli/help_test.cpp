// The program's help pages, their examples, and errors under --json.
#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <sstream>

#include "tests/cli/program.hpp"

namespace echoline::testing {
namespace {

using nlohmann::json;

constexpr std::size_t kColumns = 80;

std::size_t width_of(std::string_view line) {
  return static_cast<std::size_t>(
      std::count_if(line.begin(), line.end(), [](unsigned char c) { return (c & 0xc0) != 0x80; }));
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(std::move(line));
  return lines;
}

// Help pages by verb: "", "sim", "sim run", ...
const std::map<std::string, std::string>& pages() {
  static const std::map<std::string, std::string> all = [] {
    std::map<std::string, std::string> results;
    std::vector<std::vector<std::string>> unvisited{{}};
    while (!unvisited.empty()) {
      std::vector<std::string> verb = std::move(unvisited.back());
      unvisited.pop_back();
      std::vector<std::string> words = verb;
      words.emplace_back("--help");
      const Outcome outcome = run_program(words);
      std::string name;
      for (const std::string& word : verb) name += (name.empty() ? "" : " ") + word;
      EXPECT_EQ(outcome.status, 0) << name << outcome.err;
      results[name] = outcome.out;
      bool listing = false;
      for (const std::string& line : lines_of(outcome.out)) {
        if (line == "Subcommands:")
          listing = true;
        else if (line.empty())
          listing = false;
        else if (listing && line.starts_with("  ") && line[2] != ' ')
          unvisited.push_back(verb), unvisited.back().push_back(line.substr(2, line.find(' ', 2) - 2));
      }
    }
    return results;
  }();
  return all;
}

// The words of a command as a shell splits them, up to a pipe, a redirection or &&.
std::vector<std::string> words_of(const std::string& command) {
  std::vector<std::string> words;
  std::string word;
  bool in_word = false, quoted = false;
  for (const char c : command + " ") {
    if (c == '\'') {
      quoted = !quoted, in_word = true;
    } else if (quoted || c != ' ') {
      word += c, in_word = true;
    } else if (in_word) {
      if (word == "|" || word == "&&" || word == ">" || word == "<" || word == "#") return words;
      words.push_back(std::exchange(word, ""));
      in_word = false;
    }
  }
  return words;
}

// Every command of this program that a help page gives as an example, without the program's name.
std::vector<std::pair<std::string, std::vector<std::string>>> examples() {
  std::vector<std::pair<std::string, std::vector<std::string>>> results;
  for (const auto& [verb, page] : pages()) {
    const std::vector<std::string> lines = lines_of(page);
    for (std::size_t i = 0; i < lines.size(); ++i) {
      std::string command = lines[i];
      while (command.ends_with('\\') && i + 1 < lines.size()) command.back() = ' ', command += lines[++i];
      const std::size_t at = command.find("echoline ");
      // An example is indented, behind at most a variable or a shell builtin.
      if (!command.starts_with("  ") || at == std::string::npos || command.find_first_of("`") < at) continue;
      const std::string before = command.substr(2, at - 2);
      if (before.find(' ') != std::string::npos && !before.ends_with("(") && !before.starts_with("ECHOLINE_TOKEN="))
        continue;
      std::string own = command.substr(at + 9);
      if (before.ends_with("(")) own = own.substr(0, own.rfind(')'));
      results.emplace_back(verb, words_of(own));
    }
  }
  return results;
}

TEST(Help, PagesAreEightyColumnsWide) {
  EXPECT_GT(pages().size(), 40u);
  for (const auto& [verb, page] : pages())
    for (const std::string& line : lines_of(page))
      EXPECT_LE(width_of(line), kColumns) << "echoline " << verb << " --help: " << line;
}

TEST(Help, PagesBeginWithASentenceAndTwoExamples) {
  for (const auto& [verb, page] : pages()) {
    SCOPED_TRACE("echoline " + verb + " --help");
    const std::string beginning = page.substr(0, page.find("Usage:"));
    EXPECT_TRUE(std::isupper(static_cast<unsigned char>(beginning[0]))) << beginning;
    const std::string command = "echoline " + (verb.empty() ? "" : verb);
    int examples = 0;
    for (const std::string& line : lines_of(beginning))
      examples += line.starts_with("  ") && line.find(command) != std::string::npos ? 1 : 0;
    EXPECT_GE(examples, 2) << beginning;
  }
}

TEST(Help, ExamplesNameVerbsOptionsAndFilesThatAreThere) {
  const auto all = examples();
  EXPECT_GT(all.size(), 45u);
  for (const auto& [page, words] : all) {
    std::string verb, command_text;
    std::size_t next = 0;
    while (next < words.size() && pages().contains(verb.empty() ? words[next] : verb + " " + words[next]))
      verb += (verb.empty() ? "" : " ") + words[next++];
    for (const std::string& word : words) command_text += " " + word;
    SCOPED_TRACE("echoline " + page + " --help: echoline" + command_text);
    ASSERT_NE(verb, "");
    for (std::size_t i = next; i < words.size() && words[i] != "--"; ++i) {
      if (words[i].starts_with("-") && words[i] != "-") {
        const std::string& text = pages().at(verb);
        EXPECT_TRUE(text.find("  " + words[i]) != std::string::npos || text.find("," + words[i]) != std::string::npos)
            << words[i];
      } else if (words[i].starts_with("configs/")) {
        EXPECT_TRUE(std::filesystem::exists(words[i])) << words[i];
      }
    }
    // The program parses the values too, because it reads all of them before it prints help.
    std::vector<std::string> arguments = words;
    arguments.insert(arguments.begin() + static_cast<std::ptrdiff_t>(next), "--help");
    const Outcome outcome = run_program(arguments);
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_EQ(outcome.out, pages().at(verb));
  }
}

// Examples that neither rent, nor wait for others, nor take minutes are run unchanged.
TEST(Help, ExamplesThatCostNothingRun) {
  static const std::set<std::string> kRun{"plan configs/quickstart.yaml",
                                          "adapter list",
                                          "adapter list countdown",
                                          "completion zsh",
                                          "completion fish",
                                          "completion bash",
                                          "man up",
                                          "advise configs/sim/small.yaml",
                                          "sim run configs/sim/small.yaml"};
  std::set<std::string> run;
  for (const auto& [page, words] : examples()) {
    std::string command_text;
    for (const std::string& word : words) command_text += (command_text.empty() ? "" : " ") + word;
    if (!kRun.contains(command_text) || !run.insert(command_text).second) continue;
    const Outcome outcome = run_program(words, std::chrono::seconds(120));
    EXPECT_EQ(outcome.status, 0) << command_text << "\n" << outcome.err;
    EXPECT_FALSE(outcome.out.empty()) << command_text;
  }
  EXPECT_EQ(run, kRun) << "an example is gone: remove it from the list";
}

// Arguments that make each verb with --json fail.
const std::map<std::string, std::vector<std::string>>& failures() {
  static const std::map<std::string, std::vector<std::string>> all{
      {"up", {"no-such.yaml"}},
      {"learner", {"no-such.yaml"}},
      {"plan", {"no-such.yaml"}},
      {"apply", {"no-such.json"}},
      {"evaluate", {"no-such-run"}},
      {"rescore", {"no-such-run"}},
      {"status", {"no-such-run"}},
      {"report", {"no-such-run"}},
      {"down", {"no-such-run"}},
      {"ledger show", {"no-such-run"}},
      {"ledger costs", {"no-such-run"}},
      {"ledger hosts", {"no-such-run"}},
      {"sweep", {"no-such.yaml", "--seeds", "2"}},
      {"advise", {"no-such.yaml"}},
      {"sim", {"--delay", "5"}},
      {"sim run", {"no-such.yaml"}},
      {"sim soak", {"--seeds", "0"}},
      {"sim market", {"--seeds", "0"}},
      {"model info", {"no-such-folder"}},
      {"model export", {"no-such-run@3", "-o", "x"}},
      {"model generate", {"no-such-folder", "--prompt", "x"}},
      {"delta diff", {"no-such-a", "no-such-b", "-o", "no-such-c"}},
      {"delta apply", {"no-such-a", "no-such-b", "-o", "no-such-c"}},
      {"delta verify", {"no-such-a", "no-such-b"}},
      {"delta inspect", {"no-such-a"}},
      {"delta fold", {"no-such-a", "no-such-b", "-o", "no-such-c"}},
      {"store ls", {"no-such-folder"}},
      {"store verify", {"no-such-folder"}},
      {"store fetch", {"no-such-folder", "--version", "1", "-o", "x"}},
      {"store export", {"no-such-folder", "-o", "x"}},
      {"store prune", {"no-such-folder", "--deltas", "1", "--anchors", "1"}},
      {"store pull", {"no-such-folder", "no-such-copy"}},
      {"adapter list", {"no-such-task"}},
      {"adapter check", {"no-such-task"}},
      {"adapter play", {"no-such-task"}},
      {"adapter bench", {"no-such-task"}},
      {"adapter new", {"sums"}},  // in no language
      {"adapter poker match", {"no-such-player", "tight"}},
      {"adapter poker serve", {"--player", "no-such-player"}},
      {"adapter poker join", {"no-such-dealer"}},
      {"config reference", {"--yaml"}},  // one or the other
      {"doctor", {"--no-such-option"}},  // what it finds is its report
  };
  return all;
}

TEST(Json, ErrorsAreJsonInEveryVerb) {
  for (const auto& [verb, page] : pages()) {
    if (page.find("  --json") == std::string::npos) continue;
    const auto failure = failures().find(verb);
    if (failure == failures().end()) {
      ADD_FAILURE() << "echoline " << verb << " has --json: say in failures() how it can fail";
      continue;
    }
    std::vector<std::string> words;
    std::istringstream names(verb);
    for (std::string name; names >> name;) words.push_back(name);
    for (const bool usage : {false, true}) {
      std::vector<std::string> arguments = words;
      if (usage)
        arguments.emplace_back("--no-such-option");
      else
        arguments.insert(arguments.end(), failure->second.begin(), failure->second.end());
      arguments.emplace_back("--json");
      const Outcome outcome = run_program(arguments);
      EXPECT_NE(outcome.status, 0) << verb;
      EXPECT_NE(outcome.err, "") << verb << ": people read it as well";
      const json printed = json::parse(outcome.out, nullptr, false);
      ASSERT_TRUE(printed.is_object()) << verb << " printed: " << outcome.out;
      EXPECT_FALSE(printed.at("error").at("code").get<std::string>().empty()) << verb;
      EXPECT_FALSE(printed.at("error").at("problems").empty()) << verb;
    }
  }
  const Outcome unknown = run_program({"upp", "--json"});
  EXPECT_EQ(unknown.status, 2);
  EXPECT_EQ(json::parse(unknown.out).at("error").at("problems").at(0),
            "unknown verb 'upp'; did you mean 'up'?; `echoline --help` lists them");
}

}  // namespace
}  // namespace echoline::testing

// Built-in adapters: deterministic and disjoint problems, exact grading, exact errors.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "base/config.hpp"
#include "data_plane/adapters/adapter.hpp"
#include "data_plane/adapters/adapter_config.hpp"
#include "data_plane/adapters/kinds.hpp"

namespace echoline::data_plane {
namespace {

std::unique_ptr<Adapter> make_valid(std::string_view name, std::string_view config, std::uint64_t seed = 1,
                                    AdapterUse use = AdapterUse::kProblems) {
  auto adapter = make_adapter(name, config, seed, use);
  EXPECT_TRUE(adapter) << adapter.error().message();
  return adapter ? std::move(*adapter) : nullptr;
}

std::string error_of(std::string_view name, std::string_view config) {
  const auto adapter = make_adapter(name, config, 1);
  EXPECT_FALSE(adapter) << config;
  if (adapter) return {};
  EXPECT_EQ(adapter.error().code, Code::kInvalid);
  return adapter.error().message();
}

Problem with_reference(const std::string& reference) {
  Problem problem;
  problem.set_id("p");
  problem.set_reference(reference);
  return problem;
}

TEST(Registry, UnknownNameSuggestsAndLists) {
  const std::string message = error_of("aritmetic", "");
  EXPECT_NE(message.find("did you mean 'arithmetic'?"), std::string::npos) << message;
  EXPECT_NE(message.find("known: arithmetic, code, countdown, dapo_math, gsm8k, guess, jsonl, library, math, nemo_gym, "
                         "openenv, poker, process"),
            std::string::npos)
      << message;
  EXPECT_EQ(error_of("chess_endgames", "").find("did you mean"), std::string::npos);
  EXPECT_EQ(adapter_names(),
            (std::vector<std::string>{"arithmetic", "code", "countdown", "dapo_math", "gsm8k", "guess", "jsonl",
                                      "library", "math", "nemo_gym", "openenv", "poker", "process"}));
}

TEST(Registry, WrongConfigurationIsNamed) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"[]", "expected a mapping (key: value), found a list"},
      {"{", "not valid YAML"},
      {R"({"operand_mx": 9})", "'operand_mx'; did you mean 'operand_max'?"},
      {R"({"operand_max": -1})", "operand_max: expected a whole number from 1 to 999999999, found '-1'"},
      {R"({"operand_max": 1.5})", "found '1.5'"},
      {R"({"operand_max": 9, "digits": 1})", "not both"},
      {R"({"digits": 10})", "expected 1 to 9"},
      {R"({"operations": []})", "non-empty list"},
      {R"({"operations": ["/"]})", "holds '/'"},
      {R"({"operations": ["+", "+"]})", "twice"},
      {R"({"evaluation_problems": 10})", "expected 200 to"},
      {R"({"operations": ["+"], "operand_max": 9})", "too few to train on"},
      {R"({"partial_credit": 2})", "expected 0 to 1"},
  };
  for (const auto& [config, expected] : cases) {
    const std::string message = error_of("arithmetic", config);
    EXPECT_NE(message.find(expected), std::string::npos) << config << ": " << message;
  }
}

TEST(Registry, OptionsAreReadInPlaceAndKeepTheirDefaults) {
  auto file = *ConfigFile::parse("options:\n  digits: 12\n  partal_credit: 1\n", "run.yaml");
  ConfigSection task = file.root();
  ASSERT_TRUE(read_adapter_options("arithmetic", task));
  EXPECT_EQ(file.finish().error().detail,
            "run.yaml:2:11: options.digits: expected 1 to 9, found '12'\n"
            "run.yaml:3:3: unknown key 'options.partal_credit'; did you mean 'partial_credit'?");
  auto good = *ConfigFile::parse("options: {operations: [\"+\"], digits: 3}\n", "run.yaml");
  task = good.root();
  const auto json = read_adapter_options("arithmetic", task);
  EXPECT_EQ(*json, R"({"operations":["+"],"digits":3,"evaluation_problems":256,"partial_credit":0,)"
                   R"("carries_forgotten":0})");
  EXPECT_TRUE(make_adapter("arithmetic", *json, 1));
  EXPECT_FALSE(read_adapter_options("arithmetics", task));
}

TEST(Permutation, IsOneForEverySizeAndKey) {
  for (std::uint64_t size = 1; size <= 70; ++size)
    for (std::uint64_t key = 0; key < 8; ++key) {
      std::set<std::uint64_t> seen;
      for (std::uint64_t i = 0; i < size; ++i) seen.insert(permuted(i, size, key));
      ASSERT_EQ(seen.size(), size);
      ASSERT_EQ(*seen.rbegin(), size - 1);
    }
  std::set<std::uint64_t> first;  // keys matter
  for (std::uint64_t key = 0; key < 64; ++key) first.insert(permuted(0, 1'000'000, key));
  EXPECT_GT(first.size(), 60u);
}

TEST(Arithmetic, TrainingAndEvaluationAreDisjointAndCoverTheSpace) {
  const auto adapter =
      make_valid("arithmetic", R"({"operations":["+","-"],"operand_max":14,"evaluation_problems":200})");
  std::set<std::string> held_out, trained;
  for (const Problem& problem : adapter->evaluation()) held_out.insert(problem.prompt());
  EXPECT_EQ(held_out.size(), 200u);
  const std::size_t training = 2 * 15 * 15 - 200;
  for (std::uint64_t i = 0; i < training; ++i) trained.insert(adapter->problem(i)->prompt());
  EXPECT_EQ(trained.size(), training);  // once each in the first round
  for (const std::string& prompt : trained) EXPECT_FALSE(held_out.contains(prompt)) << prompt;
  std::size_t same_place = 0;  // the second round has another order
  for (std::uint64_t i = 0; i < training; ++i)
    same_place += adapter->problem(i)->prompt() == adapter->problem(i + training)->prompt();
  EXPECT_LT(same_place, training / 10);
  EXPECT_TRUE(adapter->problem(~0ull));
}

TEST(Arithmetic, SameSeedSameProblems) {
  const auto a = make_valid("arithmetic", "{}", 5), b = make_valid("arithmetic", "{}", 5),
             c = make_valid("arithmetic", "{}", 6);
  int differs = 0;
  for (std::uint64_t i = 0; i < 100; ++i) {
    EXPECT_EQ(a->problem(i)->SerializeAsString(), b->problem(i)->SerializeAsString());
    EXPECT_EQ(a->evaluation()[i].id(), b->evaluation()[i].id());
    differs += a->problem(i)->id() != c->problem(i)->id();
  }
  EXPECT_GT(differs, 90);
  EXPECT_EQ(a->evaluation().size(), 256u);
}

TEST(Arithmetic, AnswersAreRight) {
  const auto adapter = make_valid("arithmetic", R"({"digits":9})");
  for (std::uint64_t i = 0; i < 300; ++i) {
    const Problem problem = *adapter->problem(i);
    const std::string& prompt = problem.prompt();
    const auto at = prompt.find_first_of("+-*");
    const std::int64_t a = std::stoll(prompt.substr(0, at)), b = std::stoll(prompt.substr(at + 1));
    const std::int64_t expected = prompt[at] == '+' ? a + b : prompt[at] == '-' ? a - b : a * b;
    EXPECT_EQ(problem.reference(), std::to_string(expected)) << prompt;
    EXPECT_EQ(prompt.back(), '=');
    EXPECT_TRUE(adapter->score(problem, *adapter->demonstration(problem))->correct);
  }
}

TEST(Arithmetic, ACarelessTeacherErrsOnlyWhereThereIsACarry) {
  const auto adapter = make_valid("arithmetic", R"({"operations":["+"],"operand_max":99,"carries_forgotten":0.7})", 1,
                                  AdapterUse::kProblems);
  int wrong = 0, carries = 0;
  for (std::uint64_t i = 0; i < 2000; ++i) {
    const Problem problem = *adapter->problem(i);
    const int a = std::stoi(problem.prompt()), b = std::stoi(problem.prompt().substr(problem.prompt().find('+') + 1));
    const bool carry = a % 10 + b % 10 >= 10 || a / 10 + b / 10 + (a % 10 + b % 10 >= 10 ? 1 : 0) >= 10;
    const std::string shown = *adapter->demonstration(problem);
    EXPECT_EQ(shown, *adapter->demonstration(problem));
    if (!carry) {
      EXPECT_EQ(shown, problem.reference()) << problem.prompt();
    }
    carries += carry ? 1 : 0;
    wrong += shown != problem.reference() ? 1 : 0;
  }
  EXPECT_GT(wrong, carries * 6 / 10);
  EXPECT_LT(wrong, carries * 9 / 10);
}

TEST(Arithmetic, GradesExactly) {
  const auto adapter = make_valid("arithmetic", R"({"partial_credit":0.5})", 1, AdapterUse::kScoring);
  const Problem problem = with_reference("95");
  for (const char* right : {"95", " 95", "95\n", "\t95 \r\n"}) {
    const Score score = *adapter->score(problem, right);
    EXPECT_TRUE(score.correct) << right;
    EXPECT_EQ(score.reward, 1);
    EXPECT_EQ(score.components.at("digits"), 1);
  }
  for (const char* wrong : {"", " ", "9", "955", "095", "+95", "9 5", "95.", "-95", "x"})
    EXPECT_FALSE(adapter->score(problem, wrong)->correct) << wrong;
  EXPECT_EQ(adapter->score(problem, "94")->reward, 0.25);
  EXPECT_EQ(adapter->score(problem, "955")->components.at("digits"), 2.0 / 3);
  EXPECT_EQ(make_valid("arithmetic", "")->score(problem, "94")->reward, 0);
  EXPECT_FALSE(adapter->score(Problem(), "")->correct);  // a problem without a reference is never solved
}

TEST(Gsm8k, GradesByTheRule) {
  const auto strict = make_valid("gsm8k", "", 1, AdapterUse::kScoring);
  const auto flexible = make_valid("gsm8k", R"({"mode":"flexible"})", 1, AdapterUse::kScoring);
  const auto last_number = make_valid("gsm8k", R"({"mode":"last_number"})", 1, AdapterUse::kScoring);
  const std::string filler(300, 'x');
  struct Case {
    std::string response;
    bool strict, flexible, last_number;
  };
  for (const Case& c : std::vector<Case>{
           {"#### 1800", true, true, true},
           {"so it is 1,800.\n#### 1,800", true, false, true},
           {"#### 5\nno, #### 1800", true, true, true},
           {"#### 1800\nno, #### 5", false, false, false},
           {"#### 1800 and 7 more", true, false, false},
           {"the answer is 1800", false, true, true},
           {"the answer is 1,800.", false, false, true},
           {"####1800", false, true, true},
           {"#### $1800", false, true, true},
           {"#### -1800", false, false, false},
           {"##### 1800", true, true, true},
           {"#### 1800#### ", true, true, true},
           {"#### 1800.0", false, false, false},
           {"#### 1800" + filler, false, false, false},
           {"#### 1800" + filler.substr(9), true, true, true},
           // Characters are counted, not bytes.
           {"#### 1800" +
                [] {
                  std::string s;
                  for (int i = 0; i < 291; ++i) s += "\xc3\xa9";
                  return s;
                }(),
            true, true, true},
           {"", false, false, false},
           {"...,,,", false, false, false},
       }) {
    EXPECT_EQ(strict->score(with_reference("1800"), c.response)->correct, c.strict) << c.response;
    EXPECT_EQ(flexible->score(with_reference("1800"), c.response)->correct, c.flexible) << c.response;
    EXPECT_EQ(last_number->score(with_reference("1800"), c.response)->correct, c.last_number) << c.response;
  }
  EXPECT_TRUE(strict->score(with_reference("-3"), "#### -3")->correct);
  EXPECT_TRUE(last_number->score(with_reference("-3"), "it is -3.")->correct);
  EXPECT_TRUE(flexible->score(with_reference("-3"), "it is -3")->correct);
  EXPECT_EQ(strict->score(with_reference("3"), "#### 4")->components.at("format"), 1);
}

TEST(Gsm8k, ScoringNeedsNoFiles) {
  const auto adapter =
      make_valid("gsm8k", R"({"train":"/nowhere/a.jsonl","test":"/nowhere/b.jsonl"})", 1, AdapterUse::kScoring);
  EXPECT_EQ(adapter->problem(0).error().code, Code::kUnavailable);
  EXPECT_TRUE(adapter->evaluation().empty());
  const auto missing = make_adapter("gsm8k", R"({"train":"/nowhere/a.jsonl","test":"/nowhere/b.jsonl"})", 1);
  EXPECT_EQ(missing.error().code, Code::kNotFound);
  EXPECT_NE(error_of("gsm8k", "{}").find("missing required key 'train'"), std::string::npos);
  EXPECT_NE(error_of("gsm8k", R"({"mode":"lax"})").find("expected one of strict, flexible, last_number"),
            std::string::npos);
}

class Gsm8kFiles : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::temp_directory_path() / fmt::format("gsm8k_test_{}", ::getpid());
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  std::string write(const std::string& name, const std::string& content) {
    std::ofstream(folder_ / name) << content;
    return (folder_ / name).string();
  }
  static std::string config(const std::string& train, const std::string& test) {
    return nlohmann::json{{"train", train}, {"test", test}}.dump();
  }
  std::filesystem::path folder_;
};

TEST_F(Gsm8kFiles, MalformedLineIsNamedByFileAndLine) {
  const std::string good = R"({"question":"q","answer":"a #### 1"})"
                           "\n";
  const std::string test = write("test.jsonl", good);
  const std::vector<std::pair<std::string, std::string>> cases = {
      {good + "\nnot json\n", ":3: expected a JSON object"},
      {good + "[]", ":2: expected a JSON object"},
      {R"({"question":"q"})", ":1: expected a string 'answer'"},
      {R"({"question":1,"answer":"#### 1"})", ":1: expected a string 'question'"},
      {good + R"({"question":"q","answer":"none"})", ":2: the answer must end"},
      {"", "the file has no rows"},
  };
  for (const auto& [content, expected] : cases) {
    const std::string path = write("train.jsonl", content);
    const std::string message = error_of("gsm8k", config(path, test));
    EXPECT_NE(message.find(expected), std::string::npos) << message;
    EXPECT_NE(message.find(path), std::string::npos) << message;
  }
  // A held-out problem is no training problem.
  EXPECT_NE(error_of("gsm8k", config(test, test)).find("held out"), std::string::npos);
}

TEST(Gsm8kData, EveryReferenceAnswerIsCorrectAndEveryOtherNumberWrong) {
  const std::filesystem::path data = "../shared/data/gsm8k";
  if (!std::filesystem::exists(data / "train.jsonl")) GTEST_SKIP() << "no GSM8K files in " << data;
  const std::string config =
      nlohmann::json{{"train", (data / "train.jsonl").string()}, {"test", (data / "test.jsonl").string()}}.dump();
  const auto adapter = make_valid("gsm8k", config);
  ASSERT_NE(adapter, nullptr);
  const std::vector<Problem> evaluation = adapter->evaluation();
  EXPECT_EQ(evaluation.size(), 1319u);
  std::set<std::string> held_out;
  for (const Problem& problem : evaluation) held_out.insert(problem.prompt());

  std::set<std::string> trained;
  for (std::uint64_t i = 0; i < 7473; ++i) {
    const Problem problem = *adapter->problem(i);
    EXPECT_FALSE(held_out.contains(problem.prompt()));
    trained.insert(problem.id());
    const auto answer = adapter->demonstration(problem);
    ASSERT_TRUE(answer);
    ASSERT_TRUE(adapter->score(problem, *answer)->correct) << *answer;
    ASSERT_FALSE(adapter->score(problem, *answer + "1")->correct) << *answer;
    ASSERT_FALSE(adapter->score(problem, "#### 1" + problem.reference())->correct);
    ASSERT_FALSE(adapter->score(problem, problem.reference())->correct);
  }
  EXPECT_EQ(trained.size(), 7473u);
  EXPECT_FALSE(adapter->demonstration(evaluation[0]));

  // The held-out answers come straight from the file.
  std::ifstream file(data / "test.jsonl");
  std::string line;
  for (const Problem& problem : evaluation) {
    ASSERT_TRUE(std::getline(file, line));
    const auto row = nlohmann::json::parse(line);
    ASSERT_EQ(row["question"], problem.prompt());
    ASSERT_TRUE(adapter->score(problem, row["answer"].get<std::string>())->correct);
  }
}

TEST(Adapters, KindsBehaveAsDescribed) {
  std::vector<std::string> names;
  for (const AdapterKind& kind : adapter_kinds()) {
    names.emplace_back(kind.name);
    EXPECT_FALSE(kind.meaning.empty());
    if (!kind.many_turns || kind.needs_file || kind.needs_sandbox) continue;
    const auto adapter = make_valid(kind.name, "{}");
    ASSERT_TRUE(adapter);
    EXPECT_EQ(adapter->repeatable({}), kind.repeatable) << kind.name;
    EXPECT_EQ(adapter->score(*adapter->problem(0), "").has_value(), !*kind.many_turns) << kind.name;
  }
  EXPECT_EQ(names, adapter_names());
}

}  // namespace
}  // namespace echoline::data_plane

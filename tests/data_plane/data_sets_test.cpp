// Adapters over JSON Lines: rows in their published form, held-out rows, errors with file and line, rewards.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <thread>

#include "base/config.hpp"
#include "base/random.hpp"
#include "data_plane/adapters/adapter.hpp"
#include "data_plane/adapters/maths/data_set.hpp"
#include "data_plane/policy_input.hpp"

namespace echoline::data_plane {
namespace {

using nlohmann::json;

class DataSets : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::temp_directory_path() / fmt::format("data_sets_test_{}", ::getpid());
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string write(const std::string& name, const std::string& content) {
    std::ofstream(folder_ / name, std::ios::binary) << content;
    return (folder_ / name).string();
  }
  std::string write(const std::string& name, const std::vector<json>& rows) {
    std::string content;
    for (const json& row : rows) content += row.dump() + "\n";
    return write(name, content);
  }
  static std::unique_ptr<Adapter> make_valid(std::string_view name, const json& options, std::uint64_t seed = 1) {
    auto adapter = make_adapter(name, options.dump(), seed);
    EXPECT_TRUE(adapter) << adapter.error().message();
    return adapter ? std::move(*adapter) : nullptr;
  }
  static std::string error_of(std::string_view name, const json& options) {
    const auto adapter = make_adapter(name, options.dump(), 1);
    EXPECT_FALSE(adapter) << options;
    if (adapter) return {};
    EXPECT_EQ(adapter.error().code, Code::kInvalid);
    return adapter.error().message();
  }
  // Prompts of the first `count` training problems.
  static std::multiset<std::string> prompts(const Adapter& adapter, std::uint64_t count) {
    std::multiset<std::string> result;
    for (std::uint64_t i = 0; i < count; ++i) result.insert(adapter.problem(i)->prompt());
    return result;
  }
  static std::vector<json> numbered(int count) {
    std::vector<json> rows;
    for (int i = 0; i < count; ++i)
      rows.push_back({{"prompt", fmt::format("What is {} + 1?", i)}, {"answer", std::to_string(i + 1)}});
    return rows;
  }
  std::filesystem::path folder_;
};

TEST_F(DataSets, MathTakesBothPublishedForms) {
  const std::string train =
      write("math.jsonl", std::vector<json>{{{"problem", "Half of one?"},
                                             {"level", "Level 1"},
                                             {"type", "Algebra"},
                                             {"solution", "It is $\\boxed{\\frac{1}{2}}$."}},
                                            {{"problem", "Bare?"}, {"solution", "So $\\boxed 7$."}}});
  const std::string test = write("math500.jsonl", std::vector<json>{{{"problem", "Two?"},
                                                                     {"solution", "$\\boxed{1+1}$"},
                                                                     {"answer", "2"},
                                                                     {"subject", "Algebra"},
                                                                     {"level", 2},
                                                                     {"unique_id", "test/algebra/1.json"}}});
  const auto adapter = make_valid("math", {{"train", train}, {"held_out", test}});
  ASSERT_NE(adapter, nullptr);
  ASSERT_EQ(adapter->evaluation().size(), 1u);
  EXPECT_EQ(adapter->evaluation()[0].reference(), "2");
  EXPECT_EQ(adapter->evaluation()[0].id(), "math/test/1");
  std::map<std::string, Problem> problems;
  for (std::uint64_t i = 0; i < 2; ++i) problems.emplace(adapter->problem(i)->prompt(), *adapter->problem(i));
  const Problem& half = problems.at("Half of one?");
  EXPECT_EQ(half.reference(), "\\frac{1}{2}");
  EXPECT_EQ(problems.at("Bare?").reference(), "7");
  EXPECT_EQ(problems.at("Bare?").id(), "math/train/2");
  EXPECT_TRUE(adapter->score(half, "so \\boxed{1/2}")->correct);
  EXPECT_FALSE(adapter->score(half, "so 1/2")->correct);
  EXPECT_EQ(*adapter->demonstration(half), "It is $\\boxed{\\frac{1}{2}}$.");
  EXPECT_FALSE(adapter->demonstration(adapter->evaluation()[0]));

  // For another rule, the demonstration states the answer after the solution.
  const auto dapo = make_valid("math", {{"train", train}, {"held_out", test}, {"rule", "math_dapo"}});
  EXPECT_EQ(*dapo->demonstration(half), "It is $\\boxed{\\frac{1}{2}}$.\nAnswer: \\frac{1}{2}");
  EXPECT_TRUE(dapo->score(half, *dapo->demonstration(half))->correct);
}

TEST_F(DataSets, RepeatedDapoRowsCountOnce) {
  std::vector<json> rows;
  for (int copy = 0; copy < 100; ++copy)
    for (int i = 0; i < 30; ++i)
      rows.push_back({{"data_source", "math_dapo"},
                      {"prompt", json::array({{{"role", "user"}, {"content", fmt::format("Problem {}", i)}}})},
                      {"ability", "MATH"},
                      {"reward_model", {{"ground_truth", std::to_string(i)}, {"style", "rule-lighteval/MATH_v2"}}},
                      {"extra_info", {{"index", fmt::format("{}-{}", copy, i)}}}});
  const std::string train = write("dapo.jsonl", rows);
  const auto adapter = make_valid("dapo_math", {{"train", train}, {"held_out_fraction", 0.2}});
  ASSERT_NE(adapter, nullptr);
  const std::size_t held_out = adapter->evaluation().size();
  EXPECT_GT(held_out, 0u);
  const auto trained = prompts(*adapter, 30 - held_out);
  EXPECT_EQ(std::set<std::string>(trained.begin(), trained.end()).size(), 30 - held_out);
  for (const Problem& problem : adapter->evaluation()) EXPECT_FALSE(trained.contains(problem.prompt()));

  const Problem problem = *adapter->problem(0);
  const Score right = *adapter->score(problem, "Answer: $" + problem.reference() + "$");
  EXPECT_TRUE(right.correct);
  EXPECT_EQ(right.reward, 1);
  EXPECT_EQ(adapter->score(problem, "Answer: 99")->reward, -1);
  EXPECT_EQ(adapter->score(problem, "")->reward, -1);
  EXPECT_EQ(*adapter->demonstration(problem), "Answer: " + problem.reference());
}

TEST_F(DataSets, ConversationsArePrompts) {
  const json talk = json::array(
      {{{"role", "system"}, {"content", "Be brief."}}, {{"role", "user"}, {"content", "Capital of France?"}}});
  const json more =
      json::array({{{"role", "user"}, {"content", "Capital of Italy?"}}, {{"role", "assistant"}, {"content", "Rome"}}});
  const auto adapter = make_valid(
      "jsonl",
      {{"train", write("talk.jsonl", std::vector<json>{{{"prompt", talk}, {"answer", "Paris"}}})},
       {"held_out", write("text.jsonl", std::vector<json>{{{"prompt", "Capital of Spain?"}, {"answer", "Madrid"}}})}});
  ASSERT_NE(adapter, nullptr);
  EXPECT_EQ(prompt_of(*adapter->problem(0)).messages,
            (std::vector<ChatMessage>{{"system", "Be brief."}, {"user", "Capital of France?"}}));
  EXPECT_TRUE(prompt_of(adapter->evaluation()[0]).messages.empty());
  const auto refused =
      make_adapter("jsonl",
                   json{{"train", write("bad.jsonl", std::vector<json>{{{"prompt", more}, {"answer", "Rome"}}})},
                        {"held_out_fraction", 0.5}}
                       .dump(),
                   1);
  ASSERT_FALSE(refused);
  EXPECT_NE(refused.error().message().find("bad.jsonl:1: 'prompt': the last message has the role 'assistant'"),
            std::string::npos)
      << refused.error().message();
}

TEST_F(DataSets, AnyFileWithKeysARuleAndATemplate) {
  const std::string train =
      write("any.jsonl",
            std::vector<json>{{{"q", {{"text", "Capital of France?"}}}, {"hint", "P"}, {"tries", 3}, {"a.b", "Paris"}},
                              {{"q", {{"text", "Capital of Italy?"}}}, {"hint", "R"}, {"tries", 4}, {"a.b", "Rome"}}});
  const std::string test = write(
      "test.jsonl",
      std::vector<json>{{{"q", {{"text", "Capital of Spain?"}}}, {"hint", "M"}, {"tries", 1}, {"a.b", "Madrid"}}});
  const json files = {{"train", train}, {"held_out", test}, {"answer", "a.b"}};
  json options = files;
  options["prompt"] = "q.text";
  EXPECT_EQ(make_valid("jsonl", options)->evaluation()[0].prompt(), "Capital of Spain?");
  options = files;
  options["template"] = "{{{hint}} {q.text} in {tries}: {} {";
  const auto adapter = make_valid("jsonl", options);
  EXPECT_EQ(adapter->evaluation()[0].prompt(), "{M} Capital of Spain? in 1: {} {");
  EXPECT_TRUE(adapter->score(adapter->evaluation()[0], " Madrid\n")->correct);
  EXPECT_FALSE(adapter->score(adapter->evaluation()[0], "Madrid.")->correct);

  options["rule"] = "math_reward";
  EXPECT_TRUE(make_valid("jsonl", options)->score(adapter->evaluation()[0], "\\boxed{Madrid}")->correct);
  options["prompt"] = "q.text";
  EXPECT_NE(error_of("jsonl", options).find("template: expected 'prompt' or 'template', not both"), std::string::npos);
  options.erase("prompt");
  options["template"] = "no key";
  EXPECT_NE(error_of("jsonl", options).find("expected a text with {key}"), std::string::npos);
  options = files;
  options["rule"] = "maths";
  EXPECT_NE(error_of("jsonl", options).find("rule: expected one of gsm8k_strict,"), std::string::npos);
  options = files;
  options["held_out_fraction"] = 0.1;
  EXPECT_NE(error_of("jsonl", options).find("not both"), std::string::npos);
}

// As for a run file: the options are read, and their resolved form makes the adapter, here and on workers.
TEST_F(DataSets, OptionsOfARunFileMakeTheAdapter) {
  const std::string train = write("train.jsonl", numbered(100)), test = write("test.jsonl", numbered(10));
  const std::string mine = "{answer: answer, train: " + train;
  for (const std::string& options :
       {mine + "}", mine + ", held_out: " + test + "}", mine + ", held_out: " + test + ", template: \"Q {prompt}\"}",
        mine + ", template: \"Q {prompt}\", held_out_fraction: 0.1, reward: {wrong: -0.5}}"}) {
    auto file = *ConfigFile::parse("options: " + options, "run.yaml");
    ConfigSection task = file.root();
    const auto resolved = read_adapter_options("jsonl", task);
    ASSERT_TRUE(resolved && file.finish()) << options;
    const auto learner = make_adapter("jsonl", *resolved, 1);
    ASSERT_TRUE(learner) << learner.error().message();
    EXPECT_FALSE((*learner)->evaluation().empty());
    EXPECT_TRUE(make_adapter("jsonl", *resolved, 1, AdapterUse::kScoring));
  }
}

TEST_F(DataSets, ABadRowIsNamedByFileAndLine) {
  const std::string good = numbered(1)[0].dump() + "\n";
  const std::vector<std::pair<std::string, std::string>> cases = {
      {good + "\r\n \t\nnot json\n", ":4: expected a JSON object"},
      {good + "[1]", ":2: expected a JSON object"},
      {good + R"({"answer":"1"})", ":2: expected a string 'prompt'"},
      {good + R"({"prompt":"p"})", ":2: expected a string 'answer'"},
      {good + R"({"prompt":"p","answer":1.5})", ":2: expected a string 'answer', found number"},
      {good + R"({"prompt":7,"answer":"1"})", ":2: expected a string 'prompt', found number"},
      {good + R"({"prompt":"","answer":"1"})", ":2: the prompt is empty"},
      {good + R"({"prompt":"p","answer":""})", ":2: "},
      {good + R"({"prompt":[],"answer":"1"})",
       ":2: 'prompt': expected a text or a list of 1 to 256 messages, found []"},
      {good + R"({"prompt":[{"role":"system","content":"s"}],"answer":"1"})",
       ":2: 'prompt': the last message has the role 'system'"},
      {good + R"({"prompt":[{"role":"user"}],"answer":"1"})",
       R"(:2: 'prompt': message {"role":"user"}: expected a 'content')"},
      {good + R"({"prompt":[7],"answer":"1"})", ":2: 'prompt': expected a message with the 'role'"},
      {good + R"({"prompt":"p","answer":"\ud800"})", ":2: expected a JSON object"},
      {good + "{\"prompt\":\"\xff\",\"answer\":\"1\"}", ":2: expected a JSON object"},
      {good + R"({"prompt":"p","answer":")" + std::string(65'537, '1') + "\"}", "expected 64 KiB at most"},
      {good + R"({"prompt":")" + std::string(262'145, '1') + R"(","answer":"1"})", "expected 256 KiB at most"},
      {good + R"({"prompt":")" + std::string(4u << 20, '1') + "\"}\n", ":2: longer than 4 MiB"},
      {good + std::string(100, '['), ":2: expected brackets nested at most 64 deep"},
      {"", "the file has no rows"},
      {"\n\n", "the file has no rows"},
  };
  for (const auto& [content, expected] : cases) {
    const std::string path = write("bad.jsonl", content);
    const std::string message = error_of("jsonl", {{"train", path}});
    EXPECT_NE(message.find(expected), std::string::npos) << message.substr(0, 300);
    EXPECT_NE(message.find(path), std::string::npos) << message.substr(0, 300);
  }
  const std::string good_file = write("good.jsonl", numbered(3));
  const std::string bad = write("bad.jsonl", good + "{}\n");
  EXPECT_NE(error_of("jsonl", {{"train", good_file}, {"held_out", bad}}).find("bad.jsonl:2: expected"),
            std::string::npos);
  EXPECT_EQ(make_adapter("jsonl", json{{"train", "/nowhere/a.jsonl"}}.dump(), 1).error().code, Code::kNotFound);
  EXPECT_EQ(make_adapter("jsonl", json{{"train", folder_.string()}}.dump(), 1).error().code, Code::kIo);
  EXPECT_NE(error_of("jsonl", json::object()).find("missing required key 'train'"), std::string::npos);
}

TEST_F(DataSets, AnAnswerThatNothingCanMatchIsNamed) {
  const std::string path =
      write("n.jsonl", std::vector<json>{{{"prompt", "p"}, {"answer", "12"}}, {{"prompt", "q"}, {"answer", "1,200"}}});
  const std::string message = error_of("jsonl", {{"train", path}, {"rule", "gsm8k_strict"}});
  EXPECT_NE(
      message.find("n.jsonl:2: no response can be right: by this rule even '#### 1,200' is not the answer '1,200'"),
      std::string::npos)
      << message;
  const std::string math = write("m.jsonl", std::vector<json>{{{"problem", "p"}, {"solution", "no box"}}});
  EXPECT_NE(error_of("math", {{"train", math}}).find("m.jsonl:1: the solution must have its answer in \\boxed{...}"),
            std::string::npos);
  const std::string none = write("m.jsonl", std::vector<json>{{{"problem", "p"}}});
  EXPECT_NE(error_of("math", {{"train", none}}).find("expected a string 'solution' or a string 'answer'"),
            std::string::npos);
}

TEST_F(DataSets, AShareIsHeldOutByPrompt) {
  std::vector<json> rows = numbered(2000);
  for (int i = 0; i < 2000; ++i)
    rows.push_back({{"prompt", rows[static_cast<std::size_t>(i)]["prompt"]}, {"answer", "another"}});
  const std::string path = write("n.jsonl", rows);
  const auto a = make_valid("jsonl", {{"train", path}, {"held_out_fraction", 0.1}});
  EXPECT_GT(a->evaluation().size(), 300u);
  EXPECT_LT(a->evaluation().size(), 500u);
  const auto trained = prompts(*a, 4000 - a->evaluation().size());
  EXPECT_EQ(trained.size(), 4000 - a->evaluation().size());
  for (const auto& prompt : trained) ASSERT_EQ(trained.count(prompt), 2u);  // both of its rows, once each
  for (const Problem& problem : a->evaluation()) ASSERT_FALSE(trained.contains(problem.prompt()));

  const auto same = make_valid("jsonl", {{"train", path}, {"held_out_fraction", 0.1}}),
             other = make_valid("jsonl", {{"train", path}, {"held_out_fraction", 0.1}}, 2);
  ASSERT_EQ(same->evaluation().size(), a->evaluation().size());
  for (std::size_t i = 0; i < same->evaluation().size(); ++i)
    EXPECT_EQ(same->evaluation()[i].id(), a->evaluation()[i].id());
  EXPECT_NE(other->evaluation()[0].id() + other->evaluation()[1].id(),
            a->evaluation()[0].id() + a->evaluation()[1].id());
  int moved = 0;
  for (std::uint64_t i = 0; i < 50; ++i) moved += other->problem(i)->id() != a->problem(i)->id();
  EXPECT_GT(moved, 45);
  const std::string few = write("few.jsonl", numbered(1));
  EXPECT_NE(error_of("jsonl", {{"train", few}}).find("leaves"), std::string::npos);
}

TEST_F(DataSets, HeldOutRowsOfAFileAreNotTrainedOn) {
  const std::string train = write("train.jsonl", numbered(10));
  std::vector<json> held(numbered(4));
  held[0]["answer"] = "a different one";
  const std::string test = write("test.jsonl", held);
  const auto adapter = make_valid("jsonl", {{"train", train}, {"held_out", test}});
  EXPECT_EQ(prompts(*adapter, 6).size(), 6u);
  for (const Problem& problem : adapter->evaluation()) EXPECT_FALSE(prompts(*adapter, 60).contains(problem.prompt()));
  EXPECT_NE(error_of("jsonl", {{"train", train}, {"held_out", train}}).find("held out"), std::string::npos);
}

TEST_F(DataSets, AFileThatChangesIsNoticed) {
  const std::string train = write("train.jsonl", numbered(3));
  const auto adapter = make_valid(
      "jsonl",
      {{"train", train}, {"held_out", write("test.jsonl", std::vector<json>{{{"prompt", "p"}, {"answer", "1"}}})}});
  ASSERT_TRUE(adapter->problem(0));
  write("train.jsonl", std::string("{}\n"));
  const auto gone = adapter->problem(0);
  ASSERT_FALSE(gone);
  EXPECT_EQ(gone.error().code, Code::kCorrupt);
  EXPECT_NE(gone.error().detail.find("the file has changed"), std::string::npos);
}

TEST_F(DataSets, RowsAreReadFromSeveralThreadsAndAcrossBlocks) {
  std::vector<json> rows = numbered(3000);  // some of 3 KB, so that lines lie across the blocks they are read in
  for (json& row : rows) row["padding"] = std::string(1500, 'x');
  const std::string train = write("train.jsonl", rows);
  const auto adapter = make_valid("jsonl", {{"train", train}});
  const std::uint64_t count = 3000 - adapter->evaluation().size();
  std::vector<std::multiset<std::string>> seen(4);
  std::vector<std::thread> threads;
  for (auto& mine : seen) threads.emplace_back([&] { mine = prompts(*adapter, count); });
  for (auto& thread : threads) thread.join();
  for (const auto& one : seen) {
    EXPECT_EQ(one, seen[0]);
    EXPECT_EQ(std::set<std::string>(one.begin(), one.end()).size(), count);
  }
}

TEST_F(DataSets, RewardsAreSumsOfNamedParts) {
  const json pulse = {{"correct", 0.7}, {"format", 0.15}, {"thinking", 0.1}, {"no_trailing", 0.05}};
  const auto adapter = make_adapter("math", json{{"reward", pulse}}.dump(), 1, AdapterUse::kScoring);
  ASSERT_TRUE(adapter) << adapter.error().message();
  Problem problem;
  problem.set_reference("7");
  const auto reward = [&](const std::string& response) { return (*adapter)->score(problem, response)->reward; };
  EXPECT_DOUBLE_EQ(reward("<think>3+4</think>\\boxed{7}"), 1);
  EXPECT_DOUBLE_EQ(reward("</THINK>\\boxed{7}"), 1);
  EXPECT_DOUBLE_EQ(reward("\\boxed{7}"), 0.9);
  EXPECT_DOUBLE_EQ(reward("\\boxed{8}"), 0.2);
  EXPECT_DOUBLE_EQ(reward("<think></think>"), 0.1);
  EXPECT_DOUBLE_EQ(reward(""), 0);
  EXPECT_DOUBLE_EQ(reward("\\boxed{7}" + std::string(40, '.')), 0.85 + 0.05 * 0.8);
  EXPECT_DOUBLE_EQ(reward("\\boxed{7}" + std::string(50, '.')), 0.7 + 0.05 * 0.75);
  EXPECT_DOUBLE_EQ(reward("\\boxed{7}" + std::string(5000, '.')), 0.7);
  const Score score = *(*adapter)->score(problem, "\\boxed{7} ok");
  EXPECT_EQ(score.components, (std::map<std::string, double>{
                                  {"correct", 1}, {"format", 1}, {"thinking", 0}, {"no_trailing", 1 - 3 / 200.0}}));
  EXPECT_FALSE((*adapter)->score(Problem(), "\\boxed{}")->correct);  // a problem without a reference is never solved
  EXPECT_NE(error_of("math", {{"train", "x"}, {"reward", {{"correct", 2}}}}).find("reward.correct: expected"),
            std::string::npos);
}

// Reading any line gives a row within its limits or an error.
TEST(Rows, SurviveSpoiledBytes) {
  const maths::RowReader reader = [](const json& row) -> Result<maths::Row> {
    ECHO_ASSIGN(PolicyInput prompt, maths::prompt_at(row, "prompt"));
    ECHO_ASSIGN(std::string answer, maths::text_or_number_at(row, "reward_model.ground_truth"));
    return maths::Row{std::move(prompt), std::move(answer)};
  };
  const std::string sound = R"({"prompt":[{"role":"user","content":"p\u00e9"}],"reward_model":{"ground_truth":17}})";
  ASSERT_TRUE(maths::read_row(sound, reader));
  Random random(5);
  int refused = 0;
  for (int i = 0; i < 20'000; ++i) {
    std::string line = sound;
    for (std::uint64_t n = 1 + random.below(3); n > 0; --n)
      line[random.below(line.size())] = static_cast<char>(random.below(256));
    if (random.below(4) == 0) line.resize(random.below(line.size()));
    const auto row = maths::read_row(line, reader);
    refused += !row;
    EXPECT_TRUE(!row || (!row->prompt.text.empty() && !row->reference.empty()));
  }
  EXPECT_GT(refused, 10'000);
  EXPECT_FALSE(maths::read_row(std::string(maths::kRowBytesMax, '['), reader));
  EXPECT_FALSE(maths::read_row("{\"prompt\":" + std::string(1u << 20, '[') + std::string(1u << 20, ']') + "}", reader));
}

}  // namespace
}  // namespace echoline::data_plane

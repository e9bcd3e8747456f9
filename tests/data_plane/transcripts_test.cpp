// The transcripts in FORMAT.md match the connection's real input and output, and the Python helper's answers.
#include <gtest/gtest.h>

#include <fstream>
#include <future>
#include <sstream>

#include "base/random.hpp"
#include "data_plane/adapters/process/connection.hpp"
#include "data_plane/adapters/process/python_helper.hpp"

namespace echoline::data_plane::process {
namespace {

using nlohmann::json;

struct Transcript {
  std::string task;                // in Python
  std::vector<std::string> lines;  // "> request", "< answer"
};

// The documentation's transcripts by name. A transcript belongs to the Python task before it.
std::map<std::string, Transcript> transcripts() {
  std::ifstream file("data_plane/adapters/process/FORMAT.md");
  std::map<std::string, Transcript> transcripts_by_name;
  constexpr std::string_view kMark = "transcript ";
  std::string task, block;  // the present block's first words, empty outside blocks
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("```")) {
      block = block.empty() ? line.substr(3) : "";
      if (block == "python task") task.clear();
      if (block.starts_with(kMark)) transcripts_by_name[block.substr(kMark.size())].task = task;
    } else if (block == "python task") {
      task += line + "\n";
    } else if (block.starts_with(kMark)) {
      transcripts_by_name[block.substr(kMark.size())].lines.push_back(line);
    }
  }
  return transcripts_by_name;
}

// Plays the program's part of a transcript, and ends on any other input.
constexpr std::string_view kReplay = R"(
import sys
for line in open("/task/transcript", encoding="utf-8").read().splitlines():
    if line.startswith("> "):
        request = sys.stdin.buffer.readline().decode().rstrip("\n")
        if request != line[2:]:
            sys.exit(f"expected {line[2:]}\nfound    {request}")
    else:
        sys.stdout.buffer.write(line[2:].encode() + b"\n")
        sys.stdout.flush()
sys.stdin.read()
)";

class Transcripts : public ::testing::Test {
 protected:
  void SetUp() override {
    auto pool = sandbox::Pool::start();
    if (!pool) GTEST_SKIP() << pool.error().message();
    pool_ = *std::move(pool);
    transcripts_ = transcripts();
  }
  static sandbox::Command python(std::string_view script) {
    sandbox::Command command;
    command.argv = {"/usr/bin/python3", "/task/script.py"};
    command.environment = {{"PYTHONPATH", "/task"}};
    command.files = {{"/task/script.py", std::string(script)}, {"/task/echoline_task.py", std::string(kPythonHelper)}};
    command.limits.wall.reset();
    command.limits.cpu.reset();
    return command;
  }
  std::unique_ptr<Connection> replay(const std::string& name, const std::string& settings) {
    ConnectionOptions options;
    options.command = python(kReplay);
    for (const std::string& line : transcripts_[name].lines) options.command.files["/task/transcript"] += line + "\n";
    options.seed = 7;
    options.settings_json = settings;
    return std::make_unique<Connection>(*pool_, options);
  }
  // Sends one call, and then those that `then` makes of its answer. Those share one request, because they are all there
  // before the next write.
  using Answers = std::vector<Result<json>>;
  static Answers ask_then(Connection& connection, Method first, const std::string& item,
                          const std::function<std::vector<Connection::Call>(const json&)>& then) {
    auto promise = std::make_shared<std::promise<Answers>>();
    auto answers = std::make_shared<Answers>();
    Connection::Call call;
    call.method = first;
    call.item = item;
    call.on_answer = [&connection, promise, answers, then](Result<json> answer) {
      if (!answer) return promise->set_value({answer.error()});
      auto calls = then(*answer);
      for (Connection::Call& next : calls) {
        next.on_answer = [promise, answers, count = calls.size()](Result<json> next_answer) {
          answers->push_back(std::move(next_answer));
          if (answers->size() == count) promise->set_value(*answers);
        };
        connection.ask(std::move(next));
      }
    };
    connection.ask(std::move(call));
    return promise->get_future().get();
  }

  std::unique_ptr<sandbox::Pool> pool_;
  std::map<std::string, Transcript> transcripts_;
};

std::vector<Problem> problems_in(const json& item, const std::vector<std::string>& ids) {
  std::vector<Problem> problems;
  for (const json& fields : item.at("problems"))
    problems.push_back(read_problem(fields, ids.at(problems.size()))->problem);
  return problems;
}

TEST_F(Transcripts, TheConnectionFollowsTheTranscriptOfOneResponse) {
  const auto connection = replay("one response", R"({"level": 2})");
  const auto hello = connection->hello();
  ASSERT_TRUE(hello) << hello.error().message();
  EXPECT_EQ(hello->name, "twos");
  EXPECT_TRUE(hello->deterministic);
  EXPECT_FALSE(hello->has_turns);
  EXPECT_EQ(hello->problem_count, 8u);
  EXPECT_EQ(hello->evaluation_count, 1u);
  const auto evaluation = connection->ask_and_wait(Method::kEvaluation, R"({"rows":[0]})");
  ASSERT_TRUE(evaluation) << evaluation.error().message();
  EXPECT_EQ(read_problem(evaluation->at("problems").at(0), "x")->demonstration, "2");
  const auto answers = ask_then(*connection, Method::kProblems, R"({"rows":[5,0]})", [](const json& answer) {
    const auto problems = problems_in(answer, {"twos/problems/5", "twos/problems/0"});
    std::vector<Connection::Call> calls(2);
    calls[0].item = score_item(problems[0], "8");
    calls[1].item = score_item(problems[1], "\"é\n");
    return calls;
  });
  ASSERT_EQ(answers.size(), 2u) << answers[0].error().message();
  EXPECT_EQ(read_score(*answers[0])->reward, 1);
  EXPECT_TRUE(read_score(*answers[0])->correct);
  EXPECT_EQ(read_score(*answers[1])->components.at("length"), 3);
  EXPECT_FALSE(read_score(*answers[1])->correct);
}

TEST_F(Transcripts, TheConnectionFollowsTheTranscriptOfManyTurns) {
  const auto connection = replay("many turns", "{}");
  const auto hello = connection->hello();
  ASSERT_TRUE(hello) << hello.error().message();
  EXPECT_TRUE(hello->has_turns);
  std::uint64_t start_number = 0;
  const auto answers = ask_then(*connection, Method::kProblems, R"({"rows":[0]})", [&](const json& answer) {
    const auto problems = problems_in(answer, {"guess/problems/0"});
    std::vector<Connection::Call> calls(2);
    for (std::uint64_t i = 0; i < 2; ++i) {
      calls[i].method = Method::kStep;
      calls[i].item = step_item(i + 1, i == 0 ? "5" : "five", &problems[0], 40 + i);
      calls[i].on_start_number = [&](std::uint64_t number) { start_number = number; };
    }
    return calls;
  });
  ASSERT_EQ(answers.size(), 2u) << answers[0].error().message();
  const auto step = read_step(*answers[0]);
  EXPECT_FALSE(step->done);
  EXPECT_EQ(step->observation.text, "higher");
  EXPECT_EQ(step->score.reward, -0.25);
  EXPECT_EQ(read_cut(*answers[0])->reward, -1);
  EXPECT_EQ(answers[1].error().code, Code::kUnavailable);
  connection->close(2, start_number);
  const auto last = connection->ask_and_wait(Method::kStep, step_item(1, "6", nullptr, 0));
  ASSERT_TRUE(last) << last.error().message();
  EXPECT_TRUE(read_step(*last)->done);
  EXPECT_EQ(read_cut(*last)->reward, 0);
}

// The helper may use another key order and another form of numbers, with the same meaning.
TEST_F(Transcripts, ThePythonHelperGivesTheAnswersOfTheTranscripts) {
  ASSERT_EQ(transcripts_.size(), 2u);
  for (const auto& [name, transcript] : transcripts_) {
    auto program = pool_->launch(python(transcript.task));
    ASSERT_TRUE(program) << program.error().message();
    int answers = 0;
    for (const std::string& line : transcript.lines) {
      if (line.starts_with("> ")) {
        ASSERT_TRUE(program->write(line.substr(2) + "\n", std::chrono::seconds(30)));
        continue;
      }
      const auto answer = program->read_line(kLineBytesMax, std::chrono::seconds(30));
      ASSERT_TRUE(answer) << name << ": " << answer.error().message() << " " << program->wait().err;
      EXPECT_EQ(json::parse(*answer), json::parse(line.substr(2))) << name;
      ++answers;
    }
    EXPECT_GE(answers, 3) << name;
  }
}

// The page's requests that the connection never sends.
TEST_F(Transcripts, ReservedMethodsAreAnsweredByThePythonHelper) {
  auto program = pool_->launch(python(transcripts_["one response"].task));
  ASSERT_TRUE(program) << program.error().message();
  for (const auto& [line, expected] : std::vector<std::pair<std::string, std::string>>{
           {R"({"method":"cancel"})"
            "\n"
            R"({"id":1,"method":"ping"})",
            R"({"id":1,"result":{}})"},
           {R"({"id":2,"method":"sing","items":[]})", R"({"id":2,"error":"ValueError: unknown method 'sing'"})"}}) {
    ASSERT_TRUE(program->write(line + "\n", std::chrono::seconds(30)));
    const auto answer = program->read_line(kLineBytesMax, std::chrono::seconds(30));
    ASSERT_TRUE(answer) << answer.error().message();
    EXPECT_EQ(json::parse(*answer), json::parse(expected));
  }
}

// Compares the fast way of writing texts with the slow one.
TEST(ProcessProtocol, AnyTextIsWrittenAsJson) {
  Random random(3, 0);
  const std::string_view pieces[] = {"plain text ", "\"",   "\\",       "\n",   "\x01",     "\x7f", "é", "日本",
                                     "😀",           "\xff", "\xe2\x82", "\xc3", "\x80\x80", " ",    "a"};
  for (int round = 0; round < 20'000; ++round) {
    std::string text;
    for (std::uint64_t i = random.below(12); i > 0; --i) text += pieces[random.below(std::size(pieces))];
    Problem problem;
    problem.set_id("i");
    problem.set_prompt(text);
    problem.set_metadata_json(R"({"b": [1, null], "a": "x"})");
    json expected{{"problem",
                   {{"id", "i"}, {"prompt", text}, {"reference", ""}, {"metadata", {{"b", {1, nullptr}}, {"a", "x"}}}}},
                  {"response", text}};
    ASSERT_EQ(score_item(problem, text), expected.dump(-1, ' ', false, json::error_handler_t::replace));
    expected["seed"] = 5, expected["episode"] = 7;
    const std::string step = step_item(7, text, &problem, 5);
    ASSERT_EQ(step, expected.dump(-1, ' ', false, json::error_handler_t::replace));
    ASSERT_EQ(request(9, Method::kStep, std::chrono::milliseconds(20), {step, step}),
              fmt::format("{{\"deadline_ms\":20,\"id\":9,\"items\":[{0},{0}],\"method\":\"step\"}}\n", step));
  }
}

TEST(ProcessProtocol, BracketsInTextsAreNoDepth) {
  const std::string text(200, '[');
  const auto answer = read_answer(
      json{{"id", 1}, {"result", {{"items", json::array({{{"reward", 1}, {"note", text + "\\\"{"}}})}}}}.dump(), 1);
  EXPECT_TRUE(answer) << answer.error().message();
  EXPECT_FALSE(read_answer("{\"id\":1,\"result\":{\"a\":" + text + std::string(200, ']') + "}}", 1));
}

}  // namespace
}  // namespace echoline::data_plane::process

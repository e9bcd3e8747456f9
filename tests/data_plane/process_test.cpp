// Tasks that are programs: their answers are used, and a fault is an error of that program alone.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <future>

#include "data_plane/adapters/adapter.hpp"
#include "data_plane/policy_input.hpp"
#include "data_plane/sandbox/sandbox.hpp"

namespace echoline::data_plane {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr std::string_view kSum = R"(
import echoline_task as task
PROBLEMS = [{"prompt": f"{a}+{b}=", "reference": str(a + b), "demonstration": f"{a + b}"}
            for a in range(10) for b in range(10)]

@task.score
def score(problem, response):
    print("to the log")
    if response == "raise":
        raise ValueError("cannot read it")
    if response == "nan":
        return float("nan")
    if response == "hang":
        import time; time.sleep(60)
    if response == "die":
        import os; os._exit(7)
    right = response.strip() == problem["reference"]
    return {"reward": float(right), "components": {"exact": float(right)}}

task.run(problems=PROBLEMS[20:], evaluation=lambda: PROBLEMS[:20], name="sums")
)";

class ProcessTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { sandboxed_ = sandbox::Pool::start().has_value(); }
  void SetUp() override {
    if (!sandboxed_) GTEST_SKIP() << sandbox::Pool::start().error().message();
    std::string name = (std::filesystem::temp_directory_path() / "echoline-process-XXXXXX").string();
    folder_ = ::mkdtemp(name.data());
  }
  void TearDown() override {
    if (!folder_.empty()) std::filesystem::remove_all(folder_);
  }
  std::string script(std::string_view text, const std::string& more = "") {
    const auto path = folder_ / "task.py";
    std::ofstream(path) << text;
    return fmt::format(R"({{"script": "{}"{}{}}})", path.string(), more.empty() ? "" : ", ", more);
  }
  std::unique_ptr<Adapter> make_valid(std::string_view text, const std::string& more = "") {
    auto adapter = make_adapter("process", script(text, more), 3);
    EXPECT_TRUE(adapter) << adapter.error().message();
    return adapter ? *std::move(adapter) : nullptr;
  }
  static std::string step_text(const Adapter& adapter, const Problem& problem, const std::string& response) {
    const auto episode = *adapter.begin(problem, 1);
    const auto step = step_and_wait(*episode, response);
    if (!step) return std::string(to_string(step.error().code)) + ": " + step.error().message();
    return fmt::format("{}{}{}", step->score.reward, step->score.correct ? " correct" : "",
                       step->done ? "" : " " + step->observation.text);
  }

  static inline bool sandboxed_ = false;
  std::filesystem::path folder_;
};

TEST_F(ProcessTest, ATaskInPythonHasProblemsAndScores) {
  const auto adapter = make_valid(kSum);
  ASSERT_TRUE(adapter);
  EXPECT_EQ(adapter->repeatable({}), Repeatable::kCostly);
  EXPECT_EQ(adapter->evaluation().size(), 20u);
  EXPECT_EQ(adapter->evaluation()[3].prompt(), "0+3=");
  std::set<std::string> seen;
  for (std::uint64_t i = 0; i < 80; ++i) seen.insert(adapter->problem(i)->id());
  EXPECT_EQ(seen.size(), 80u) << "each once before any comes again";
  EXPECT_TRUE(seen.begin()->starts_with("sums/problems/"));
  const Problem problem = *adapter->problem(5);
  EXPECT_EQ(problem.id(), make_valid(kSum)->problem(5)->id());
  EXPECT_EQ(adapter->demonstration(problem), problem.reference());
  EXPECT_FALSE(adapter->demonstration(adapter->evaluation()[3]));
  EXPECT_EQ(step_text(*adapter, problem, problem.reference()), "1 correct");
  EXPECT_EQ(step_text(*adapter, problem, "x"), "0");
  EXPECT_THAT(step_text(*adapter, problem, "raise"), HasSubstr("ValueError: cannot read it"));
  EXPECT_THAT(step_text(*adapter, problem, "nan"), HasSubstr("ValueError")) << "no number, no reward";
}

TEST_F(ProcessTest, AScriptTravelsToWorkers) {
  const std::string options = script(kSum, R"("settings": {"level": 3})");
  const auto learner = *make_adapter("process", options, 3);
  const std::string worker_options = learner->options_for_workers(options);
  std::ofstream(folder_ / "large.txt") << std::string(1000u << 10, 'x');
  std::ofstream(folder_ / "larger.txt") << std::string(1000u << 10, 'y');
  const std::string with_files = script(kSum, R"("files": ["large.txt", "larger.txt"])");
  const auto large = make_adapter("process", (*make_adapter("process", with_files, 3))->options_for_workers(with_files),
                                  3, AdapterUse::kScoring);
  EXPECT_TRUE(large) << large.error().message().substr(0, 300);
  std::filesystem::remove(folder_ / "task.py");
  const auto worker = make_adapter("process", worker_options, 3, AdapterUse::kScoring);
  ASSERT_TRUE(worker) << worker.error().message();
  const Problem problem = *learner->problem(0);
  EXPECT_EQ(step_text(**worker, problem, problem.reference()), "1 correct");
  EXPECT_TRUE((*worker)->evaluation().empty());
}

// A call that hangs, or ends the program, does not affect the other calls, in its batch or in another.
TEST_F(ProcessTest, AFaultyCallDoesNotAffectOtherCalls) {
  const auto adapter = make_valid(kSum, R"("deadline": "500 ms")");
  ASSERT_TRUE(adapter);
  const Problem problem = *adapter->problem(5);
  for (const char* trouble : {"hang", "die"}) {
    std::vector<std::unique_ptr<Episode>> episodes;
    std::vector<std::future<Result<Step>>> steps;
    for (int i = 0; i < 20; ++i) {
      auto promise = std::make_shared<std::promise<Result<Step>>>();
      steps.push_back(promise->get_future());
      episodes.push_back(*adapter->begin(problem, 1));
      episodes.back()->step(i == 7 ? trouble : problem.reference(),
                            [promise](Result<Step> step) { promise->set_value(std::move(step)); });
    }
    for (int i = 0; i < 20; ++i) {
      const auto step = steps[static_cast<std::size_t>(i)].get();
      EXPECT_EQ(step.has_value(), i != 7) << trouble << " " << i << (step ? "" : step.error().message());
    }
  }
}

constexpr std::string_view kTurns = R"(
import echoline_task as task

class Guess:
    def __init__(self, problem, seed, settings):
        self.wanted, self.left = int(problem["reference"]), settings["guesses"]
    def step(self, response):
        self.left -= 1
        if response == "die":
            import os; os._exit(1)
        found = response == str(self.wanted)
        return {"reward": float(found), "done": found or self.left == 0,
                "observation": "+" if int(response) < self.wanted else "-",
                "cut": {"reward": -float(self.left), "components": {"unused": self.left}}}

task.run(episode=Guess, problems=[{"prompt": "?", "reference": "5"}], deterministic=False)
)";

TEST_F(ProcessTest, EpisodesOfManyTurns) {
  const auto adapter = make_valid(kTurns, R"("settings": {"guesses": 3})");
  ASSERT_TRUE(adapter);
  EXPECT_EQ(adapter->repeatable({}), Repeatable::kNot);
  const Problem problem = *adapter->problem(0);
  std::vector<std::unique_ptr<Episode>> episodes;
  for (int i = 0; i < 50; ++i) episodes.push_back(*adapter->begin(problem, 1));
  const auto say = [&](std::size_t which, const std::string& text) {
    const auto step = step_and_wait(*episodes[which], text);
    if (!step) return step.error().message();
    return fmt::format("{}{}", step->score.reward, step->done ? "" : " " + step->observation.text);
  };
  for (std::size_t i = 0; i < episodes.size(); ++i)
    EXPECT_EQ(say(i, std::to_string(i % 10)), i % 10 == 5 ? "1" : i % 10 < 5 ? "0 +" : "0 -");
  EXPECT_EQ(say(0, "4"), "0 +");
  EXPECT_EQ(episodes[0]->cut().reward, -1) << "the score if no room is left";
  EXPECT_EQ(episodes[7]->cut().components.at("unused"), 2);
  EXPECT_EQ(say(0, "5"), "1");
  EXPECT_EQ(say(1, "4"), "0 +");
  EXPECT_EQ(say(1, "6"), "0") << "over";
  EXPECT_THAT(say(2, "die"), HasSubstr("program"));
  EXPECT_THAT(say(3, "4"), HasSubstr("was restarted")) << "the program's state is lost";
  episodes.push_back(*adapter->begin(problem, 1));
  EXPECT_EQ(say(50, "5"), "1") << "and new episodes begin";
}

TEST_F(ProcessTest, EpisodesMayUseMessages) {
  const auto adapter = make_valid(R"(
import echoline_task as task

class Search:
    def __init__(self, problem, seed, settings):
        self.prompt = problem["prompt"]
    def step(self, response):
        if response != "search":
            return {"reward": float(response == self.prompt[1]["content"])}
        return {"reward": 0.0, "done": False,
                "observation": [{"role": "tool", "content": "3 pages"}, {"role": "user", "content": "Well?"}]}

task.run(episode=Search,
         problems=[{"prompt": [{"role": "system", "content": "Search."}, {"role": "user", "content": "Who?"}]}])
)");
  ASSERT_TRUE(adapter);
  const Problem problem = *adapter->problem(0);
  EXPECT_EQ(prompt_of(problem).messages, (std::vector<ChatMessage>{{"system", "Search."}, {"user", "Who?"}}));
  const auto episode = *adapter->begin(problem, 1);
  const auto step = step_and_wait(*episode, "search");
  ASSERT_TRUE(step) << step.error().message();
  EXPECT_EQ(step->observation.messages, (std::vector<ChatMessage>{{"tool", "3 pages"}, {"user", "Well?"}}));
  EXPECT_EQ(step_and_wait(*episode, "Who?")->score.reward, 1) << "the program gets its own prompt unchanged";
}

// Unchanged scoring functions of other trainers.
TEST_F(ProcessTest, FunctionsOfOtherTrainersNeedNoChange) {
  const std::string problems =
      R"(problems=[{"prompt": "2+2=", "reference": "4", "metadata": {"data_source": "sums", "level": 2}}]))";
  const auto scored = [&](const std::string& body, const std::string& made_of, const std::string& response) {
    const auto adapter =
        make_valid("import echoline_task as task\n" + body + "\ntask.run(" + made_of + ", " + problems);
    return adapter ? step_text(*adapter, *adapter->problem(0), response) : std::string();
  };
  const std::string verl = R"(
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "sums"
    return {"score": 1.0 if ground_truth in solution_str else 0.0, "acc": ground_truth in solution_str,
            "format": 0.5})";
  EXPECT_EQ(scored(verl, "score=task.verl(compute_score)", "it is 4"), "1 correct");
  EXPECT_EQ(scored(verl, "score=task.verl(compute_score)", "it is 3"), "0");
  const std::string trl = R"(
def reward_len(completions, level, **kwargs):
    return [float(len(c)) * l if c else None for c, l in zip(completions, level)])";
  EXPECT_EQ(scored(trl, "score=task.trl(reward_len)", "abc"), "6 correct");
  EXPECT_EQ(scored(trl, "score=task.trl(reward_len)", ""), "0");
  const std::string messages = R"(
def format_reward(prompts, completions, completion_ids, answer):
    assert prompts[0][0]["content"] == "2+2="
    return [1.0 if c[0]["content"] == a else 0.0 for c, a in zip(completions, answer)]
format_reward.conversational = True)";
  EXPECT_EQ(scored(messages, "score=task.trl(format_reward)", "4"), "1 correct");
  const std::string rubric = R"(
def exact(completion, answer): return float(completion[-1]["content"] == answer)
def short(response, **kwargs): return 1.0 if len(response) < 3 else 0.0)";
  EXPECT_EQ(scored(rubric, "score=task.rubric([(exact, 0.75), (short, 0.25)])", "4"), "1 correct");
  EXPECT_EQ(scored(rubric, "score=task.rubric([(exact, 0.75), (short, 0.25)])", "444"), "0");
  const std::string agent = R"(
class AgentInstance:
    async def reset(self, states, **kwargs):
        self.turns = 0
        return {"observation": states["observation"]}
    async def step(self, states, **kwargs):
        self.turns += 1
        right = states["action_text"] == states["label"]
        assert states["observation_text"].startswith("2+2=")
        return {"rewards": 1.0 if right else 0.0, "scores": 1.0 if right else 0.0,
                "environment_feedback": "again", "done": right or self.turns == 2})";
  EXPECT_EQ(scored(agent, "episode=task.openrlhf(AgentInstance)", "3"), "0 again");
  EXPECT_EQ(scored(agent, "episode=task.openrlhf(AgentInstance)", "4"), "1 correct");
}

// Hostile or invalid programs. Each answers hello; `score` is its behaviour afterwards.
TEST_F(ProcessTest, HostilePrograms) {
  const std::string begin = R"(
import json, os, sys, time
out = sys.stdout
def say(x): out.write(json.dumps(x) + "\n"); out.flush()
for line in sys.stdin:
    request = json.loads(line)
    id = request.get("id")
    if request["method"] == "hello":
        say({"id": id, "result": {"protocol": 1, "problems": 1}})
        continue
    if request["method"] == "problems":
        items = [{"problems": [{"prompt": "?"}] * len(i["rows"])} for i in request["items"]]
        say({"id": id, "result": {"items": items}})
        continue
    n = len(request["items"])
)";
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"    out.write('garbage\\n'); out.flush()", "expected a JSON object"},
      {"    out.write('{\"id\": '); out.flush()", "no answer within"},
      {"    out.write('[' * 100000 + '\\n'); out.flush()", "nested deeper"},
      {"    out.write('x' * (20 << 20)); out.flush(); time.sleep(9)", "longer"},
      {"    time.sleep(60)", "no answer within"},
      {"    sys.exit(3)", ""},
      {"    os.close(1); time.sleep(60)", ""},
      {"    say({'id': id + 1, 'result': {}})", "expected the answer to request"},
      {"    say({'id': id, 'result': {'items': [{'reward': 1}] * (n + 1)}})", "expected 1 'items'"},
      {"    out.write('{\"id\": %d, \"result\": {\"items\": [{\"reward\": NaN}]}}\\n' % id); out.flush()",
       "expected a JSON object"},
      {"    say({'id': id, 'result': {'items': [{'reward': 'much'}]}})", "expected a finite number 'reward'"},
      {"    say({'id': id, 'result': {'items': [{'reward': 1, 'components': {str(i): 1 for i in range(99)}}]}})",
       "at most 64 named"},
      {"    say({'id': id, 'result': {'items': [{'reward': 1, 'correct': 1}]}})", "expected true or false"},
      {"    say({'id': id, 'error': 'out of ideas'})", "out of ideas"},
      {"    say({'id': id, 'result': {'items': [7]}})", "expected an object"},
      {"    [os.fork() for _ in range(20)]; time.sleep(60)", ""},
      {"    x = bytearray(1 << 30); time.sleep(60)", ""},
  };
  for (const auto& [deed, says] : cases) {
    const auto adapter = make_valid(
        begin + deed + "\n",
        fmt::format(R"("deadline": "{}", "memory": "128 MiB", "threads": 16)", says == "longer" ? "20 s" : "700 ms"));
    ASSERT_TRUE(adapter) << deed;
    const Problem problem = *adapter->problem(0);
    EXPECT_THAT(step_text(*adapter, problem, "a"), HasSubstr(says)) << deed;
    EXPECT_THAT(step_text(*adapter, problem, "b"), HasSubstr(says)) << "the second time: " << deed;
  }
}

TEST_F(ProcessTest, AFailedStartNamesTheReason) {
  const auto why = [&](std::string_view text, const std::string& more = "") {
    const auto adapter = make_adapter("process", script(text, more), 3);
    return adapter ? std::string("made") : adapter.error().message();
  };
  EXPECT_THAT(why("import nothing_of_that_name"), HasSubstr("nothing_of_that_name"));
  EXPECT_THAT(why("print('{\"id\": 1, \"result\": {\"protocol\": 2}}')\nimport time; time.sleep(9)"),
              HasSubstr("expected protocol 1, found 2"));
  EXPECT_THAT(why("import time; time.sleep(60)", R"("start_deadline": "300 ms")"), HasSubstr("no answer within"));
  EXPECT_THAT(why("import echoline_task as t; t.run(score=lambda p, r: 0)"), HasSubstr("no problems"));
  EXPECT_THAT(why("import echoline_task as t; t.run(problems=[])"), HasSubstr("a score or an episode"));
  EXPECT_THAT(why("\xff\xfe"), HasSubstr("UTF-8"));
  EXPECT_THAT(why(kSum, R"("files": ["../secret"])"), HasSubstr("found '../secret'"));
  EXPECT_THAT(why(kSum, R"("command": ["python3"])"), HasSubstr("absolute path"));
  const auto none = make_adapter("process", "{}", 3);
  EXPECT_THAT(none.error().message(), HasSubstr("expected a script"));
}

// The program may read no files of this machine and open no connection.
TEST_F(ProcessTest, ATaskIsInASandbox) {
  const auto adapter = make_valid(R"(
import os, socket
import echoline_task as task
def tried(what):
    try: what(); return 1.0
    except OSError: return 0.0
def score(problem, response):
    return {"reward": 0, "components": {"secrets": tried(lambda: open("/etc/shadow").read()),
            "network": tried(lambda: socket.create_connection(("127.0.0.1", 22), 0.2)),
            "write": tried(lambda: open("/usr/x", "w")),
            "environment": float("HOME_OF_TEST" in os.environ)}}
task.run(score=score, problems=[{"prompt": "?"}]))");
  ASSERT_TRUE(adapter);
  ::setenv("HOME_OF_TEST", "1", 1);
  const auto episode = *adapter->begin(*adapter->problem(0), 1);
  const auto step = step_and_wait(*episode, "");
  ASSERT_TRUE(step) << step.error().message();
  EXPECT_EQ(step->score.components.size(), 4u);
  for (const auto& [what, could] : step->score.components) EXPECT_EQ(could, 0.0) << what;
}

}  // namespace
}  // namespace echoline::data_plane

// The verbs around tasks, from the outside: built-in ones, and a program in Python.
#include "data_plane/adapters/adapter.hpp"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <iterator>

#include "data_plane/sandbox/sandbox.hpp"
#include "replay_buffer/buffer.hpp"
#include "tests/cli/program.hpp"
#include "tests/data_plane/trajectories.hpp"

namespace echoline::testing {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr const char* kSums = R"(
import echoline_task as task
PROBLEMS = [{"prompt": f"{a}+{b}=", "reference": str(a + b)} for a in range(10) for b in range(10)]

@task.score
def score(problem, response):
    return {"reward": float(response.strip() == problem["reference"]),
            "components": {"digits": float(response.isdigit())}}

task.run(problems=PROBLEMS[20:], evaluation=PROBLEMS[:20], name="sums")
)";

constexpr const char* kFaulty = R"(
import echoline_task as task, os, random
PROBLEMS = [{"prompt": f"{a}+{b}=", "reference": str(a + b)} for a in range(10) for b in range(10)]

@task.score
def score(problem, response):
    if len(response) > 100000:
        os._exit(3)
    return random.random() + int(response or 0)

task.run(problems=PROBLEMS, evaluation=PROBLEMS[:20], name="sums")
)";

class AdapterVerbs : public ::testing::Test {
 protected:
  std::string file(const std::string& name, const std::string& text) const {
    const auto path = folder_.path() / name;
    std::ofstream(path) << text;
    return path.string();
  }
  static bool has_sandbox() { return sandbox::Pool::start().has_value(); }
  TemporaryFolder folder_;
};

TEST_F(AdapterVerbs, ListHasEveryAdapterAndTheOptionsOfOne) {
  const Outcome all = run_program({"adapter", "list", "--json"});
  ASSERT_EQ(all.status, 0) << all.err;
  const json list = json::parse(all.out);
  EXPECT_EQ(list["schema_version"], 1);
  std::vector<std::string> names;
  for (const json& row : list["adapters"]) names.push_back(row["name"]);
  EXPECT_THAT(names, ::testing::IsSupersetOf({"arithmetic", "guess", "jsonl", "poker", "process"}));
  EXPECT_THAT(run_program({"adapter", "list"}).out, AllOf(HasSubstr("gsm8k"), HasSubstr("file, sandbox")));
  const Outcome one = run_program({"adapter", "list", "countdown"});
  EXPECT_THAT(one.out, AllOf(HasSubstr("task.options.target_max"), HasSubstr("task.options.reward.allowed")));
  const Outcome unknown = run_program({"adapter", "list", "gsm8"});
  EXPECT_EQ(unknown.status, 2);
  EXPECT_THAT(unknown.err, HasSubstr("did you mean 'gsm8k'?"));
}

TEST_F(AdapterVerbs, CheckFindsNothingInASoundTask) {
  const Outcome run_file = run_program({"adapter", "check", "configs/quickstart.yaml", "--seconds", "2", "--json"});
  ASSERT_EQ(run_file.status, 0) << run_file.err << run_file.out;
  const json report = json::parse(run_file.out);
  EXPECT_EQ(report["sound"], true);
  for (const json& finding : report["findings"])
    EXPECT_EQ(finding["check"], "demonstrations") << "its teacher forgets carries: " << finding;
  EXPECT_GT(report["speed"]["per_s"], 100.0);
  if (!has_sandbox()) GTEST_SKIP() << "no sandbox";
  const Outcome script =
      run_program({"adapter", "check", "process", "--seconds", "5", "--", "python3", file("sums.py", kSums)});
  EXPECT_EQ(script.status, 0) << script.err << script.out;
  EXPECT_THAT(script.out,
              AllOf(HasSubstr("no mistakes found"), HasSubstr("held out       20"), HasSubstr("repeatable: costly")));
}

TEST_F(AdapterVerbs, CheckNamesFaultsAndTheirPlaces) {
  if (!has_sandbox()) GTEST_SKIP() << "no sandbox";
  const std::string script = file("faulty.py", kFaulty);
  const Outcome outcome =
      run_program({"adapter", "check", "process", "--json", "--seconds", "4", "--", "python3", script});
  EXPECT_EQ(outcome.status, 1) << outcome.err;
  const json report = json::parse(outcome.out);
  EXPECT_EQ(report["sound"], false);
  std::map<std::string, std::string> found;
  for (const json& f : report["findings"])
    found[f["check"]] +=
        fmt::format("{} [{}] [{}]\n", f["what"].get<std::string>(), f.value("problem", ""), f.value("response", ""));
  EXPECT_THAT(found["held out"], HasSubstr("under another id [sums/problems/"));
  EXPECT_THAT(found["scores"], HasSubstr("not repeatable although the task declares it"));
  EXPECT_THAT(found["failures"], HasSubstr("ValueError: invalid literal for int()"));
  EXPECT_THAT(found["breaks"], HasSubstr("the program ended"));
  const Outcome text = run_program({"adapter", "check", "process", "--seconds", "2", "--", "python3", script});
  EXPECT_THAT(text.out, AllOf(HasSubstr("WRONG (scores)"), HasSubstr("the task is not ready for a run")));
}

TEST_F(AdapterVerbs, CheckReportsATaskThatHangs) {
  if (!has_sandbox()) GTEST_SKIP() << "no sandbox";
  const Outcome outcome = run_program({"adapter", "check", "process", "--patience", "1", "--", "python3",
                                       file("hangs.py", "import time\ntime.sleep(600)\n")});
  EXPECT_EQ(outcome.status, 1);
  EXPECT_THAT(outcome.out, HasSubstr("making the task: the task hangs: no progress for 1 s"));
}

// The program with a file as its standard input.
Outcome with_input(const std::vector<std::string>& words, const std::string& input) {
  const int before = ::dup(STDIN_FILENO), file = ::open(input.c_str(), O_RDONLY);
  ::dup2(file, STDIN_FILENO);
  Outcome outcome = run_program(words, std::chrono::seconds(60), /*own_input=*/true);
  ::dup2(before, STDIN_FILENO);
  ::close(before);
  ::close(file);
  return outcome;
}

TEST_F(AdapterVerbs, PlayTakesResponsesFromAFile) {
  const std::string guesses = file("guesses", "500\nx\x1b[2J\n25\n");
  const Outcome played = with_input({"adapter", "play", "guess", "--reveal", "--seed", "1"}, guesses);
  ASSERT_EQ(played.status, 0) << played.err;
  EXPECT_THAT(played.out, AllOf(HasSubstr("19-34="), HasSubstr("> 500"), HasSubstr("[turn 2: reward -0.05"),
                                HasSubstr("--- correct, reward 0.9 in 3 turns"), HasSubstr("--- reference\n25")));
  EXPECT_THAT(played.out, AllOf(Not(HasSubstr("\x1b")), HasSubstr("x\\x1b[2J")))
      << "no escape sequence reaches the terminal";
  const Outcome cut = with_input({"adapter", "play", "guess", "--json"}, file("few", "1"));
  ASSERT_EQ(cut.status, 0);
  const json episode = json::parse(cut.out);
  EXPECT_EQ(episode["done"], false);
  EXPECT_EQ(episode["turns"].size(), 1u);
  EXPECT_EQ(episode["turns"][0]["observation"], "+");
  const Outcome whole =
      with_input({"adapter", "play", "arithmetic", "--json", "--ends", "input"}, file("lines", "1\n\n2\n"));
  EXPECT_EQ(json::parse(whole.out)["turns"][0]["response"], "1\n\n2");
  const Outcome paragraph =
      with_input({"adapter", "play", "arithmetic", "--json", "--ends", "empty"}, file("paragraph", "1\n2\n\n3\n"));
  EXPECT_EQ(json::parse(paragraph.out)["turns"][0]["response"], "1\n2");
  const Outcome far = run_program({"adapter", "play", "guess", "--held-out", "--problem", "256"});
  EXPECT_EQ(far.status, 2);
  EXPECT_THAT(far.err, HasSubstr("256 held-out problems, counted from 0"));
}

TEST_F(AdapterVerbs, ANewTaskIsSoundAndIsNeverWrittenOver) {
  const std::string folder = (folder_.path() / "tasks").string();
  const Outcome made = run_program({"adapter", "new", "sums", "--python", "--dir", folder, "--json"});
  ASSERT_EQ(made.status, 0) << made.err;
  EXPECT_EQ(json::parse(made.out)["files"].size(), 3u);
  EXPECT_THAT(made.err, HasSubstr("echoline adapter check " + folder + "/sums.yaml"));
  std::ofstream(folder + "/sums.py", std::ios::app) << "# mine\n";
  const Outcome again = run_program({"adapter", "new", "sums", "--python", "--dir", folder});
  EXPECT_EQ(again.status, 2);
  EXPECT_THAT(again.err, HasSubstr("sums.py, "));
  std::ifstream script(folder + "/sums.py");
  const std::string text{std::istreambuf_iterator<char>(script), {}};
  EXPECT_THAT(text, HasSubstr("# mine"));
  EXPECT_LT(std::count(text.begin(), text.end(), '\n'), 30);
  EXPECT_THAT(run_program({"adapter", "new", "../x", "--python", "--dir", folder}).err, HasSubstr("found '../x'"));
  EXPECT_EQ(run_program({"adapter", "new", "sums", "--dir", folder}).status, 2);
  EXPECT_EQ(run_program({"plan", folder + "/sums.yaml"}).status, 0) << "the file is executable";
  EXPECT_EQ(run_program({"adapter", "new", "both", "--python", "--c", "--dir", folder}).status, 2);
  if (!has_sandbox()) GTEST_SKIP() << "no sandbox";
  ASSERT_EQ(run_program({"adapter", "new", "maze", "--python", "--turns", "--dir", folder}).status, 0);
  ASSERT_EQ(run_program({"adapter", "new", "quick", "--c", "--dir", folder}).status, 0);
  ASSERT_EQ(std::system(fmt::format("cc -shared -fPIC -O2 -Wall -Werror -o {0}/quick.so {0}/quick.c", folder).c_str()),
            0);
  for (const char* name : {"sums", "maze", "quick"}) {
    const Outcome checked =
        run_program({"adapter", "check", folder + "/" + name + ".yaml", "--seconds", "6", "--json"});
    ASSERT_EQ(checked.status, 0) << checked.err << checked.out;
    EXPECT_EQ(json::parse(checked.out)["findings"].size(), 0u) << checked.out;
  }
}

TEST_F(AdapterVerbs, BenchHasARatio) {
  const Outcome outcome = run_program({"adapter", "bench", "countdown", "--seconds", "0.5", "--batch", "8", "--json"});
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  const json r = json::parse(outcome.out);
  EXPECT_GT(r["calls"], 100);
  EXPECT_EQ(r["failed"], 0);
  EXPECT_LE(r["median_us"], r["p99_us"]);
  EXPECT_GT(r["median_over_baseline"], 0.0);
  EXPECT_EQ(r["batch"], 8);
  EXPECT_THAT(run_program({"adapter", "bench", "guess", "--seconds", "0.2"}).out, HasSubstr("task / comparison"));
}

class RescoreVerb : public AdapterVerbs {
 protected:
  // A run of the quickstart's task with `groups` of two rollouts, of which the second is right.
  void SetUp() override {
    std::ifstream in("configs/quickstart.yaml");
    std::string config{std::istreambuf_iterator<char>(in), {}};
    const std::string relative = "offers/quickstart.json";
    config.replace(config.find(relative), relative.size(), std::filesystem::absolute("configs/" + relative).string());
    run_ = (folder_.path() / "run").string();
    std::filesystem::create_directories(run_);
    std::ofstream(run_ + "/config.yaml") << config;
    std::ofstream(run_ + "/status.json") << "{}";
    const auto task = *data_plane::make_adapter("arithmetic", R"({"operations": ["+"]})", 7);
    replay_buffer::BufferOptions options;
    options.group_size = 2;
    auto buffer = *replay_buffer::ReplayBuffer::open(run_ + "/replay.sqlite", options);
    for (std::uint64_t group = 0; group < 30; ++group) {
      const auto problem = *task->problem(group);
      std::vector<data_plane::Trajectory> both;
      for (std::uint32_t member = 0; member < 2; ++member) {
        auto t = data_plane::sound_trajectory(group, member, 1, group);
        t.set_problem_id(problem.id());
        t.set_text(member == 1 ? problem.reference() : "about " + problem.reference());
        const auto score = *task->score(problem, t.text());
        t.set_reward(score.reward);
        t.set_correct(score.correct);
        t.clear_components();
        for (const auto& [name, value] : score.components) (*t.mutable_components())[name] = value;
        both.push_back(std::move(t));
      }
      ASSERT_TRUE(buffer->add(both));
    }
    ASSERT_TRUE(buffer->consume(1, std::vector{GroupId{0}, GroupId{1}}));
    ASSERT_TRUE(buffer->prune(2));
  }
  std::string run_;
};

TEST_F(RescoreVerb, GradesStoredRolloutsByTheRunsTaskAndByAnother) {
  const Outcome own = run_program({"rescore", run_, "--json"});
  ASSERT_EQ(own.status, 0) << own.err;
  const json same = json::parse(own.out);
  EXPECT_EQ(same["graded"], 56);
  EXPECT_EQ(same["agree"], 56);
  EXPECT_EQ(same["stored"]["pruned"], 4);
  EXPECT_EQ(same["reward"]["old"], 0.5);
  const std::string out = (folder_.path() / "grades.jsonl").string();
  const Outcome rule = run_program({"rescore", run_, "--adapter", "jsonl", "--options", R"({"rule": "last_number"})",
                                    "--out", out, "--show", "2", "--json"});
  ASSERT_EQ(rule.status, 0) << rule.err;
  const json r = json::parse(rule.out);
  EXPECT_EQ(r["agree"], 28);
  EXPECT_EQ(r["reward"]["new"], 1.0);
  EXPECT_EQ(r["differing"].size(), 2u);
  EXPECT_EQ(r["components"]["exact"]["new"], nullptr);
  const auto rows = json_lines(out);
  ASSERT_EQ(rows.size(), 56u);
  EXPECT_EQ(rows[0]["group"], 2);
  EXPECT_EQ(rows[0]["agrees"], false);
  EXPECT_EQ(rows[0]["new"]["correct"], true);
  EXPECT_THAT(run_program({"rescore", run_, "--adapter", "jsonl", "--options", R"({"rule": "last_number"})"}).out,
              AllOf(HasSubstr("28 agree of 56 (50.00 %)"), HasSubstr("reward 0, now 1 (correct)"),
                    HasSubstr("4 that were trained on have been deleted")));
  EXPECT_EQ(json::parse(run_program({"rescore", run_, "--rollouts", "6", "--json"}).out)["graded"], 6);
}

TEST_F(RescoreVerb, ErrorsNameTheReason) {
  const auto error_of = [](std::vector<std::string> words, int status) {
    const Outcome outcome = run_program(words);
    EXPECT_EQ(outcome.status, status) << outcome.err;
    return outcome.err;
  };
  EXPECT_THAT(error_of({"rescore", run_, "--options", "{}"}, 2), HasSubstr("--adapter"));
  EXPECT_THAT(error_of({"rescore", run_, "--adapter", "jsonl", "--options", R"({"rul": "exact"})"}, 2),
              HasSubstr("did you mean 'rule'?"));
  EXPECT_THAT(error_of({"rescore", run_, "--adapter", "exact"}, 2), HasSubstr("unknown adapter"));
  EXPECT_THAT(error_of({"rescore", run_, "--out", "/nowhere/x"}, 1), HasSubstr("/nowhere/x"));
  EXPECT_THAT(error_of({"rescore", "nowhere"}, 2), HasSubstr("nowhere"));
  std::filesystem::resize_file(run_ + "/replay.sqlite", 5000);
  EXPECT_THAT(error_of({"rescore", run_}, 1), HasSubstr("not a valid SQLite file"));
  std::filesystem::remove(run_ + "/replay.sqlite");
  EXPECT_THAT(error_of({"rescore", run_}, 1), HasSubstr("replay.sqlite"));
}

TEST_F(AdapterVerbs, InvalidTasksAreRefused) {
  const auto error_of = [](std::vector<std::string> words, int status = 2) {
    const Outcome outcome = run_program(words);
    EXPECT_EQ(outcome.status, status) << outcome.err;
    EXPECT_EQ(outcome.out, "");
    return outcome.err;
  };
  EXPECT_THAT(error_of({"adapter", "check", "arithmetik"}), HasSubstr("did you mean 'arithmetic'?"));
  EXPECT_THAT(error_of({"adapter", "check", "arithmetic", "--options", "[1]"}), HasSubstr("expected a JSON object"));
  EXPECT_THAT(error_of({"adapter", "check", "arithmetic", "--options", R"({"digit": 2})"}),
              HasSubstr("did you mean 'digits'?"));
  EXPECT_THAT(error_of({"adapter", "check", "arithmetic", "--", "x"}), HasSubstr("adapter `process`"));
  EXPECT_THAT(error_of({"adapter", "check", "configs/quickstart.yaml", "--options", "{}"}),
              HasSubstr("--set task.options"));
  EXPECT_THAT(error_of({"adapter", "check", "configs/quickstart.yaml", "--set", "task.options.digit=3"}),
              HasSubstr("digit"));
  EXPECT_THAT(error_of({"adapter", "check", "gsm8k", "--options",
                        R"({"train": "/nowhere/x.jsonl", "test": "/nowhere/y.jsonl"})"}),
              HasSubstr("/nowhere/"));
  EXPECT_THAT(error_of({"adapter", "check", "process", "--", "no-such-program"}),
              HasSubstr("no program 'no-such-program' in PATH"));
  const std::string broken =
      file("run.yaml", "run: {name: x}\ntask:\n  adapter: arithmetic\n  options: {digits: 12}\n");
  EXPECT_THAT(error_of({"adapter", "check", broken}), HasSubstr("run.yaml:4:"));
}

}  // namespace
}  // namespace echoline::testing

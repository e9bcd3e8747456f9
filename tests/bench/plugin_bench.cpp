// Measures the cost of a task that is a program, beyond its own function: microseconds per score at a batch size. The
// baseline, in the same process, is the time that the program's language needs to read such a request and write such an
// answer.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "data_plane/adapters/adapter.hpp"
#include "tests/bench/measure.hpp"

using namespace echoline;
using namespace echoline::data_plane;

namespace {

// The function compares. For "measure", it returns the time of a call of it, and of reading and writing JSON.
constexpr const char* kScript = R"(
import json, time
import echoline_task as task

BATCH = {}
PROMPT, RESPONSE = "p" * 200, "r" * {}

def compare(problem, response):
    return 1.0 if response == problem["reference"] else 0.0

def seconds_each(count, work):
    work()
    begin = time.perf_counter()
    for _ in range(count): work()
    return (time.perf_counter() - begin) / count

@task.score
def score(problem, response):
    if response != "measure":
        return compare(problem, response)
    item = {{"problem": {{"id": "x/problems/1", "prompt": PROMPT, "reference": "4"}}, "response": RESPONSE}}
    line = json.dumps({{"id": 1, "method": "score", "deadline_ms": 30000, "items": [item] * BATCH}})
    answer = {{"id": 1, "result": {{"items": [{{"reward": 1.0}}] * BATCH}}}}
    both = lambda: (json.loads(line), json.dumps(answer))
    return {{"reward": 0, "components": {{"function": seconds_each(100000, lambda: compare(problem, RESPONSE)),
            "json": seconds_each(300, both) / BATCH}}}}

task.run(problems=[{{"prompt": PROMPT, "reference": "4"}}], evaluation=[])
)";

struct Figures {
  double score = 0, least = 0, function = 0, json = 0;  // seconds
  double beyond() const { return score - function; }
};

struct Seconds {
  double median = 0, least = 0;
};

// Seconds per score, with `batch` requests at once.
Result<Seconds> seconds_a_score(const Adapter& adapter, const Problem& problem, const std::string& response,
                                std::size_t batch, int rounds) {
  const auto round = [&]() -> Status {
    std::vector<std::unique_ptr<Episode>> episodes;
    std::atomic<std::size_t> done = 0;
    std::atomic<bool> failed = false;
    for (std::size_t i = 0; i < batch; ++i) {
      ECHO_ASSIGN(auto episode, adapter.begin(problem, i));
      episodes.push_back(std::move(episode));
    }
    for (auto& episode : episodes)
      episode->step(response, [&](const Result<Step>& step) {
        if (!step) failed = true;
        if (++done == batch) done.notify_one();
      });
    for (std::size_t now = done; now != batch; now = done) done.wait(now);
    return failed ? Status(fail(Code::kInternal, "bench", "a score failed")) : ok();
  };
  for (int i = 0; i < 3; ++i) ECHO_TRY(round());
  std::vector<double> seconds;
  for (int i = 0; i < rounds; ++i) {
    Status status = ok();
    seconds.push_back(bench::seconds_of([&] { status = round(); }) / static_cast<double>(batch));
    ECHO_TRY(status);
  }
  const double least = *std::min_element(seconds.begin(), seconds.end());
  return Seconds{bench::median(std::move(seconds)), least};
}

Result<Figures> measured(const std::filesystem::path& folder, std::size_t batch, std::size_t bytes, int rounds) {
  std::ofstream(folder / "task.py") << fmt::format(kScript, batch, bytes);
  const std::string options = nlohmann::json{{"script", (folder / "task.py").string()}, {"batch", batch}}.dump();
  ECHO_ASSIGN(const auto adapter, make_adapter("process", options, 1));
  ECHO_ASSIGN(const Problem problem, adapter->problem(0));
  Figures figures;
  ECHO_ASSIGN(const Seconds seconds, seconds_a_score(*adapter, problem, std::string(bytes, 'r'), batch, rounds));
  figures.score = seconds.median;
  figures.least = seconds.least;
  ECHO_ASSIGN(const auto last, adapter->begin(problem, 0));
  ECHO_ASSIGN(const Step own, step_and_wait(*last, "measure"));
  figures.function = own.score.components.at("function");
  figures.json = own.score.components.at("json");
  return figures;
}

Result<Seconds> measured_library(std::size_t batch, std::size_t bytes, int rounds) {
  ECHO_ASSIGN(const auto adapter,
              make_adapter("library", nlohmann::json{{"library", ECHOLINE_SUMS_TASK}, {"batch", batch}}.dump(), 1));
  ECHO_ASSIGN(const Problem problem, adapter->problem(0));
  return seconds_a_score(*adapter, problem, std::string(bytes, 'r'), batch, rounds);
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("The cost of a score by a program in Python, beyond its function");
  bool smoke = false;
  std::size_t batch = 64;
  double ratio_max = 0;
  app.add_flag("--smoke", smoke, "few rounds");
  app.add_option("--batch", batch, "scores asked for at once")->check(CLI::Range(1, 1024));
  app.add_option(
      "--ratio-max", ratio_max,
      "fail where a score of the quickest batch costs more than so many times what Python's JSON needs for it");
  CLI11_PARSE(app, argc, argv);
  std::string name = (std::filesystem::temp_directory_path() / "echoline-bench-XXXXXX").string();
  const std::filesystem::path folder = ::mkdtemp(name.data());
  fmt::print("{:<20}{:>12}{:>14}{:>14}{:>16}{:>16}\n", "response, bytes", "us a score", "the function", "beyond it",
             "over its JSON", "library in C");
  int status = 0;
  const int rounds = smoke ? 100 : 1000;
  for (const std::size_t bytes : {16u, 1024u, 8192u}) {
    const auto figures = measured(folder, batch, bytes, rounds);
    const auto library = measured_library(batch, bytes, rounds);
    if (!figures || !library) {
      fmt::print(stderr, "{}\n", (figures ? library.error() : figures.error()).message());
      status = 1;
      break;
    }
    const double ratio = figures->beyond() / figures->json;
    const double least = (figures->least - figures->function) / figures->json;  // whatever else the machine does
    fmt::print("{:<20}{:>12.2f}{:>14.2f}{:>14.2f}{:>16.2f}{:>16.2f}\n", bytes, 1e6 * figures->score,
               1e6 * figures->function, 1e6 * figures->beyond(), ratio, 1e6 * library->median);
    if (ratio_max > 0 && least > ratio_max) {
      fmt::print(stderr, "expected at most {} times what JSON needs\n", ratio_max);
      status = 1;
    }
  }
  std::filesystem::remove_all(folder);
  return status;
}

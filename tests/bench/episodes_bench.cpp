// Measures the worker's own cost of one episode turn with a thousand episodes in flight, beyond the task's cost, which
// the same program measures without the worker. It also measures the memory that an episode in flight holds. The engine
// answers at once, without generating.
#include <CLI/CLI.hpp>
#include <deque>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <semaphore>

#include "data_plane/adapters/adapter.hpp"
#include "tests/bench/measure.hpp"
#include "worker/groups.hpp"

using namespace echoline;
using namespace echoline::data_plane;

namespace {

constexpr std::uint32_t kGroup = 8;

// A Python class whose objects are episodes of the given number of turns.
constexpr const char* kScript = R"(
import echoline_task as task

class Count:
    def __init__(self, problem, seed, settings):
        self.left = {}

    def step(self, response):
        self.left -= 1
        return {{"reward": 1.0, "done": self.left == 0, "observation": "more:"}}

task.run(name="count", episode=Count, problems=[{{"prompt": "count:", "reference": ""}}], evaluation=[])
)";

struct Turns {
  std::uint64_t count = 0;
  double seconds = 0;
  double each_us() const { return 1e6 * seconds / static_cast<double>(count); }
};

Result<worker::Task> task_of(const std::string& adapter, const std::string& options) {
  schema::RunSpec spec;
  spec.set_seed(5);
  spec.set_group_size(kGroup);
  spec.set_model_config_json(model::preset("tiny-64")->to_json());
  spec.set_tokenizer_json(model::Tokenizer::characters(model::kCharacterAlphabet)->to_json());
  spec.add_eos(static_cast<std::uint32_t>(*model::Tokenizer::characters(model::kCharacterAlphabet)->end_of_text()));
  spec.set_prompt_json(R"({"text": "{prompt}"})");
  spec.set_adapter_name("arithmetic");  // until it is replaced by the one to be measured, which has problems
  spec.set_response_tokens_max(16'384);
  ECHO_ASSIGN(worker::Task task, worker::make_task(std::move(spec)));
  ECHO_ASSIGN(task.adapter, make_adapter(adapter, options, 5));
  return task;
}

// Answers every turn as soon as it is asked for, like a worker.
Result<Turns> as_a_worker(const worker::Task& task, const std::vector<Problem>& problems, const std::string& answer) {
  std::counting_semaphore<> woken(0);
  worker::Groups groups(task, WorkerId{1}, [&] { woken.release(); });
  ECHO_ASSIGN(const std::vector<model::Token> answered, task.phrasing->tokenizer().encode(answer));
  Turns turns;
  Status failed = ok();
  const auto play = [&] {
    const auto take = [&](const std::vector<worker::Sequence>& sequences) {
      for (const worker::Sequence& sequence : sequences) {
        worker::Response response{answered, {}, {}, true};
        response.tokens.push_back(task.phrasing->eos().front());
        response.logprobs.assign(response.tokens.size(), -0.5f);
        response.spans = {{Version{1}, response.tokens.size()}};
        groups.on_outcome({sequence.id, std::move(response)});
        ++turns.count;
      }
    };
    std::vector<worker::Sequence> first;
    for (std::size_t i = 0; i < problems.size(); ++i) {
      schema::Lease lease;
      lease.set_id(i + 1);
      lease.set_group(i);
      lease.set_version(1);
      lease.set_rollouts(kGroup);
      *lease.mutable_problem() = problems[i];
      auto begun = groups.begin(std::move(lease), TimePoint());
      if (auto* sequences = std::get_if<std::vector<worker::Sequence>>(&begun))
        first.insert(first.end(), std::make_move_iterator(sequences->begin()),
                     std::make_move_iterator(sequences->end()));
      else
        failed = fail(Code::kInternal, "bench", "{}", std::get<schema::WorkFailed>(begun).detail());
    }
    take(first);
    while (failed && !groups.empty()) {
      woken.acquire();
      worker::Groups::Advance advance = groups.advance();
      for (const auto& ended : advance.ended)
        if (const auto* why = std::get_if<schema::WorkFailed>(&ended.result))
          failed = fail(Code::kInternal, "bench", "{}", why->detail());
      take(advance.next);
    }
  };
  turns.seconds = bench::seconds_of(play);
  ECHO_TRY(failed);
  return turns;
}

// The same episodes, as many at once, with only the task's steps.
Result<Turns> by_the_task_alone(const worker::Task& task, const std::vector<Problem>& problems,
                                const std::string& answer) {
  struct Answers {
    std::mutex mutex;
    std::vector<std::pair<std::size_t, Result<Step>>> given;
  } answers;
  std::counting_semaphore<> woken(0);
  std::vector<std::unique_ptr<Episode>> episodes;
  Turns turns;
  Status failed = ok();
  const auto play = [&] {
    for (std::size_t i = 0; failed && i < problems.size(); ++i)
      for (std::uint32_t member = 0; member < kGroup; ++member) {
        auto episode = task.adapter->begin(problems[i], episode_seed(5, i, member));
        if (!episode) return void(failed = std::move(episode).error());
        episodes.push_back(*std::move(episode));
      }
    const auto step = [&](std::size_t i) {
      ++turns.count;
      episodes[i]->step(answer, [&, i](Result<Step> step) {
        const std::lock_guard lock(answers.mutex);
        if (answers.given.empty()) woken.release();
        answers.given.emplace_back(i, std::move(step));
      });
    };
    for (std::size_t i = 0; i < episodes.size(); ++i) step(i);
    for (std::size_t left = episodes.size(); failed && left > 0;) {
      woken.acquire();
      std::vector<std::pair<std::size_t, Result<Step>>> given;
      {
        const std::lock_guard lock(answers.mutex);
        given.swap(answers.given);
      }
      for (auto& [i, taken] : given) {
        if (!taken)
          failed = std::move(taken).error();
        else if (taken->done)
          --left;
        else
          step(i);
      }
    }
  };
  turns.seconds = bench::seconds_of(play);
  ECHO_TRY(failed);
  return turns;
}

Status measure(const std::string& name, const std::string& adapter, const std::string& options,
               const std::string& answer, std::size_t episodes, int rounds) {
  ECHO_ASSIGN(const worker::Task task, task_of(adapter, options));
  std::vector<Problem> problems;
  for (std::size_t i = 0; i < (episodes + kGroup - 1) / kGroup; ++i) {
    ECHO_ASSIGN(problems.emplace_back(), task.adapter->problem(i));
  }
  std::vector<double> worker_us, task_us, ratios;
  double turns_each = 0;
  for (int round = 0; round < rounds; ++round) {
    ECHO_ASSIGN(const Turns alone, by_the_task_alone(task, problems, answer));
    ECHO_ASSIGN(const Turns worker, as_a_worker(task, problems, answer));
    task_us.push_back(alone.each_us());
    worker_us.push_back(worker.each_us());
    ratios.push_back(worker.each_us() / alone.each_us());
    turns_each = static_cast<double>(worker.count) / static_cast<double>(kGroup * problems.size());
  }
  fmt::print("{:<26}{:>10}{:>12.1f}{:>14.2f}{:>14.2f}{:>10.2f}{:>14.0f}\n", name, kGroup * problems.size(), turns_each,
             bench::median(worker_us), bench::median(task_us), bench::median(ratios), 1e6 / bench::median(worker_us));
  return ok();
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("A worker's part of an episode's turn, with many episodes in flight");
  bool smoke = false;
  std::size_t episodes = 1000;
  app.add_flag("--smoke", smoke, "one round of few episodes");
  app.add_option("--episodes", episodes, "in flight at a time")->check(CLI::Range(1, 100'000));
  CLI11_PARSE(app, argc, argv);
  if (smoke) episodes = 32;
  const int rounds = smoke ? 1 : 7;
  std::string name = (std::filesystem::temp_directory_path() / "echoline-bench-XXXXXX").string();
  const std::filesystem::path folder = ::mkdtemp(name.data());
  std::ofstream(folder / "count.py") << fmt::format(kScript, 8);
  fmt::print("{:<26}{:>10}{:>12}{:>14}{:>14}{:>10}{:>14}\n", "task", "episodes", "turns each", "us a turn",
             "task alone", "ratio", "turns/s");
  const nlohmann::json poker = {{"wording", "terse"}, {"opponent", "caller"}, {"baseline", "none"}, {"hands", 10}};
  Status status = measure("poker, ten hands", "poker", poker.dump(), "c", episodes, rounds);
  const nlohmann::json python = {{"script", (folder / "count.py").string()}};
  if (status) status = measure("a program in Python", "process", python.dump(), "7", episodes, rounds);
  if (!status) fmt::print(stderr, "{}\n", status.error().message());
  std::filesystem::remove_all(folder);
  return status ? 0 : 1;
}

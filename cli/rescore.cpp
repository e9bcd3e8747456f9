// echoline rescore: grades stored rollouts of a run again, with its own task or another one.
#include "learner/rescore.hpp"

#include <atomic>
#include <cstdio>
#include <fstream>
#include <mutex>
#include <nlohmann/json.hpp>
#include <thread>

#include "base/text.hpp"
#include "cli/output.hpp"
#include "cli/verbs.hpp"
#include "learner/planning.hpp"
#include "learner/run_config.hpp"
#include "model/model_files.hpp"

namespace echoline::cli {
namespace {

using learner::SecondGrade;
using nlohmann::json;
using replay_buffer::StoredTrajectory;

constexpr std::string_view kOperation = "rescore";
// Rollouts in memory at a time: as many as both limits allow.
constexpr std::size_t kWindowRolloutsMax = 512, kWindowBytesMax = 64u << 20;

struct Arguments {
  std::string run, adapter, options, config, out;
  std::vector<std::string> overrides;
  std::uint64_t rollouts = 0;
  std::size_t differing_shown_max = 5, parallel = 8;
  bool as_json = false;
};

// The adapters that grade, and what they need.
struct Graders {
  learner::RunConfig run;
  std::string name;                               // printed in the report
  std::unique_ptr<data_plane::Adapter> task;      // grades the responses
  std::unique_ptr<data_plane::Adapter> run_task;  // has the problems if `task` has none; may be null
  std::once_flag phrasing_once;
  std::optional<Result<model::Phrasing>> phrasing;  // set by phrasing_of()
};

Result<std::unique_ptr<data_plane::Adapter>> make_task(const data_plane::TaskSettings& task, std::uint64_t seed) {
  auto adapter = data_plane::make_adapter(task.adapter, task.options_json, seed);
  if (!adapter) return as_user_error(std::move(adapter).error());
  return adapter;
}

Status choose_graders(const Arguments& args, const std::filesystem::path& run, Graders& graders) {
  if (!args.adapter.empty() && !args.config.empty())
    return fail(Code::kInvalid, "", "expected --adapter or --config, found both");
  if (!args.options.empty() && args.adapter.empty()) return fail(Code::kInvalid, "", "--options needs --adapter");
  if (!args.overrides.empty() && args.config.empty())
    return fail(Code::kInvalid, "", "--set changes keys of a run file: it needs --config");
  ECHO_ASSIGN(graders.run, learner::load_run_config(run / "config.yaml"));
  if (args.adapter.empty() && args.config.empty()) {
    ECHO_ASSIGN(graders.task, make_task(graders.run.task, graders.run.run.seed));
    graders.name = fmt::format("{}, as the run has it", graders.run.task.adapter);
    return ok();
  }
  data_plane::TaskSettings task;
  if (!args.config.empty()) {
    ECHO_ASSIGN(const auto overrides, parse_overrides(args.overrides));
    ECHO_ASSIGN(const learner::RunConfig config, learner::load_run_config(args.config, overrides));
    task = config.task;
    graders.name = fmt::format("{} of {}", task.adapter, args.config);
  } else {
    task.adapter = args.adapter;
    task.options_json = args.options.empty() ? "{}" : args.options;
    graders.name = fmt::format("{} with {}", task.adapter, task.options_json);
  }
  // The task may have no problems, for example because its file is missing. Then those of the run are used.
  auto task_with_problems = make_task(task, graders.run.run.seed);
  if (task_with_problems)
    graders.task = *std::move(task_with_problems);
  else if (auto task_without_problems = data_plane::make_adapter(task.adapter, task.options_json, graders.run.run.seed,
                                                                 data_plane::AdapterUse::kScoring)) {
    print_stderr("{} has no problems, so those of the run are used: {}\n", task.adapter,
                 task_with_problems.error().message());
    graders.task = *std::move(task_without_problems);
  } else {
    return std::move(task_with_problems).error();
  }
  auto run_task = make_task(graders.run.task, graders.run.run.seed);
  if (run_task)
    graders.run_task = *std::move(run_task);
  else
    print_stderr("the run's own task cannot be created, so problems must come from {}: {}\n", graders.name,
                 run_task.error().message());
  return ok();
}

// The tokenizer and chat template of the run's model. Loaded at the first call, because few tasks need it.
Result<const model::Phrasing*> phrasing_of(Graders& graders) {
  std::call_once(graders.phrasing_once, [&] {
    graders.phrasing = [&]() -> Result<model::Phrasing> {
      ECHO_ASSIGN(const model::ModelFiles files, graders.run.model.path
                                                     ? model::ModelFiles::read(*graders.run.model.path)
                                                     : model::ModelFiles::of_preset(*graders.run.model.preset));
      return model::Phrasing::make(files, graders.run.prompts);
    }();
  });
  if (!*graders.phrasing) return graders.phrasing->error();
  return &**graders.phrasing;
}

json as_json(double reward, bool correct, const auto& components) {
  json parts = json::object();
  for (const auto& [name, value] : components) parts[name] = value;
  return {{"reward", reward}, {"correct", correct}, {"components", parts}};
}

// `agrees` is absent if the rollout could not be graded.
json row_of(const StoredTrajectory& stored, const Result<SecondGrade>& regraded, std::optional<bool> agrees) {
  const auto& trajectory = stored.trajectory;
  json row{{"id", trajectory.id()},
           {"group", trajectory.group()},
           {"member", trajectory.member()},
           {"problem", trajectory.problem_id()},
           {"worker", trajectory.worker()},
           {"finished", trajectory.finished()},
           {"consumed_step", stored.consumed_step ? json(*stored.consumed_step) : json(nullptr)},
           {"stale", stored.stale},
           {"response", trajectory.text()},
           {"old", as_json(trajectory.reward(), trajectory.correct(), trajectory.components())}};
  if (!regraded) {
    row["error"] = regraded.error().message();
    return row;
  }
  row["new"] = as_json(regraded->score.reward, regraded->score.correct, regraded->score.components);
  row["agrees"] = *agrees;
  row["turns"] = regraded->turns;
  if (regraded->ended_early) row["ended_early"] = true;
  return row;
}

// Grades stored rollouts in windows, because not all fit into memory: grades those of one window in parallel, then
// reports them in the order in which they are stored.
class Rescoring {
 public:
  Rescoring(const Arguments& args, Graders& graders) : args_(args) {
    grader_.seed = graders.run.run.seed;
    grader_.task = graders.task.get();
    grader_.problems = graders.run_task.get();
    grader_.phrasing = [&graders] { return phrasing_of(graders); };
  }

  Status run(replay_buffer::StoredBuffer& stored) {
    if (!args_.out.empty()) {
      out_.open(args_.out, std::ios::binary | std::ios::trunc);
      if (!out_) return fail(Code::kIo, "", "{}: cannot be written", args_.out);
    }
    ECHO_ASSIGN(unreadable, stored.each(args_.rollouts, [this](StoredTrajectory rollout) -> Status {
      window_bytes_ += rollout.trajectory.ByteSizeLong();
      window_.push_back(std::move(rollout));
      return window_.size() < kWindowRolloutsMax && window_bytes_ < kWindowBytesMax ? ok() : grade_window();
    }));
    ECHO_TRY(grade_window());
    if (out_.is_open() && !out_.flush()) return fail(Code::kIo, "", "{}: writing failed", args_.out);
    return ok();
  }

  learner::RescoreTally tally;
  std::vector<json> differing;                    // rows of the first rollouts whose grades differ
  std::uint64_t unreadable = 0, ended_early = 0;  // rollouts

 private:
  Status grade_window() {
    std::vector<std::optional<Result<SecondGrade>>> grades(window_.size());
    std::atomic<std::size_t> next_index = 0;
    {
      std::vector<std::thread> threads;
      for (std::size_t i = 0; i < std::min(args_.parallel, window_.size()); ++i)
        threads.emplace_back([&] {
          for (std::size_t index = next_index++; index < window_.size(); index = next_index++)
            grades[index] = learner::grade_again(grader_, window_[index].trajectory);
        });
      for (std::thread& thread : threads) thread.join();
    }
    for (std::size_t i = 0; i < window_.size(); ++i) {
      const Result<SecondGrade>& regraded = *grades[i];
      const auto agrees = tally.add(window_[i].trajectory, regraded);
      if (regraded && regraded->ended_early) ++ended_early;
      const bool differs = agrees && !*agrees;
      const bool is_shown = differs && differing.size() < args_.differing_shown_max;
      if (!is_shown && !out_.is_open()) continue;
      json row = row_of(window_[i], regraded, agrees);
      if (out_.is_open()) {
        out_ << row.dump(-1, ' ', /*ensure_ascii=*/false, json::error_handler_t::replace) << '\n';
        if (!out_) return fail(Code::kIo, "", "{}: cannot be written", args_.out);
      }
      if (is_shown) differing.push_back(std::move(row));
    }
    window_.clear();
    window_bytes_ = 0;
    return ok();
  }

  const Arguments& args_;
  learner::RescoreTask grader_;
  std::ofstream out_;
  std::vector<StoredTrajectory> window_;
  std::size_t window_bytes_ = 0;
};

json result_of(const std::filesystem::path& run, const Graders& graders, const replay_buffer::StoredCounts& counts,
               const Rescoring& rescoring) {
  const learner::RescoreResult result = rescoring.tally.result();
  json parts = json::object();
  for (const auto& [name, part] : result.parts)
    parts[name] = {{"old", part.rollouts_old > 0 ? json(part.mean_old) : json(nullptr)},
                   {"new", part.rollouts_new > 0 ? json(part.mean_new) : json(nullptr)}};
  return {{"schema_version", 1},
          {"run", run.string()},
          {"task", graders.name},
          {"stored",
           {{"trajectories", counts.trajectories},
            {"groups", counts.groups},
            {"pruned", counts.pruned},
            {"rejected", counts.rejected},
            {"unreadable", rescoring.unreadable}}},
          {"graded", result.graded},
          {"agree", result.agree},
          {"components_differ", result.components_differ},
          {"ended_early", rescoring.ended_early},
          {"ungraded", result.ungraded},
          {"reward", {{"old", result.reward_old}, {"new", result.reward_new}}},
          {"correct", {{"old", result.correct_old}, {"new", result.correct_new}}},
          {"components", parts},
          {"differing", rescoring.differing}};
}

std::string mean_text(const json& value) {
  return value.is_number() ? fmt::format("{:10.4f}", value.get<double>()) : fmt::format("{:>10}", "-");
}

void print_result(const json& result) {
  const json& stored = result.at("stored");
  const auto graded = result.at("graded").get<std::uint64_t>(), agree = result.at("agree").get<std::uint64_t>();
  fmt::print("{}: {} rollouts of {} groups are stored; {} that were trained on have been deleted\n",
             printable(result.at("run").get<std::string>()), stored.at("trajectories").dump(),
             stored.at("groups").dump(), stored.at("pruned").dump());
  for (const auto& [reason, count] : stored.at("rejected").items())
    fmt::print("not stored: {} rejected ({})\n", count.dump(), printable(reason));
  if (stored.at("unreadable") != 0) fmt::print("not graded: {} that cannot be read\n", stored.at("unreadable").dump());
  fmt::print(
      "graded by {}: {} agree of {}{}\n", printable(result.at("task").get<std::string>()), agree, graded,
      graded > 0 ? fmt::format(" ({:.2f} %)", 100.0 * static_cast<double>(agree) / static_cast<double>(graded)) : "");
  if (result.at("components_differ") != 0)
    fmt::print("{} of those agree except for the parts of their rewards\n", result.at("components_differ").dump());
  if (result.at("ended_early") != 0)
    fmt::print("{} have turns after the task is done\n", result.at("ended_early").dump());
  for (const auto& [reason, count] : result.at("ungraded").items())
    fmt::print("not graded: {}: {}\n", count.dump(), printable(reason));
  if (graded > 0) {
    fmt::print("\n{:<24}{:>10}{:>10}\n", "mean", "old", "new");
    for (const char* name : {"reward", "correct"})
      fmt::print("{:<24}{}{}\n", name, mean_text(result.at(name).at("old")), mean_text(result.at(name).at("new")));
    for (const auto& [name, part] : result.at("components").items())
      fmt::print("  {:<22}{}{}\n", printable(name, 22), mean_text(part.at("old")), mean_text(part.at("new")));
  }
  for (const json& row : result.at("differing")) {
    const json &before = row.at("old"), &now = row.at("new");
    const auto verdict = [](const json& grade) { return grade.at("correct").get<bool>() ? " (correct)" : ""; };
    fmt::print("\n{} of group {}, worker {}, problem {}: reward {:g}{}, now {:g}{}\n  '{}'\n",
               printable(row.at("id").get<std::string>(), 128), row.at("group").dump(), row.at("worker").dump(),
               printable(row.at("problem").get<std::string>(), 128), before.at("reward").get<double>(), verdict(before),
               now.at("reward").get<double>(), verdict(now), printable(row.at("response").get<std::string>(), 300));
  }
}

Status rescore(const Arguments& args) {
  ECHO_ASSIGN(const std::filesystem::path run, find_run(args.run));
  Graders graders;
  ECHO_TRY(choose_graders(args, run, graders));
  auto stored = replay_buffer::StoredBuffer::open(run / "replay.sqlite");
  if (!stored) return std::move(stored).error();
  ECHO_ASSIGN(const replay_buffer::StoredCounts counts, (*stored)->counts());
  Rescoring rescoring(args, graders);
  ECHO_TRY(rescoring.run(**stored));
  const json result = result_of(run, graders, counts, rescoring);
  if (args.as_json)
    fmt::print("{}\n", result.dump(2, ' ', /*ensure_ascii=*/false, json::error_handler_t::replace));
  else
    print_result(result);
  if (result.at("graded") == 0 && !result.at("ungraded").empty())
    return fail(Code::kUnavailable, "", "none of the rollouts could be graded");
  return ok();
}

}  // namespace

void add_rescore(Verb& program, int& exit_code) {
  auto* verb =
      program.add_verb("rescore", "Grade the stored rollouts of a run again, with its own task or another one");
  auto args = std::make_shared<Arguments>();
  verb->add_option("run", args->run, "name or folder of a run (default: the newest); it may be going on");
  verb->add_option("--adapter", args->adapter, "grade with this adapter instead of the run's task");
  verb->add_option("--options", args->options,
                   "options of the adapter, as JSON; if it has no problems, those of the run are used");
  verb->add_option("--config", args->config, "grade with the task of this run file instead");
  verb->add_option("--set", args->overrides, "override a key of that run file")->one_value_each();
  verb->add_option("--rollouts", args->rollouts, "only this number of the newest rollouts (0: all)")->show_default();
  verb->add_option("--show", args->differing_shown_max, "number of differing rollouts to show")
      ->range<std::size_t>(0, 10'000)
      ->show_default();
  verb->add_option("--parallel", args->parallel, "responses graded at a time")
      ->range<std::size_t>(1, 256)
      ->show_default();
  verb->add_option("--out", args->out, "write all grades into this file, one JSON object per line");
  verb->add_flag("--json", args->as_json, "print JSON (docs/reference/task-verbs.md has the fields)");
  verb->footer("The run's database is copied to TMPDIR and read there; the run is not changed.");
  verb->callback([args, &exit_code] {
    const Status done = rescore(*args);
    exit_code = done ? 0 : report_error(kOperation, done.error());
  });
}

}  // namespace echoline::cli

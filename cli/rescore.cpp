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
constexpr std::size_t kWindowRollouts = 512, kWindowBytes = 64u << 20;

struct Arguments {
  std::string run, adapter, options, config, out;
  std::vector<std::string> overrides;
  std::uint64_t rollouts = 0;
  std::size_t shown = 5, parallel = 8;
  bool as_json = false;
};

// The adapters that grade, and what they need.
struct Graders {
  learner::RunConfig run;
  std::string name;  // printed in the report
  std::unique_ptr<data_plane::Adapter> task, run_task;
  std::once_flag phrasing_once;
  std::optional<Result<model::Phrasing>> phrasing;
};

Result<std::unique_ptr<data_plane::Adapter>> make_task(const data_plane::TaskSettings& task, std::uint64_t seed) {
  auto adapter = data_plane::make_adapter(task.adapter, task.options_json, seed);
  if (!adapter) return as_mistake(std::move(adapter).error());
  return adapter;
}

Status choose_graders(const Arguments& a, const std::filesystem::path& run, Graders& g) {
  if (!a.adapter.empty() && !a.config.empty())
    return fail(Code::kInvalid, "", "expected --adapter or --config, found both");
  if (!a.options.empty() && a.adapter.empty()) return fail(Code::kInvalid, "", "--options needs --adapter");
  if (!a.overrides.empty() && a.config.empty())
    return fail(Code::kInvalid, "", "--set changes keys of a run file: it needs --config");
  ECHO_ASSIGN(g.run, learner::load_run_config(run / "config.yaml"));
  if (a.adapter.empty() && a.config.empty()) {
    ECHO_ASSIGN(g.task, make_task(g.run.task, g.run.run.seed));
    g.name = fmt::format("{}, as the run has it", g.run.task.adapter);
    return ok();
  }
  data_plane::TaskSettings task;
  if (!a.config.empty()) {
    ECHO_ASSIGN(const auto overrides, parse_overrides(a.overrides));
    ECHO_ASSIGN(const learner::RunConfig config, learner::load_run_config(a.config, overrides));
    task = config.task;
    g.name = fmt::format("{} of {}", task.adapter, a.config);
  } else {
    task.adapter = a.adapter;
    task.options_json = a.options.empty() ? "{}" : a.options;
    g.name = fmt::format("{} with {}", task.adapter, task.options_json);
  }
  // The task may lack files of its own: the problems are then those of the run.
  auto with_problems = make_task(task, g.run.run.seed);
  if (with_problems)
    g.task = *std::move(with_problems);
  else if (auto scoring_only = data_plane::make_adapter(task.adapter, task.options_json, g.run.run.seed,
                                                        data_plane::AdapterUse::kScoring)) {
    print_stderr("{} has no problems, so those of the run are used: {}\n", task.adapter,
                 with_problems.error().message());
    g.task = *std::move(scoring_only);
  } else {
    return std::move(with_problems).error();
  }
  auto run_task = make_task(g.run.task, g.run.run.seed);
  if (run_task)
    g.run_task = *std::move(run_task);
  else
    print_stderr("the run's own task cannot be created, so problems must come from {}: {}\n", g.name,
                 run_task.error().message());
  return ok();
}

Result<const model::Phrasing*> phrasing_of(Graders& g) {
  std::call_once(g.phrasing_once, [&] {
    g.phrasing = [&]() -> Result<model::Phrasing> {
      ECHO_ASSIGN(const model::ModelFiles files, g.run.model.path ? model::ModelFiles::read(*g.run.model.path)
                                                                  : model::ModelFiles::of_preset(*g.run.model.preset));
      return model::Phrasing::make(files, g.run.prompts);
    }();
  });
  if (!*g.phrasing) return g.phrasing->error();
  return &**g.phrasing;
}

json as_json(double reward, bool correct, const auto& components) {
  json parts = json::object();
  for (const auto& [name, value] : components) parts[name] = value;
  return {{"reward", reward}, {"correct", correct}, {"components", parts}};
}

json row_of(const StoredTrajectory& s, const Result<SecondGrade>& regraded, std::optional<bool> agrees) {
  const auto& t = s.trajectory;
  json row{{"id", t.id()},
           {"group", t.group()},
           {"member", t.member()},
           {"problem", t.problem_id()},
           {"worker", t.worker()},
           {"finished", t.finished()},
           {"consumed_step", s.consumed_step ? json(*s.consumed_step) : json(nullptr)},
           {"stale", s.stale},
           {"response", t.text()},
           {"old", as_json(t.reward(), t.correct(), t.components())}};
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

// Grades rollouts in windows, many at a time, and reports them in the order in which they were stored.
class Rescoring {
 public:
  Rescoring(const Arguments& a, Graders& g) : a_(a) {
    grader_.seed = g.run.run.seed;
    grader_.task = g.task.get();
    grader_.problems = g.run_task.get();
    grader_.phrasing = [&g] { return phrasing_of(g); };
  }

  Status run(replay_buffer::StoredBuffer& stored) {
    if (!a_.out.empty()) {
      out_.open(a_.out, std::ios::binary | std::ios::trunc);
      if (!out_) return fail(Code::kIo, "", "{}: cannot be written", a_.out);
    }
    ECHO_ASSIGN(unreadable, stored.each(a_.rollouts, [this](StoredTrajectory t) -> Status {
      bytes_ += t.trajectory.ByteSizeLong();
      window_.push_back(std::move(t));
      return window_.size() < kWindowRollouts && bytes_ < kWindowBytes ? ok() : grade();
    }));
    ECHO_TRY(grade());
    if (out_.is_open() && !out_.flush()) return fail(Code::kIo, "", "{}: writing failed", a_.out);
    return ok();
  }

  learner::RescoreSums sums;
  std::vector<json> differing;
  std::uint64_t unreadable = 0, ended_early = 0;

 private:
  Status grade() {
    std::vector<std::optional<Result<SecondGrade>>> grades(window_.size());
    std::atomic<std::size_t> next_index = 0;
    {
      std::vector<std::thread> threads;
      for (std::size_t i = 0; i < std::min(a_.parallel, window_.size()); ++i)
        threads.emplace_back([&] {
          for (std::size_t index = 0; (index = next_index++) < window_.size();)
            grades[index] = learner::grade_again(grader_, window_[index].trajectory);
        });
      for (std::thread& thread : threads) thread.join();
    }
    for (std::size_t i = 0; i < window_.size(); ++i) {
      const Result<SecondGrade>& regraded = *grades[i];
      const auto agrees = sums.add(window_[i].trajectory, regraded);
      if (regraded && regraded->ended_early) ++ended_early;
      const bool show = agrees == false && differing.size() < a_.shown;
      if (!show && !out_.is_open()) continue;
      json row = row_of(window_[i], regraded, agrees);
      if (out_.is_open()) {
        out_ << row.dump(-1, ' ', false, json::error_handler_t::replace) << '\n';
        if (!out_) return fail(Code::kIo, "", "{}: cannot be written", a_.out);
      }
      if (show) differing.push_back(std::move(row));
    }
    window_.clear();
    bytes_ = 0;
    return ok();
  }

  const Arguments& a_;
  learner::RescoreTask grader_;
  std::ofstream out_;
  std::vector<StoredTrajectory> window_;
  std::size_t bytes_ = 0;
};

json result_of(const std::filesystem::path& run, const Graders& g, const replay_buffer::StoredCounts& counts,
               const Rescoring& r) {
  const learner::RescoreSum sum = r.sums.sum();
  json parts = json::object();
  for (const auto& [name, part] : sum.parts)
    parts[name] = {{"old", part.rollouts_old > 0 ? json(part.mean_old) : json(nullptr)},
                   {"new", part.rollouts_new > 0 ? json(part.mean_new) : json(nullptr)}};
  return {{"schema_version", 1},
          {"run", run.string()},
          {"task", g.name},
          {"stored",
           {{"trajectories", counts.trajectories},
            {"groups", counts.groups},
            {"pruned", counts.pruned},
            {"rejected", counts.rejected},
            {"unreadable", r.unreadable}}},
          {"graded", sum.graded},
          {"agree", sum.agree},
          {"components_differ", sum.components_differ},
          {"ended_early", r.ended_early},
          {"ungraded", sum.ungraded},
          {"reward", {{"old", sum.reward_old}, {"new", sum.reward_new}}},
          {"correct", {{"old", sum.correct_old}, {"new", sum.correct_new}}},
          {"components", parts},
          {"differing", r.differing}};
}

std::string mean(const json& value) {
  return value.is_number() ? fmt::format("{:10.4f}", value.get<double>()) : fmt::format("{:>10}", "-");
}

void print(const json& r) {
  const json& stored = r.at("stored");
  const auto graded = r.at("graded").get<std::uint64_t>(), agree = r.at("agree").get<std::uint64_t>();
  fmt::print("{}: {} rollouts of {} groups are stored; {} that were trained on have been deleted\n",
             printable(r.at("run").get<std::string>()), stored.at("trajectories").dump(), stored.at("groups").dump(),
             stored.at("pruned").dump());
  for (const auto& [reason, count] : stored.at("rejected").items())
    fmt::print("not stored: {} rejected ({})\n", count.dump(), printable(reason));
  if (stored.at("unreadable") != 0) fmt::print("not graded: {} that cannot be read\n", stored.at("unreadable").dump());
  fmt::print(
      "graded by {}: {} agree of {}{}\n", printable(r.at("task").get<std::string>()), agree, graded,
      graded > 0 ? fmt::format(" ({:.2f} %)", 100.0 * static_cast<double>(agree) / static_cast<double>(graded)) : "");
  if (r.at("components_differ") != 0)
    fmt::print("{} of those agree except for the parts of their rewards\n", r.at("components_differ").dump());
  if (r.at("ended_early") != 0) fmt::print("{} have turns after the task is done\n", r.at("ended_early").dump());
  for (const auto& [reason, count] : r.at("ungraded").items())
    fmt::print("not graded: {}: {}\n", count.dump(), printable(reason));
  if (graded > 0) {
    fmt::print("\n{:<24}{:>10}{:>10}\n", "mean", "old", "new");
    for (const char* name : {"reward", "correct"})
      fmt::print("{:<24}{}{}\n", name, mean(r.at(name).at("old")), mean(r.at(name).at("new")));
    for (const auto& [name, part] : r.at("components").items())
      fmt::print("  {:<22}{}{}\n", printable(name, 22), mean(part.at("old")), mean(part.at("new")));
  }
  for (const json& row : r.at("differing")) {
    const json &before = row.at("old"), &now = row.at("new");
    const auto verdict = [](const json& grade) { return grade.at("correct").get<bool>() ? " (correct)" : ""; };
    fmt::print("\n{} of group {}, worker {}, problem {}: reward {:g}{}, now {:g}{}\n  '{}'\n",
               printable(row.at("id").get<std::string>(), 128), row.at("group").dump(), row.at("worker").dump(),
               printable(row.at("problem").get<std::string>(), 128), before.at("reward").get<double>(), verdict(before),
               now.at("reward").get<double>(), verdict(now), printable(row.at("response").get<std::string>(), 300));
  }
}

Status rescore(const Arguments& a) {
  ECHO_ASSIGN(const std::filesystem::path run, find_run(a.run));
  Graders graders;
  ECHO_TRY(choose_graders(a, run, graders));
  auto stored = replay_buffer::StoredBuffer::open(run / "replay.sqlite");
  if (!stored) return std::move(stored).error();
  ECHO_ASSIGN(const replay_buffer::StoredCounts counts, (*stored)->counts());
  Rescoring rescoring(a, graders);
  ECHO_TRY(rescoring.run(**stored));
  const json result = result_of(run, graders, counts, rescoring);
  if (a.as_json)
    fmt::print("{}\n", result.dump(2, ' ', false, json::error_handler_t::replace));
  else
    print(result);
  if (result.at("graded") == 0 && !result.at("ungraded").empty())
    return fail(Code::kUnavailable, "", "none of the rollouts could be graded");
  return ok();
}

}  // namespace

void add_rescore(Verb& app, int& exit_code) {
  auto* verb = app.add_verb("rescore", "Grade the stored rollouts of a run again, with its own task or another one");
  auto a = std::make_shared<Arguments>();
  verb->add_option("run", a->run, "name or folder of a run (default: the newest); it may be going on");
  verb->add_option("--adapter", a->adapter, "grade with this adapter instead of the run's task");
  verb->add_option("--options", a->options,
                   "options of the adapter, as JSON; if it has no problems, those of the run are used");
  verb->add_option("--config", a->config, "grade with the task of this run file instead");
  verb->add_option("--set", a->overrides, "override a key of that run file")->one_value_each();
  verb->add_option("--rollouts", a->rollouts, "only this number of the newest rollouts (0: all)")->show_default();
  verb->add_option("--show", a->shown, "number of differing rollouts to show")
      ->range<std::size_t>(0, 10'000)
      ->show_default();
  verb->add_option("--parallel", a->parallel, "responses graded at a time")->range<std::size_t>(1, 256)->show_default();
  verb->add_option("--out", a->out, "write all grades into this file, one JSON object per line");
  verb->add_flag("--json", a->as_json, "print JSON (docs/reference/task-verbs.md has the fields)");
  verb->footer(
      "  echoline rescore quickstart\n"
      "  echoline rescore my-run --adapter math \\\n"
      "    --options '{\"rule\": \"hendrycks_math\"}' --out grades.jsonl\n"
      "  echoline rescore my-run --config changed.yaml\n"
      "The run's database is copied to TMPDIR and read there; the run is not changed.");
  verb->callback([a, &exit_code] {
    const Status done = rescore(*a);
    exit_code = done ? 0 : report_error(kOperation, done.error());
  });
}

}  // namespace echoline::cli

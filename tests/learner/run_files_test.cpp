// Run files, the run's folder, and the report made from its measurements.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <set>

#include "base/clock.hpp"
#include "base/config_reference.hpp"
#include "base/files.hpp"
#include "learner/report.hpp"
#include "learner/run_clock.hpp"
#include "learner/run_config.hpp"
#include "learner/run_record.hpp"
#include "provisioner/capacity.hpp"
#include "replay_buffer/rules.hpp"
#include "tests/learner/rows.hpp"

namespace echoline::learner {
namespace {

using nlohmann::json;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class RunFilesTest : public ::testing::Test {
 protected:
  RunFilesTest() {
    std::string name = (std::filesystem::temp_directory_path() / "echoline-run-XXXXXX").string();
    folder_ = ::mkdtemp(name.data());
  }
  ~RunFilesTest() override { std::filesystem::remove_all(folder_); }
  std::filesystem::path folder_;
};

TEST_F(RunFilesTest, QuickstartReadsAndResolvesToItself) {
  const auto config = load_run_config("configs/quickstart.yaml");
  ASSERT_TRUE(config) << config.error().message();
  EXPECT_EQ(config->staleness.budget, 3u);
  EXPECT_EQ(config->network.uplink, BitRate::from_mbit_per_s(24));
  EXPECT_TRUE(config->learner.warm_start.enabled);
  EXPECT_EQ(config->fleet.offers.filename(), "quickstart.json");
  std::ofstream(folder_ / "resolved.yaml") << config->resolved_yaml;
  const auto again = load_run_config(folder_ / "resolved.yaml");
  ASSERT_TRUE(again) << again.error().message() << config->resolved_yaml;
  EXPECT_EQ(again->rollout.trajectories_per_step(), config->rollout.trajectories_per_step());
  EXPECT_EQ(again->learner.optimizer.learning_rate, config->learner.optimizer.learning_rate);
  EXPECT_EQ(again->task.options_json, config->task.options_json);
}

TEST_F(RunFilesTest, ALossByNameHasItsDefaultsAndKeysChangeOneOfThem) {
  for (const std::string_view name : loss_names()) {
    const auto config =
        load_run_config("configs/quickstart.yaml", {{"learner.loss", std::string(name)}, {"learner.clip_high", "0.5"}});
    ASSERT_TRUE(config) << config.error().message();
    const LossConfig &loaded = config->learner.loss, defaults = *loss_named(name);
    EXPECT_EQ(loaded.baseline, defaults.baseline) << name;
    EXPECT_EQ(loaded.trust_region, defaults.trust_region) << name;
    EXPECT_EQ(loaded.aggregation, defaults.aggregation) << name;
    EXPECT_EQ(loaded.ratio_level, defaults.ratio_level) << name;
    EXPECT_EQ(loaded.importance_level, defaults.importance_level) << name;
    EXPECT_EQ(loaded.clip_low, defaults.clip_low) << name;
    EXPECT_EQ(loaded.clip_high, 0.5) << name;
    EXPECT_EQ(loaded.fixed_length, 6) << "rollout.response_tokens_max";
    std::ofstream(folder_ / "resolved.yaml") << config->resolved_yaml;
    const auto again = load_run_config(folder_ / "resolved.yaml");
    ASSERT_TRUE(again) << again.error().message();
    EXPECT_EQ(again->learner.loss.aggregation, defaults.aggregation) << name;
  }
}

TEST_F(RunFilesTest, AResolvedFileMeansTheSameAnywhere) {
  std::filesystem::create_directories(folder_ / "sub/offers");
  std::filesystem::copy("configs/quickstart.yaml", folder_ / "sub/run.yaml");
  std::filesystem::copy("configs/offers/quickstart.json", folder_ / "sub/offers");
  const auto config = load_run_config(
      folder_ / "sub/run.yaml", {{"task.adapter", "gsm8k"}, {"task.options", "{train: a.jsonl, test: /b.jsonl}"}});
  ASSERT_TRUE(config) << config.error().message();
  EXPECT_EQ(config->fleet.offers, folder_ / "sub/offers/quickstart.json");
  EXPECT_EQ(config->run_folder(), std::filesystem::current_path() / "runs/quickstart");
  EXPECT_NE(config->task.options_json.find((std::filesystem::current_path() / "a.jsonl").string()), std::string::npos);
  std::ofstream(folder_ / "config.yaml") << config->resolved_yaml;
  const auto again = load_run_config(folder_ / "config.yaml");
  ASSERT_TRUE(again) << again.error().message();
  EXPECT_EQ(again->fleet.offers, config->fleet.offers);
  EXPECT_EQ(again->run_folder(), config->run_folder());
  EXPECT_EQ(again->task.options_json, config->task.options_json);
  EXPECT_EQ(again->resolved_yaml, config->resolved_yaml);
  const auto misspelled =
      load_run_config(folder_ / "sub/run.yaml", {{"run.folder", "/x"}, {"task.adapter", "aritmetic"}});
  ASSERT_FALSE(misspelled);
  EXPECT_NE(misspelled.error().detail.find("did you mean 'arithmetic'?"), std::string::npos)
      << misspelled.error().detail;
}

TEST_F(RunFilesTest, EveryKeyHasAMeaning) {
  std::set<std::string> paths;
  for (const ConfigKey& key : run_file_keys()) {
    EXPECT_GE(key.meaning.size(), 5u) << key.path << " has no description";
    EXPECT_TRUE(paths.insert(key.path + " " + key.when).second) << key.path << " is read twice";
  }
  for (const char* path : {"run.name ", "learner.warm_start.batch ", "task.options.digits adapter: arithmetic",
                           "task.options.train adapter: gsm8k", "fleet.offers "})
    EXPECT_TRUE(paths.contains(path)) << path;
}

TEST_F(RunFilesTest, TheReferenceAsAFileLacksOnlyRequiredKeys) {
  std::ofstream(folder_ / "run.yaml") << reference_yaml(run_file_keys());
  std::vector<std::pair<std::string, std::string>> required_settings{{"model.preset", "tiny-64"},
                                                                     {"fleet.offers", "3"}};
  for (const ConfigKey& key : run_file_keys())
    if (key.required && key.when.empty() && key.path.find("[]") == std::string::npos)
      required_settings.emplace_back(key.path, key.path == "task.adapter" ? "arithmetic"
                                               : key.type == "duration"   ? "1 s"
                                                                          : "3");
  const auto config = load_run_config(folder_ / "run.yaml", required_settings);
  EXPECT_TRUE(config) << config.error().message();
}

TEST_F(RunFilesTest, OverridesAreNamedInErrors) {
  const auto config = load_run_config("configs/quickstart.yaml", {{"run.steps", "0"}, {"network.uplink", "24"}});
  ASSERT_FALSE(config);
  EXPECT_EQ(config.error().code, Code::kInvalid);
  EXPECT_NE(config.error().detail.find("--set run.steps"), std::string::npos) << config.error().detail;
  EXPECT_NE(config.error().detail.find("--set network.uplink"), std::string::npos) << config.error().detail;
}

TEST_F(RunFilesTest, SeveralTasksAreReadInPlace) {
  const auto load_with_tasks = [&](const std::string& tasks) {
    std::ifstream quickstart("configs/quickstart.yaml");
    std::string text((std::istreambuf_iterator<char>(quickstart)), {});
    const auto task_begin = text.find("\ntask:"), task_end = text.find("\n\n", task_begin);
    text.replace(task_begin, task_end - task_begin, "\ntask: {prompt: \"{prompt}\"}\n" + tasks);
    std::filesystem::create_directories(folder_ / "offers");
    std::filesystem::copy("configs/offers/quickstart.json", folder_ / "offers",
                          std::filesystem::copy_options::overwrite_existing);
    std::ofstream(folder_ / "several.yaml") << text;
    return load_run_config(folder_ / "several.yaml");
  };
  const auto config = load_with_tasks(
      "tasks:\n  - {adapter: arithmetic, weight: 3}\n  - {adapter: guess, name: games}\n"
      "  - {adapter: arithmetic, name: secret, scored_by: learner, prompt: \"({prompt})\", options: {digits: 3}}\n");
  ASSERT_TRUE(config) << config.error().message();
  EXPECT_EQ(config->task.adapter, data_plane::kSeveralTasksAdapter);
  ASSERT_EQ(config->task.listed_tasks.size(), 3u);
  EXPECT_EQ(config->task.listed_tasks[0].name, "arithmetic");
  EXPECT_EQ(config->task.listed_tasks[0].weight, 3u);
  EXPECT_EQ(config->task.listed_tasks[2].prompt, "({prompt})");
  EXPECT_TRUE(config->task.scored_by_learner("secret:arithmetic/1+1"));
  EXPECT_FALSE(config->task.scored_by_learner("games:guess/1"));
  EXPECT_FALSE(config->task.scored_by_learner("nothing"));
  std::ofstream(folder_ / "resolved.yaml") << config->resolved_yaml;
  const auto again = load_run_config(folder_ / "resolved.yaml");
  ASSERT_TRUE(again) << again.error().message();
  EXPECT_EQ(again->task.options_json, config->task.options_json);
  EXPECT_EQ(again->resolved_yaml, config->resolved_yaml);
  ASSERT_TRUE(data_plane::make_adapter(config->task.adapter, config->task.options_json, 1));
  for (const auto& [tasks, expected] : std::vector<std::pair<std::string, std::string>>{
           {"tasks: []\n", "expected 1 to 64 tasks, found 0"},
           {"tasks:\n  - {adapter: aritmetic}\n", "did you mean 'arithmetic'?"},
           {"tasks:\n  - {weight: 2}\n", "expected the name of an adapter"},
           {"tasks:\n  - {adapter: arithmetic, weight: 0.5}\n", "weight"},
           {"tasks:\n  - {adapter: arithmetic}\n  - {adapter: arithmetic}\n", "two tasks are called 'arithmetic'"},
           {"tasks:\n  - {adapter: arithmetic, name: \"a:b\"}\n", "expected at most 32 letters"},
           {"tasks:\n  - {adapter: guess, scored_by: learner}\n", "guess has many turns"},
           {"tasks:\n  - {adapter: arithmetic, options: {digit: 1}}\n", "did you mean 'digits'?"}}) {
    const auto refused = load_with_tasks(tasks);
    ASSERT_FALSE(refused) << tasks;
    EXPECT_NE(refused.error().detail.find(expected), std::string::npos) << refused.error().detail;
    EXPECT_NE(refused.error().detail.find("several.yaml:"), std::string::npos) << refused.error().detail;
  }
  const auto both = load_run_config(folder_ / "several.yaml", {{"task.adapter", "arithmetic"}});
  ASSERT_FALSE(both);
  EXPECT_NE(both.error().detail.find("this run lists `tasks`"), std::string::npos) << both.error().detail;
  const auto many_turns = load_run_config(
      "configs/quickstart.yaml", {{"task.adapter", "guess"}, {"task.options", "{}"}, {"task.scored_by", "learner"}});
  ASSERT_FALSE(many_turns);
  EXPECT_NE(many_turns.error().detail.find("many turns"), std::string::npos) << many_turns.error().detail;
}

TEST_F(RunFilesTest, StopStringsAreBounded) {
  const auto config = load_run_config("configs/quickstart.yaml", {{"rollout.stop", "[\"</a>\", \"zz\"]"}});
  ASSERT_TRUE(config) << config.error().message();
  EXPECT_THAT(config->prompts.stop, ElementsAre("</a>", "zz"));
  EXPECT_FALSE(load_run_config("configs/quickstart.yaml", {{"rollout.stop", "[\"\"]"}}));
  EXPECT_FALSE(load_run_config("configs/quickstart.yaml", {{"rollout.stop", "[" + std::string(65, 'x') + "]"}}));
}

TEST_F(RunFilesTest, AnEngineThatIsAServerIsDescribedWhole) {
  const auto refusal_of = [&](std::vector<std::pair<std::string, std::string>> overrides) {
    const auto config = load_run_config("configs/quickstart.yaml", overrides);
    return config ? std::string() : config.error().message();
  };
  const std::pair<std::string, std::string> vllm{"worker.engine", "vllm"},
      command{"worker.engine_command", "vllm serve {model} --port {port}"};
  EXPECT_THAT(refusal_of({vllm}), HasSubstr("{model}"));
  EXPECT_THAT(refusal_of({vllm, {"worker.engine_command", "vllm serve {model}"}}), HasSubstr("{port}"));
  EXPECT_THAT(load_run_config("configs/quickstart.yaml", {{"worker.device", "cuda:1"}})->worker.arguments(),
              ElementsAre("--device", "cuda:1"));
  EXPECT_THAT(load_run_config("configs/quickstart.yaml", {{"worker.device", "cuda"}, {"worker.threads", "0"}})
                  ->worker.arguments(),
              ElementsAre("--device", "cuda", "--threads", "0"));
  EXPECT_THAT(refusal_of({{"worker.threads", "-1"}}), HasSubstr("worker.threads"));
  EXPECT_EQ(load_run_config("configs/quickstart.yaml", {{"learner.threads", "3"}})->learner.threads, 3);
  EXPECT_EQ(load_run_config("configs/quickstart.yaml", {{"learner.threads", "0"}})->learner.threads,
            static_cast<int>(std::thread::hardware_concurrency()));
  EXPECT_THAT(refusal_of({{"worker.device", "gpu"}}), HasSubstr("cuda:N"));
  EXPECT_THAT(refusal_of({vllm, command, {"worker.device", "cuda"}}), HasSubstr("built-in"));
  EXPECT_THAT(refusal_of({command}), HasSubstr("worker.engine"));
  EXPECT_THAT(refusal_of({vllm, command, {"rollout.top_p", "0.9"}}), HasSubstr("rollout.top_p"));
  const auto config = load_run_config("configs/quickstart.yaml", {vllm, command});
  ASSERT_TRUE(config) << config.error().message();
  EXPECT_THAT(config->worker.arguments(),
              ElementsAre("--engine", "vllm", "--engine-command", command.second, "--engine-patience", "600 s"));
  EXPECT_THAT(RunConfig{}.worker.arguments(), ElementsAre());
  const std::pair<std::string, std::string> two{"worker.gpus_per_engine", "2"},
      parallel{"worker.engine_command", "vllm serve {model} --port {port} --tensor-parallel-size {gpus}"};
  const auto tensor_parallel = load_run_config("configs/quickstart.yaml", {vllm, parallel, two});
  ASSERT_TRUE(tensor_parallel) << tensor_parallel.error().message();
  EXPECT_THAT(tensor_parallel->worker.arguments(), ElementsAre("--engine", "vllm", "--engine-command", parallel.second,
                                                               "--engine-patience", "600 s", "--gpus-per-engine", "2"));
  EXPECT_EQ(tensor_parallel->worker.worker_engines().count_on(7), 3);
  EXPECT_EQ(tensor_parallel->worker.worker_engines().gpus_used_on(7), 6);
  EXPECT_EQ(refusal_of({vllm, parallel}), "");
  const std::pair<std::string, std::string> eight{"worker.engine_command", "vllm serve {model} --port {port} --tp 8"};
  EXPECT_THAT(refusal_of({vllm, eight}), HasSubstr("worker.gpus_per_engine, which is 1"));
  EXPECT_EQ(refusal_of({vllm, eight, {"worker.gpus_per_engine", "8"}}), "");
  EXPECT_EQ(refusal_of({vllm, eight, {"worker.engines", "1"}}), "");
  EXPECT_THAT(refusal_of({two}), HasSubstr("the built-in engine uses one GPU"));
  EXPECT_THAT(refusal_of({{"worker.engines", "2"}}), HasSubstr("the built-in engine uses one GPU"));
  EXPECT_THAT(refusal_of({vllm, command, {"worker.engines", "0"}}), HasSubstr("worker.engines"));
  EXPECT_EQ(load_run_config("configs/quickstart.yaml", {vllm, command, {"worker.engines", "1"}})
                ->worker.worker_engines()
                .count_on(8),
            1);
  EXPECT_EQ(RunConfig{}.worker.worker_engines().count_on(8), 1);
  EXPECT_EQ(RunConfig{}.worker.worker_engines().gpus_used_on(8), 0) << "it computes on the CPU";
}

TEST_F(RunFilesTest, StalenessFromStrictlyOnPolicyToWide) {
  const auto load_with = [](const std::string& budget, const std::string& kappa) {
    return load_run_config("configs/quickstart.yaml",
                           {{"staleness.budget", budget}, {"staleness.publish_every", kappa}});
  };
  const auto on_policy = load_with("0", "1");
  ASSERT_TRUE(on_policy) << on_policy.error().detail;
  EXPECT_EQ(on_policy->staleness.lookahead_steps(), 0u);
  EXPECT_EQ(load_with("1", "2")->staleness.lookahead_steps(), 1u);
  EXPECT_EQ(load_with("11", "1")->staleness.lookahead_steps(), 11u);
  const auto starved = load_with("1", "3");
  ASSERT_FALSE(starved);
  EXPECT_NE(starved.error().detail.find("below publish_every (kappa) - 1 = 2"), std::string::npos);
}

TEST_F(RunFilesTest, TheLookaheadFollowsTheBudgetUnlessItIsANumber) {
  const auto load_with = [](std::vector<std::pair<std::string, std::string>> overrides) {
    return load_run_config("configs/quickstart.yaml", std::move(overrides));
  };
  for (const char* budget : {"1", "3", "11"}) {
    const auto config = load_with({{"staleness.budget", budget}, {"staleness.lookahead", "auto"}});
    ASSERT_TRUE(config) << config.error().message();
    EXPECT_EQ(std::to_string(config->staleness.lookahead_steps()), budget);
    EXPECT_THAT(config->resolved_yaml,
                HasSubstr("lookahead: auto"));  // so that it follows if the file is changed again
  }
  EXPECT_EQ(load_with({{"staleness.budget", "11"}, {"staleness.lookahead", "2"}})->staleness.lookahead_steps(), 2u);
  const auto above = load_with({{"staleness.budget", "1"}, {"staleness.lookahead", "2"}});
  ASSERT_FALSE(above);
  EXPECT_THAT(above.error().message(),
              HasSubstr("expected at most the budget S = 1, or `auto`, which follows it; found 2"));
}

TEST_F(RunFilesTest, TheLearningRateOfALoadedModelIsNotThatOfANewOne) {
  std::ifstream quickstart("configs/quickstart.yaml");
  std::ofstream without_rate(folder_ / "run.yaml");
  for (std::string line; std::getline(quickstart, line);)
    if (!line.starts_with("  learning_rate:")) without_rate << line << '\n';
  without_rate.close();
  const std::pair<std::string, std::string> offers{
      "fleet.offers", std::filesystem::absolute("configs/offers/quickstart.json").string()};
  const auto fresh = load_run_config(folder_ / "run.yaml", {offers});
  ASSERT_TRUE(fresh) << fresh.error().message();
  EXPECT_EQ(fresh->learner.optimizer.learning_rate, 1e-3);
  const auto loaded = load_run_config(folder_ / "run.yaml", {offers, {"model", "{path: /models/qwen3}"}});
  ASSERT_TRUE(loaded) << loaded.error().message();
  EXPECT_EQ(loaded->learner.optimizer.learning_rate, 1e-6);
  const auto overridden = load_run_config(
      folder_ / "run.yaml", {offers, {"model", "{path: /models/qwen3}"}, {"learner.learning_rate", "3e-5"}});
  EXPECT_EQ(overridden->learner.optimizer.learning_rate, 3e-5);
}

TEST_F(RunFilesTest, AnExternalTrainerIsNotFedFromAPartOfTheDistribution) {
  for (const auto& setting : {std::pair<std::string, std::string>{"rollout.top_p", "0.5"},
                              {"rollout.top_k", "20"},
                              {"rollout.min_p", "0.1"}}) {
    EXPECT_TRUE(load_run_config("configs/quickstart.yaml", {setting}));
    const auto refused = load_run_config("configs/quickstart.yaml", {setting, {"learner.trainer", "external"}});
    ASSERT_FALSE(refused) << setting.first;
    EXPECT_THAT(refused.error().message(),
                HasSubstr("learner.trainer: an external trainer gets log-probabilities of the whole distribution"));
    EXPECT_THAT(refused.error().message(), HasSubstr("Set them to 1, 0 and 0"));
  }
}

// The plan may not use the ledger's rules, because provisioner/ is a lower layer. This test checks that both refuse the
// same.
TEST_F(RunFilesTest, ThePlanKnowsTheLeastBudget) {
  for (std::uint32_t kappa = 1; kappa <= 3; ++kappa) {
    const int least = static_cast<int>(replay_buffer::staleness_budget_min(kappa));
    EXPECT_TRUE(provisioner::check_staleness_budget(least, static_cast<int>(kappa)));
    EXPECT_FALSE(provisioner::check_staleness_budget(least - 1, static_cast<int>(kappa)));
  }
}

TEST_F(RunFilesTest, LeasesAreShortFirstAndMayLastHours) {
  const auto config = load_run_config("configs/quickstart.yaml");
  EXPECT_LE(config->lease.first, std::chrono::minutes(2));
  EXPECT_GE(config->lease.max, std::chrono::hours(1));
  const auto wrong =
      load_run_config("configs/quickstart.yaml", {{"rollout.lease_min", "2 h"}, {"rollout.lease.max", "1 h"}});
  ASSERT_FALSE(wrong);
  EXPECT_NE(wrong.error().detail.find("expected lease_min"), std::string::npos) << wrong.error().detail;
}

TEST_F(RunFilesTest, TheNameIsGoodForAFolderAndForCertificates) {
  const auto refusal_of = [](const std::string& name) {
    const auto config = load_run_config("configs/quickstart.yaml", {{"run.name", name}});
    return config ? std::string() : config.error().detail;
  };
  EXPECT_EQ(refusal_of(std::string(64, 'n')), "");
  for (const std::string& bad_name : {std::string(65, 'n'), std::string("a/b"), std::string(".hidden")})
    EXPECT_NE(refusal_of(bad_name).find("expected at most 64 letters"), std::string::npos)
        << bad_name << ": " << refusal_of(bad_name);
}

TEST_F(RunFilesTest, ASecondRunKeepsTheFirst) {
  const std::filesystem::path run = folder_ / "run";
  {
    const auto record = RunRecord::open(run, false);
    ASSERT_TRUE(record);
    EXPECT_TRUE((*record)->moved_to().empty());
    (*record)->append_metric("step", {{"step", 1}});
    EXPECT_EQ(RunRecord::open(run, true).error().code, Code::kUnavailable);  // still being written
  }
  const auto record = RunRecord::open(run, false);
  ASSERT_TRUE(record);
  EXPECT_EQ((*record)->moved_to(), folder_ / "run.1");
  EXPECT_EQ(read_json_lines(folder_ / "run.1/metrics.jsonl")->size(), 1u);
  EXPECT_EQ(read_json_lines(run / "metrics.jsonl")->size(), 0u);
}

TEST_F(RunFilesTest, ResumeCutsATornLineAndNeedsARun) {
  const std::filesystem::path run = folder_ / "run";
  EXPECT_EQ(RunRecord::open(run, true).error().code, Code::kNotFound);
  { (*RunRecord::open(run, false))->append_metric("step", {{"step", 1}}); }
  std::ofstream(run / "metrics.jsonl", std::ios::app) << R"({"kind":"st)";
  { (*RunRecord::open(run, true))->append_metric("step", {{"step", 2}}); }
  const auto rows = read_json_lines(run / "metrics.jsonl");
  ASSERT_TRUE(rows) << rows.error().message();
  ASSERT_EQ(rows->size(), 2u);
  EXPECT_EQ((*rows)[1].at("step"), 2);
}

TEST_F(RunFilesTest, AnAlarmIsAnEventAndGoesOnAfterAResume) {
  const std::filesystem::path run = folder_ / "run";
  const json row{{"reward_mean", 0.1}, {"accuracy", 0.1}, {"zero_advantage_fraction", 1.0}};
  for (const bool resume : {false, true}) {
    auto record = RunRecord::open(run, resume);
    ASSERT_TRUE(record);
    for (int step = resume ? 16 : 1; step <= (resume ? 30 : 25); ++step) {  // 16 to 25 are done again
      json fields = row;
      fields["step"] = step;
      (*record)->append_metric("step", fields);
    }
    EXPECT_EQ((*record)->alarms(), std::vector<std::string>{"nothing_to_learn"});
  }
  const auto events = read_json_lines(run / "events.jsonl");
  ASSERT_TRUE(events);
  ASSERT_EQ(events->size(), 1u) << "a continuing alarm was raised again";
  EXPECT_EQ(events->front().at("event"), "alarm");
  EXPECT_EQ(events->front().at("step"), 20);
  EXPECT_FALSE(events->front().at("advice").get<std::string>().empty());
}

// A leaving worker may send any bytes: the run's files stay JSON, and the learner goes on.
TEST_F(RunFilesTest, TextsThatAreNotUtf8AreStillWritten) {
  const std::filesystem::path run = folder_ / "run";
  const nlohmann::json fields = {{"worker", 3}, {"reason", "it left: \xff\xfe\xed\xa0\x80"}, {"of", 0.0 / 0.0}};
  const auto record = RunRecord::open(run, false);
  ASSERT_TRUE(record);
  (*record)->append_event("left", fields);
  (*record)->append_metric("step", fields);
  (*record)->write_status(fields);
  ASSERT_TRUE((*record)->write_report(fields));
  const auto rows = read_json_lines(run / "events.jsonl");
  ASSERT_TRUE(rows) << rows.error().message();
  EXPECT_EQ(rows->at(0).at("worker"), 3);
  for (const char* name : {"metrics.jsonl", "status.json", "report.json"})
    EXPECT_TRUE(nlohmann::json::accept(*read_file(run / name))) << name;
}

TEST_F(RunFilesTest, AFullDiskIsReported) {
  const std::filesystem::path run = folder_ / "run";
  std::filesystem::create_directories(run);
  std::filesystem::create_symlink("/dev/full", run / "events.jsonl");
  const auto record = RunRecord::open(run, false);
  ASSERT_TRUE(record);
  (*record)->append_metric("step", {{"step", 1}});
  EXPECT_TRUE((*record)->write_pending_rows());
  (*record)->append_event("joined");
  const Status written = (*record)->write_pending_rows();
  ASSERT_FALSE(written);
  EXPECT_EQ(written.error().code, Code::kExhausted);
  EXPECT_THAT(written.error().detail, HasSubstr((run / "events.jsonl").string() + ": No space left"));
}

TEST_F(RunFilesTest, DamagedMeasurementsAreNamedByLine) {
  std::ofstream(folder_ / "rows") << "{\"a\":1}\nnot json\n";
  const auto rows = read_json_lines(folder_ / "rows");
  ASSERT_FALSE(rows);
  EXPECT_NE(rows.error().detail.find("rows:2"), std::string::npos);
}

TEST_F(RunFilesTest, TheClockGoesOnAfterAKill) {
  ManualClock clock;
  {
    const auto first_process = RunClock::open(folder_, 3.6, false, clock);
    ASSERT_TRUE(first_process) << first_process.error().message();
    clock.advance(std::chrono::seconds(100));
    ASSERT_TRUE((*first_process)->save());
    std::filesystem::copy(folder_ / "usage.json", folder_ / "then.json");
    clock.advance(std::chrono::seconds(3));
    EXPECT_DOUBLE_EQ((*first_process)->wall_seconds(), 103);
  }
  std::filesystem::rename(folder_ / "then.json", folder_ / "usage.json");  // as a killed process leaves it
  {
    const auto second_process = RunClock::open(folder_, 7.2, true, clock);
    ASSERT_TRUE(second_process) << second_process.error().message();
    clock.advance(std::chrono::seconds(50));
    EXPECT_DOUBLE_EQ((*second_process)->wall_seconds(), 150);
    EXPECT_DOUBLE_EQ((*second_process)->learner_usd().value(), 0.1 + 0.1);
  }
  {
    const auto third_process = RunClock::open(folder_, std::nullopt, true, clock);  // without a price for this machine
    EXPECT_DOUBLE_EQ((*third_process)->wall_seconds(), 150);
    EXPECT_FALSE((*third_process)->learner_usd());
  }
  EXPECT_FALSE((*RunClock::open(folder_, 1.0, true, clock))->learner_usd());  // the cost until now is unknown
  EXPECT_DOUBLE_EQ((*RunClock::open(folder_, 1.0, false, clock))->wall_seconds(), 0);
  std::ofstream(folder_ / "usage.json") << "{}";
  EXPECT_EQ(RunClock::open(folder_, 1.0, true, clock).error().code, Code::kCorrupt);
}

json step_row(int step, double reward, json staleness, double wait_s, double step_s) {
  return {{"kind", "step"},         {"step", step},
          {"reward_mean", reward},  {"staleness", std::move(staleness)},
          {"wait_seconds", wait_s}, {"train_seconds", step_s - wait_s},
          {"step_seconds", step_s}};
}

TEST_F(RunFilesTest, ReportAddsUp) {
  const auto config = load_run_config("configs/quickstart.yaml");
  ASSERT_TRUE(config);
  provisioner::Plan plan;
  plan.usd_per_hour.expected = 0.25;
  ReportInput input;
  input.config = &*config;
  input.plan = &plan;
  input.end_reason = "completed";
  input.steps_done = 2;
  input.version = Version{2};
  input.digest[0] = std::byte{1};
  input.figures = run_figures(
      {{{"kind", "evaluation"}, {"when", "before"}, {"step", 0}, {"accuracy", 0.25}, {"problems", 256}},
       {{"kind", "publication"},
        {"version", 0},
        {"snapshot", true},
        {"state_bytes", 1000},
        {"patch_bytes", 700},
        {"density", 1.0}},
       step_row(1, 0.2, {{"0", 3}, {"2", 1}}, 0.5, 1.0),
       step_row(2, 9.9, {{"9", 4}}, 0.1, 1.0),  // lost in a crash and done again:
       step_row(2, 0.4, {{"1", 4}}, 0.3, 1.0),
       {{"kind", "publication"},
        {"version", 2},
        {"snapshot", false},
        {"state_bytes", 1000},
        {"patch_bytes", 100},
        {"density", 0.1}},
       {{"kind", "publication"}, {"version", 3}, {"snapshot", false}, {"patch_bytes", 100}, {"density", 0.3}},
       {{"kind", "broadcast"}, {"version", 2}, {"t_b_seconds", 1.5}, {"workers", 9}, {"acknowledged", 8}},
       {{"kind", "evaluation"}, {"when", "during"}, {"step", 1}, {"accuracy", 0.5}, {"problems", 256}},
       {{"kind", "evaluation"},
        {"when", "after"},
        {"step", 2},
        {"accuracy", 0.75},
        {"problems", 256},
        {"reward_mean", 1.5},
        {"components", {{"won_bb", 0.5}}}}});
  input.wall_seconds = 12;
  input.fleet.usd = 0.5;
  WorkerEntry worker;
  worker.id = WorkerId{1};
  worker.version = Version{2};
  worker.digest = input.digest;
  WorkerEntry lost = worker;
  lost.id = WorkerId{2};
  lost.version = Version{1};
  lost.presence = Presence::kLost;
  input.workers = {worker, lost};
  json report = make_report(input);
  EXPECT_EQ(report.at("wall_seconds"), 12.0);
  EXPECT_EQ(report.at("cost").at("usd_total"), 0.5);
  EXPECT_TRUE(report.at("cost").at("usd_learner").is_null());  // no price was stated
  EXPECT_FALSE(report.at("cost").at("prices_known"));
  EXPECT_EQ(report.at("cost").at("plan_usd_per_hour"), 0.25);
  EXPECT_TRUE(report.at("workers")[0].at("price_usd_per_hour").is_null());
  EXPECT_NE(report_text(report).find("$0.5000 and what is not stated in all"), std::string::npos);
  EXPECT_EQ(report.at("reward"), json({{"first", 0.2}, {"last", 0.4}}));
  EXPECT_EQ(report.at("eval"),
            json::parse(R"({"before": 0.25, "after": 0.75, "problems": 256, "by_step": [{"step": 0, "accuracy": 0.25},
                            {"step": 1, "accuracy": 0.5}, {"step": 2, "accuracy": 0.75, "reward_mean": 1.5,
                            "components": {"won_bb": 0.5}}]})"));
  EXPECT_EQ(report.at("staleness").at("max"), 2);
  EXPECT_DOUBLE_EQ(report.at("staleness").at("mean"), 6.0 / 8);
  EXPECT_EQ(report.at("staleness").at("p50"), 1);
  EXPECT_EQ(report.at("staleness").at("p90"), 2);
  EXPECT_EQ(report.at("broadcast").at("density_min"), 0.1);
  EXPECT_EQ(report.at("broadcast").at("density_max"), 0.3);
  EXPECT_DOUBLE_EQ(report.at("broadcast").at("density_mean"), 0.2);
  EXPECT_DOUBLE_EQ(report.at("broadcast").at("density_deviation"), 0.1);
  EXPECT_DOUBLE_EQ(report.at("learner").at("idle_fraction"), 0.4);
  EXPECT_DOUBLE_EQ(report.at("broadcast").at("compression_ratio"), 10.0);
  EXPECT_EQ(report.at("broadcast").at("acknowledged"), 8);
  EXPECT_NE(report_text(report).find("T_b 1.500 s (p95 1.500 s), of 8 of 9 workers"), std::string::npos);
  EXPECT_TRUE(report.at("weights").at("all_workers_identical"));  // the lost one does not count
  EXPECT_NE(report_text(report).find("bit-identical"), std::string::npos);

  // After an interruption, a worker that has not answered yet is counted, not accused.
  WorkerEntry behind = worker;
  behind.id = WorkerId{3};
  behind.version = Version{1};
  behind.digest[0] = std::byte{9};
  input.workers.push_back(behind);
  report = make_report(input);
  EXPECT_FALSE(report.at("weights").at("all_workers_identical"));
  EXPECT_EQ(report.at("weights").at("acknowledged"), 1);
  EXPECT_NE(report_text(report).find("1 of 2 workers acknowledged v2"), std::string::npos) << report_text(report);
  EXPECT_EQ(report_text(report).find("NOT"), std::string::npos) << report_text(report);
  input.workers.pop_back();

  input.workers[0].digest[0] = std::byte{2};
  report = make_report(input);
  EXPECT_FALSE(report.at("weights").at("all_workers_identical"));
  EXPECT_NE(report_text(report).find("NOT IDENTICAL: 1 of 1 workers acknowledged v2 with another digest (workers [1])"),
            std::string::npos)
      << report_text(report);
  input.workers.clear();
  EXPECT_FALSE(make_report(input).at("weights").at("all_workers_identical"));  // there is no worker to compare
}

// The mean share of each part, in seconds of the median T_b.
TEST_F(RunFilesTest, TheReportHasThePartsOfABroadcastsTime) {
  const auto config = load_run_config("configs/quickstart.yaml");
  ASSERT_TRUE(config);
  const provisioner::Plan plan;
  ReportInput input;
  input.config = &*config;
  input.plan = &plan;
  EXPECT_TRUE(make_report(input).at("broadcast").at("t_b_parts").is_null());
  const auto row = [](std::uint64_t version, double t_b_s, double encode_s, double send_s, double install_s) {
    return json{{"kind", "broadcast"},
                {"version", version},
                {"t_b_seconds", t_b_s},
                {"t_b_parts",
                 {{"encode", encode_s},
                  {"seal", 0.0},
                  {"send", send_s},
                  {"verify", 0.0},
                  {"install", install_s},
                  {"acknowledge", 0.0}}}};
  };
  input.figures = run_figures({row(1, 1.0, 0.1, 0.6, 0.3), row(2, 2.0, 0.2, 1.2, 0.6), row(3, 4.0, 2.0, 1.0, 1.0)});
  const json report = make_report(input);
  const json& parts = report.at("broadcast").at("t_b_parts");
  EXPECT_EQ(report.at("broadcast").at("t_b_seconds_median"), 2.0);
  double sum = 0;
  for (const auto& [part, part_seconds] : parts.items()) sum += part_seconds.get<double>();
  EXPECT_EQ(parts.size(), 6u);
  EXPECT_NEAR(sum, 2.0, 1e-12);
  EXPECT_NEAR(parts.at("encode").get<double>(), 2.0 * (0.1 + 0.1 + 0.5) / 3, 1e-12);
  EXPECT_NE(report_text(report).find("of T_b: encode 0.467, seal 0.000"), std::string::npos) << report_text(report);
}

}  // namespace
}  // namespace echoline::learner

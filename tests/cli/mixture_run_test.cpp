// A whole run of a mixture of experts: workers' experts travel to the trainer, which uses them.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "data_plane/routed_experts.hpp"
#include "replay_buffer/stored.hpp"
#include "tests/cli/program.hpp"

namespace echoline::testing {
namespace {

using nlohmann::json;
using std::chrono::seconds;

// The quickstart's task with a mixture of experts that is made in `folder`, a few short steps, and two workers.
std::vector<std::string> up(const std::filesystem::path& folder, const std::vector<std::string>& more = {}) {
  std::vector<std::string> arguments{"up", "configs/quickstart.yaml", "--json"};
  const std::vector<std::string> settings{"run.folder=" + folder.string(),
                                          "run.steps=3",
                                          "model.path=" + (folder / "moe").string(),
                                          "model.preset=null",
                                          "task.options.evaluation_problems=200",
                                          "learner.learning_rate=1e-3",
                                          "learner.warm_start.steps_max=60",
                                          "learner.warm_start.batch=32",
                                          "rollout.prompts_per_step=16",
                                          "fleet.workers_max=2"};
  for (const auto& list : {settings, more})
    for (const std::string& setting : list) arguments.insert(arguments.end(), {"--set", setting});
  return arguments;
}

struct StoredExperts {
  std::size_t trajectories = 0, with_experts = 0, bytes = 0, values = 0;
};

StoredExperts stored_experts(const std::filesystem::path& run, const std::filesystem::path& scratch) {
  StoredExperts found;
  const auto stored = replay_buffer::StoredBuffer::open(run / "replay.sqlite", scratch);
  EXPECT_TRUE(stored) << stored.error().message();
  const auto read = (*stored)->each(0, [&](const replay_buffer::StoredTrajectory& row) -> Status {
    const data_plane::Trajectory& trajectory = row.trajectory;
    ++found.trajectories;
    if (trajectory.routed_experts().empty()) return ok();
    const auto tokens = static_cast<std::size_t>(trajectory.prompt_tokens_size() + trajectory.response_tokens_size());
    ECHO_ASSIGN(const auto experts, data_plane::unpack_experts(trajectory.routed_experts(), tokens));
    EXPECT_EQ(experts.layers, 3u);
    EXPECT_EQ(experts.per_token, 2u);
    const auto last = experts.values.end() - 6;
    EXPECT_TRUE(std::all_of(experts.values.begin(), last, [](std::int16_t e) { return e >= 0 && e < 8; }));
    EXPECT_TRUE(std::all_of(last, experts.values.end(), [](std::int16_t e) { return e == -1; }));
    ++found.with_experts;
    found.bytes += trajectory.routed_experts().size();
    found.values += experts.values.size();
    return ok();
  });
  EXPECT_TRUE(read && *read == 0u);
  return found;
}

TEST(MixtureRun, TrainsWithTheExpertsOfItsWorkers) {
  const TemporaryFolder folder;
  const auto made =
      run_program({"model", "init", "--preset", "tiny-moe", "--seed", "3", "-o", (folder.path() / "moe").string()});
  ASSERT_EQ(made.status, 0) << made.err;
  const auto shown = run_program({"model", "info", (folder.path() / "moe").string(), "--json"});
  ASSERT_EQ(shown.status, 0) << shown.err;
  EXPECT_LT(json::parse(shown.out).at("active_parameters"), json::parse(shown.out).at("parameters"));

  const Outcome outcome = Program(up(folder.path())).wait(seconds(120));
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  const std::filesystem::path run = folder.path() / "quickstart";
  EXPECT_TRUE(json_file(run / "report.json").at("weights").at("all_workers_identical").get<bool>());
  const StoredExperts stored = stored_experts(run, folder.path());
  EXPECT_GT(stored.trajectories, 0u);
  EXPECT_EQ(stored.with_experts, stored.trajectories);
  EXPECT_LT(stored.bytes, 2 * stored.values);
  std::size_t steps = 0;
  for (const json& row : json_lines(run / "metrics.jsonl")) steps += row.value("kind", "") == "step" ? 1 : 0;
  EXPECT_EQ(steps, 3u);
  // The model of the run is again a mixture, and generates.
  EXPECT_EQ(json_file(run / "model" / "config.json").at("model_type"), "qwen3_moe");
  const auto generated =
      run_program({"model", "generate", (run / "model").string(), "--prompt", "12+34=", "--max-tokens", "4"});
  EXPECT_EQ(generated.status, 0) << generated.err;

  const Outcome without =
      Program(up(folder.path(), {"run.name=fresh", "run.steps=1", "learner.router_replay=false"})).wait(seconds(120));
  ASSERT_EQ(without.status, 0) << without.err;
  const StoredExperts none = stored_experts(folder.path() / "fresh", folder.path());
  EXPECT_GT(none.trajectories, 0u);
  EXPECT_EQ(none.with_experts, 0u);
}

TEST(MixtureRun, AnAdapterOfItsExpertsIsRefused) {
  const TemporaryFolder folder;
  ASSERT_EQ(run_program({"model", "init", "--preset", "tiny-moe", "-o", (folder.path() / "moe").string()}).status, 0);
  const Outcome refused = Program(up(folder.path(), {"learner.adapter.rank=4"})).wait(seconds(60));
  EXPECT_EQ(refused.status, 2);
  EXPECT_THAT(refused.err, ::testing::HasSubstr("is an adapter of an expert, which is not implemented"));
}

}  // namespace
}  // namespace echoline::testing

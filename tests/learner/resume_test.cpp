// A resumed run: the settings it keeps, the new ones, and the checks before anything changes.
#include "learner/resume.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "base/config_flat.hpp"
#include "base/files.hpp"
#include "delta/checkpoint.hpp"
#include "delta/digest.hpp"
#include "learner/checkpoint_folder.hpp"
#include "learner/preflight.hpp"
#include "model/policy.hpp"
#include "tests/learner/rows.hpp"

namespace echoline::learner {
namespace {

using ::testing::HasSubstr;

class ResumeTest : public ::testing::Test {
 protected:
  ResumeTest() {
    std::string name = (std::filesystem::temp_directory_path() / "echoline-run-XXXXXX").string();
    folder_ = ::mkdtemp(name.data());
  }
  ~ResumeTest() override { std::filesystem::remove_all(folder_); }
  RunConfig config(std::vector<std::pair<std::string, std::string>> overrides) const {
    overrides.emplace_back("run.folder", folder_.string());
    auto loaded = load_run_config("configs/quickstart.yaml", overrides);
    EXPECT_TRUE(loaded) << loaded.error().message();
    return std::move(loaded).value();
  }
  std::filesystem::path folder_;
};

// All checkpoints of a run with an adapter have one file of the base, which outlives the first of them.
TEST_F(ResumeTest, TheBaseOfAnAdapterIsStoredOnce) {
  model::ModelFiles files = *model::ModelFiles::of_preset("tiny-64");
  files.config.adapter = model::AdapterConfig{.rank = 2, .alpha = 4, .targets = {"q_proj"}, .base_model = {}};
  const auto add = [&](std::int64_t step, std::uint64_t seed_of_base) {
    const auto policy = model::init_policy(files.config, seed_of_base);
    EXPECT_TRUE(policy);
    const auto write = [&](const std::filesystem::path& target) -> Status {
      ECHO_ASSIGN(nlohmann::json state, write_policy(target, folder_, files, policy->view()));
      state.update({{"format", kCheckpointFormat}, {"steps", step}});
      return write_file_atomic(target / kCheckpointState, state.dump());
    };
    const auto added = add_checkpoint(folder_, step, 2, write);
    EXPECT_TRUE(added) << added.error().message();
    const auto stored = delta::Checkpoint::open(*added / kCheckpointModel);
    EXPECT_TRUE(stored && find_policy(folder_)->digest == delta::digest_state(stored->view())->hex());
    return *added / kCheckpointModel / "model.safetensors";
  };
  const std::filesystem::path first = add(1, 7), second = add(2, 7);
  EXPECT_TRUE(std::filesystem::equivalent(first, second));
  EXPECT_FALSE(std::filesystem::equivalent(second.parent_path() / "adapter_model.safetensors",
                                           first.parent_path() / "adapter_model.safetensors"));
  EXPECT_EQ(std::filesystem::hard_link_count(second), 2u);
  const std::filesystem::path third = add(3, 7);  // the first is removed
  EXPECT_FALSE(std::filesystem::exists(first));
  EXPECT_EQ(std::filesystem::hard_link_count(third), 2u);
  EXPECT_FALSE(std::filesystem::equivalent(third, add(4, 8))) << "another base";
}

TEST_F(ResumeTest, AResumeListsChangedSettings) {
  const RunConfig first = config({});
  std::filesystem::create_directories(first.run_folder());
  EXPECT_TRUE(changed_settings(first)->empty()) << "there is no config.yaml";
  std::ofstream(first.run_folder() / "config.yaml") << first.resolved_yaml;
  EXPECT_TRUE(changed_settings(first)->empty());
  const RunConfig other = config({{"learner.learning_rate", "0.5"}, {"fleet.usd_max", "7"}});
  const auto changes = *changed_settings(other);
  ASSERT_EQ(changes.size(), 2u);
  EXPECT_EQ(changes[0].key, "fleet.usd_max");
  EXPECT_EQ(changes[0].now, "7");
  EXPECT_EQ(changes[1].key, "learner.learning_rate");
  EXPECT_EQ(changes[1].now, "0.5");
  EXPECT_NE(changes[1].before, std::nullopt);
  const auto record = RunRecord::open(first.run_folder(), false);
  ASSERT_TRUE(record_changed_settings(**record, other, 12));
  const auto rows = *read_json_lines(first.run_folder() / "events.jsonl");
  ASSERT_EQ(rows.size(), 2u);
  EXPECT_EQ(rows[1].at("event"), "setting_changed");
  EXPECT_EQ(rows[1].at("key"), "learner.learning_rate");
  EXPECT_EQ(rows[1].at("old"), *changes[1].before);
  EXPECT_EQ(rows[1].at("new"), "0.5");
  EXPECT_EQ(rows[1].at("step"), 12);
}

TEST_F(ResumeTest, TheResumeMarksGroupsTheReplayBufferCouldNotMark) {
  std::vector<GroupId> marked;
  const auto consume = [&](std::uint64_t step, const replay_buffer::Batch& batch) -> Status {
    EXPECT_EQ(step, 4u);
    marked = batch.ids();
    return ok();
  };
  mark_consumed(folder_, 5, consume);
  EXPECT_TRUE(marked.empty());
  ASSERT_TRUE(store_unmarked_batch(folder_, 4, {GroupId{7}, GroupId{9}}));
  mark_consumed(folder_, 4, consume);  // from an older checkpoint the step is done again
  EXPECT_TRUE(marked.empty());
  ASSERT_TRUE(store_unmarked_batch(folder_, 4, {GroupId{7}, GroupId{9}}));
  mark_consumed(folder_, 5, consume);
  EXPECT_EQ(marked, (std::vector{GroupId{7}, GroupId{9}}));
  EXPECT_FALSE(std::filesystem::exists(folder_ / "consumed.json"));
}

TEST_F(ResumeTest, FixedSettingsAreCheckedBeforeAnythingChanges) {
  const BuiltIn built_in{
      .load = [](const SourceHost&, bool) { return Result<std::unique_ptr<PolicySource>>(nullptr); },
      .can_compute_on = [](const std::string&) { return ok(); },
      .settings_digest = [](const RunConfig& run_config,
                            const model::ModelConfig&) { return std::to_string(run_config.run.seed); }};
  const auto refusal = [&](std::vector<std::pair<std::string, std::string>> overrides) {
    const Preflight checked =
        preflight(config(std::move(overrides)), {.built_in = built_in, .plan = {}, .resume = true});
    for (const Check& check : checked.checks)
      if (check.name == "resume") return check.verdict == Verdict::kFailed ? check.detail : std::string();
    return std::string("nothing was checked");
  };
  const std::filesystem::path run = config({}).run_folder();
  EXPECT_THAT(refusal({}), HasSubstr("holds no run"));
  std::filesystem::create_directories(run / "checkpoints/step-000000004/model");
  std::ofstream(run / "metrics.jsonl") << "";
  std::ofstream(run / "config.yaml") << config({}).resolved_yaml;
  std::filesystem::rename(run / "checkpoints", run / "kept");
  EXPECT_THAT(refusal({}), HasSubstr("holds no checkpoint"));
  std::filesystem::rename(run / "kept", run / "checkpoints");
  std::ofstream(run / "checkpoints/step-000000004/trainer.json") << nlohmann::json{
      {"format", 2}, {"steps", 4}, {"policy_digest", "d"}, {"config_digest", std::to_string(config({}).run.seed)}};
  EXPECT_EQ(refusal({}), "");
  EXPECT_EQ(refusal({{"learner.learning_rate", "0.5"}}), "");
  EXPECT_THAT(refusal({{"run.seed", "77"}}), HasSubstr("run.seed was 7 and is 77"));
  EXPECT_THAT(refusal({{"rollout.group_size", "4"}}), HasSubstr("rollout.group_size was 8 and is 4"));
  EXPECT_THAT(refusal({{"learner.kl_coefficient", "0.1"}}), HasSubstr("reference.safetensors"));
}

TEST(FlatConfig, NamesEveryValueByItsKeys) {
  const auto flat =
      flat_config("a: {b: 1, c: [1, two]}\nlist:\n  - {x: y}\n  - {x: 'z: w'}\nnothing: null\nnone: {}\n");
  ASSERT_TRUE(flat) << flat.error().message();
  const std::map<std::string, std::string> expected{{"a.b", "1"},          {"a.c", "[1,\"two\"]"}, {"list[0].x", "y"},
                                                    {"list[1].x", "z: w"}, {"nothing", "null"},    {"none", "{}"}};
  EXPECT_EQ(*flat, expected);
  EXPECT_FALSE(flat_config("a: [1"));
}

}  // namespace
}  // namespace echoline::learner

// The policy of a run on a real task: word problems, a warm start, evaluations, checkpoints, a resume.
#include "learner/training/policy_to_train.hpp"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "base/files.hpp"
#include "delta/digest.hpp"
#include "delta/safetensors.hpp"
#include "model/weights.hpp"
#include "tests/learner/rows.hpp"

namespace echoline::learner {
namespace {

namespace fs = std::filesystem;

class PolicyToTrainTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
    folder_ = fs::path(::testing::TempDir()) / fmt::format("echoline-policy-{}-{}", test->name(), ::getpid());
    fs::remove_all(folder_);
    fs::create_directories(folder_);
    // Prompts that the alphabet of the tiny presets does not have.
    std::ofstream train(folder_ / "train.jsonl"), held_out(folder_ / "test.jsonl");
    for (int i = 0; i < 8; ++i)
      (i < 5 ? train : held_out)
          << fmt::format(R"({{"question": "Zoë\u2019s hens lay {} eggs at £1. How much?", "answer": "£{}.\n#### {}"}})",
                         i, i, i)
          << "\n";
    config_.run.name = "words";
    config_.run.folder = folder_;
    config_.run.steps = 3;
    config_.model.preset = "bytes-64";
    config_.task.adapter = "gsm8k";
    config_.task.options_json =
        fmt::format(R"({{"train": "{0}/train.jsonl", "test": "{0}/test.jsonl"}})", folder_.string());
    config_.prompts.text = "{prompt}\n";
    config_.rollout.response_tokens_max = 12;
    config_.evaluation.every = 1;
    config_.evaluation.problems = 2;
    config_.learner.loss.kl_coefficient = 0.1;
    config_.learner.warm_start.enabled = true;
    config_.learner.warm_start.steps_max = 1;
    config_.learner.warm_start.batch = 3;
  }
  void TearDown() override { fs::remove_all(folder_); }

  Result<std::unique_ptr<PolicyToTrain>> load(bool resume) {
    record_.reset();
    auto record = RunRecord::open(config_.run_folder(), resume);
    if (!record) return record.error();
    record_ = std::move(*record);
    auto task = RunTask::read(config_);
    if (!task) return task.error();
    task_.emplace(std::move(*task));
    const SourceHost host{.config = config_,
                          .task = *task_,
                          .record = *record_,
                          .report_phase = [](const std::string&) {},
                          .while_waiting = [] { return ok(); },
                          .stop = stop_};
    return PolicyToTrain::load(host, resume);
  }

  static std::vector<schema::Trajectory> batch_of_two() {
    std::vector<schema::Trajectory> batch;
    for (std::uint32_t member = 0; member < 2; ++member) {
      schema::Trajectory trajectory;
      trajectory.set_group(1);
      trajectory.set_reward(member);
      for (const std::uint32_t token : {65u, 66u}) trajectory.add_prompt_tokens(token);
      for (const std::uint32_t token : {67u + member, 68u}) trajectory.add_response_tokens(token);
      for (int i = 0; i < 2; ++i) trajectory.add_logprobs(-5.0f);
      batch.push_back(std::move(trajectory));
    }
    return batch;
  }

  static Status train_step(PolicyToTrain& policy) {
    ECHO_TRY(policy.step(batch_of_two()));
    return policy.on_step_end();
  }

  std::vector<nlohmann::json> rows(std::string_view file, std::string_view key, std::string_view kind) const {
    std::vector<nlohmann::json> matching_rows;
    for (auto& row : read_json_lines(config_.run_folder() / file).value())
      if (row.value(std::string(key), "") == kind) matching_rows.push_back(row);
    return matching_rows;
  }
  std::vector<std::string> checkpoints() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(config_.run_folder() / "checkpoints"))
      if (entry.path().filename().string().starts_with("step-")) names.push_back(entry.path().filename().string());
    std::sort(names.begin(), names.end());
    return names;
  }
  static std::string digest_of(const fs::path& safetensors) {
    return delta::digest_state(delta::SafetensorsFile::open(safetensors).value().view()).value().hex();
  }

  fs::path folder_;
  RunConfig config_;
  std::unique_ptr<RunRecord> record_;
  std::optional<RunTask> task_;
  std::atomic<bool> stop_ = false;
};

TEST_F(PolicyToTrainTest, WordProblemsOnAPresetFromTheWarmStartToAResume) {
  auto policy = load(false);
  ASSERT_TRUE(policy) << policy.error().message();
  const Status begun = (*policy)->begin();
  ASSERT_TRUE(begun) << begun.error().message();
  const fs::path run = config_.run_folder();
  const std::string first_digest = digest_of(run / "model/model.safetensors");
  EXPECT_EQ(digest_of(run / "checkpoints/reference.safetensors"), first_digest);
  for (int i = 0; i < 3; ++i) {
    const Status stepped = train_step(**policy);
    ASSERT_TRUE(stepped) << stepped.error().message();
  }
  ASSERT_TRUE((*policy)->checkpoint());
  ASSERT_TRUE((*policy)->checkpoint());  // as a run does that ends where a checkpoint was due
  EXPECT_EQ(checkpoints(), (std::vector<std::string>{"step-000000000", "step-000000003"}));

  // The exported model is on disk once and equals the trained one.
  const auto exported = model::load_model(run / "model");
  ASSERT_TRUE(exported) << exported.error().message();
  EXPECT_EQ(model::export_policy(*exported->transformer)->digest(),
            *delta::digest_state((*policy)->policy(Version{3}).value()->view()));
  EXPECT_EQ(fs::hard_link_count(run / "model/model.safetensors"), 2u);
  EXPECT_NE(digest_of(run / "model/model.safetensors"), first_digest);

  // Evaluations come before the run, and after every step but the last, which "after" covers, with the requested number
  // of problems.
  const auto evaluations = rows("metrics.jsonl", "kind", "evaluation");
  ASSERT_EQ(evaluations.size(), 3u);
  EXPECT_EQ(evaluations[0].at("when"), "before");
  EXPECT_EQ(evaluations[2].at("when"), "during");
  EXPECT_EQ(evaluations[2].at("step"), 2);
  EXPECT_EQ(evaluations[2].at("problems"), 2);

  // A worker receives all tokens that end a text, and the form of prompts.
  schema::RunSpec spec;
  task_->describe(config_, spec);
  ASSERT_EQ(spec.eos_size(), 1);
  EXPECT_EQ(spec.eos(0), 256u);
  EXPECT_NE(spec.prompt_json().find("{prompt}\\n"), std::string::npos);

  // The resume reads and verifies the stored reference, instead of making it again from the present model. The first
  // step after it has the same distance from the reference as the same step without a resume.
  const double reference_kl = (*policy)->step(batch_of_two()).value()->figures.at("reference_kl");
  EXPECT_GT(reference_kl, 0);
  policy = load(true);
  ASSERT_TRUE(policy) << policy.error().message();
  EXPECT_EQ((*policy)->step(batch_of_two()).value()->figures.at("reference_kl"), reference_kl);
  policy = load(true);
  ASSERT_TRUE(policy) << policy.error().message();
  EXPECT_EQ((*policy)->steps(), 3u);
  EXPECT_EQ(digest_of(run / "checkpoints/reference.safetensors"), first_digest);
  ASSERT_TRUE((*policy)->checkpoint());
  EXPECT_EQ(checkpoints().size(), 2u) << "a resumed run wrote its first checkpoint again";
  fs::remove(run / "checkpoints/reference.safetensors");
  const auto refused = load(true);
  ASSERT_FALSE(refused);
  EXPECT_NE(refused.error().message().find("reference.safetensors"), std::string::npos) << refused.error().message();
}

// Only the adapter changes, after a warm start of the whole model; workers, checkpoints and a resume have both parts.
TEST_F(PolicyToTrainTest, AnAdapterIsTrainedInPlaceOfTheModel) {
  config_.learner.adapter = {.rank = 4, .alpha = 8, .targets = {"q_proj", "up_proj"}, .base_model = {}};
  config_.learner.optimizer.learning_rate = 0.01;
  auto policy = load(false);
  ASSERT_TRUE(policy) << policy.error().message();
  const Status begun = (*policy)->begin();
  ASSERT_TRUE(begun) << begun.error().message();
  const delta::SharedState first = (*policy)->policy(Version{0}).value();
  for (int i = 0; i < 2; ++i) ASSERT_TRUE(train_step(**policy));
  const delta::SharedState second = (*policy)->policy(Version{2}).value();
  const delta::StateView before = first->view(), after = second->view();
  ASSERT_TRUE(delta::check_same_tensors(before, after));
  std::size_t adapter_tensors = 0, changed = 0;
  for (std::size_t i = 0; i < before.size(); ++i) {
    const bool is_equal = std::ranges::equal(before[i].bytes, after[i].bytes);
    if (!model::is_adapter_tensor(before[i].name)) {
      EXPECT_TRUE(is_equal) << before[i].name;
      EXPECT_EQ(before[i].bytes.data(), after[i].bytes.data()) << before[i].name << " is in memory twice";
      continue;
    }
    ++adapter_tensors;
    changed += is_equal ? 0 : 1;
  }
  EXPECT_EQ(std::ssize(before) - std::ssize(model::policy_layout(*model::preset("bytes-64")).value()),
            static_cast<std::ptrdiff_t>(adapter_tensors));
  EXPECT_GT(changed, adapter_tensors / 2);

  // The warm start has changed the base, so that it is not the preset's.
  const auto fresh = model::init_policy(*model::preset("bytes-64"), config_.run.seed);
  EXPECT_FALSE(
      std::ranges::equal(fresh->view().front().bytes, before[static_cast<std::size_t>(adapter_tensors)].bytes));

  schema::RunSpec spec;
  task_->describe(config_, spec);
  const auto sent = model::AdapterConfig::from_json(spec.policy_adapter_json());
  ASSERT_TRUE(sent) << sent.error().message();
  EXPECT_TRUE(sent->computes_as(config_.learner.adapter));
  EXPECT_EQ(sent->base_model, "");  // a folder of the learner's machine

  ASSERT_TRUE((*policy)->checkpoint());
  const fs::path model_folder = config_.run_folder() / "model";
  const auto stored = model::load_model(model_folder);
  ASSERT_TRUE(stored) << stored.error().message();
  const delta::Digest digest = *delta::digest_state(after);
  EXPECT_EQ(model::export_policy(*stored->transformer)->digest(), digest);
  EXPECT_EQ(stored->files.config.adapter->base_model, model_folder.string());

  const double loss = (*policy)->step(batch_of_two()).value()->figures.at("loss");
  policy = load(true);
  ASSERT_TRUE(policy) << policy.error().message();
  EXPECT_EQ((*policy)->steps(), 2u);
  EXPECT_EQ(*delta::digest_state((*policy)->policy(Version{2}).value()->view()), digest);
  EXPECT_EQ((*policy)->step(batch_of_two()).value()->figures.at("loss"), loss);

  config_.learner.adapter.rank = 5;
  const auto other = load(true);
  ASSERT_FALSE(other);
  EXPECT_NE(other.error().message().find("expected [5, 64]"), std::string::npos) << other.error().message();
}

// A run may go on from a model with an adapter, if it has the same one.
TEST_F(PolicyToTrainTest, AModelWithAnAdapterNeedsTheSameInTheRunFile) {
  model::ModelFiles files = *model::ModelFiles::of_preset("bytes-64");
  files.config.adapter = model::AdapterConfig{.rank = 2, .alpha = 4, .targets = {"q_proj"}, .base_model = {}};
  const auto stored = model::init_policy(files.config, 9);
  ASSERT_TRUE(model::save_model(folder_ / "adapted", files, stored->view()));
  config_.learner.warm_start.enabled = false;
  config_.model.preset.reset();
  config_.model.path = folder_ / "adapted";
  auto refused = load(false);
  ASSERT_FALSE(refused);
  EXPECT_NE(refused.error().message().find("has an adapter of rank 2"), std::string::npos) << refused.error().message();
  fs::remove_all(config_.run_folder());
  config_.learner.adapter = *files.config.adapter;
  config_.learner.adapter.rank = 3;
  refused = load(false);
  ASSERT_FALSE(refused);
  EXPECT_NE(refused.error().message().find("the two must be equal"), std::string::npos) << refused.error().message();
  fs::remove_all(config_.run_folder());
  config_.learner.adapter = *files.config.adapter;
  auto policy = load(false);
  ASSERT_TRUE(policy) << policy.error().message();
  ASSERT_TRUE((*policy)->begin());
  EXPECT_EQ(*delta::digest_state((*policy)->policy(Version{0}).value()->view()), *delta::digest_state(stored->view()));
}

TEST_F(PolicyToTrainTest, WeightsThatDivergedAreNotPublished) {
  config_.learner.warm_start.enabled = false;
  config_.learner.loss.kl_coefficient = 0;
  config_.learner.optimizer.beta1 = 0;  // each weight moves by the learning rate at once
  config_.learner.optimizer.weight_decay = 0;
  config_.learner.optimizer.learning_rate = 3.4e38;  // more than bf16 holds
  auto policy = load(false);
  ASSERT_TRUE(policy) << policy.error().message();
  ASSERT_TRUE((*policy)->begin());
  ASSERT_TRUE((*policy)->policy(Version{0}));
  const auto stepped = (*policy)->step(batch_of_two());
  ASSERT_TRUE(stepped) << stepped.error().message();
  const auto diverged = (*policy)->policy(Version{1});
  ASSERT_FALSE(diverged);
  EXPECT_EQ(diverged.error().code, Code::kCorrupt);
  EXPECT_NE(diverged.error().message().find("version 1 is not published, because check policy: tensor '"),
            std::string::npos)
      << diverged.error().message();
  const Status stored = (*policy)->checkpoint();
  ASSERT_FALSE(stored) << "a resumed run would begin with them";
  EXPECT_EQ(stored.error().code, Code::kCorrupt);
  EXPECT_NE(stored.error().message().find("step 1 is not kept, because check policy: tensor '"), std::string::npos)
      << stored.error().message();
  EXPECT_EQ(checkpoints(), (std::vector<std::string>{"step-000000000"}));
}

TEST_F(PolicyToTrainTest, ADamagedCheckpointIsAnEvent) {
  config_.learner.warm_start.enabled = false;
  auto policy = load(false);
  ASSERT_TRUE(policy) << policy.error().message();
  ASSERT_TRUE((*policy)->begin());
  ASSERT_TRUE(train_step(**policy));
  ASSERT_TRUE((*policy)->checkpoint());
  fs::resize_file(config_.run_folder() / "checkpoints/step-000000001/trainer.safetensors", 100);
  policy = load(true);
  ASSERT_TRUE(policy) << policy.error().message();
  EXPECT_EQ((*policy)->steps(), 0u);
  const auto events = rows("events.jsonl", "event", "checkpoint_damaged");
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].at("checkpoint"), "step-000000001");
}

TEST_F(PolicyToTrainTest, NothingToResumeNamesTheRunsThatWereMovedAside) {
  const fs::path run = config_.run_folder();
  const auto resume_error = [&] {
    const auto policy = load(true);
    EXPECT_FALSE(policy);
    return policy ? std::string() : policy.error().message();
  };
  EXPECT_EQ(resume_error().find("step"), std::string::npos);
  for (const auto& [suffix, step] : {std::pair(".1", "step-000000007\n"), std::pair(".2", "step-000000040\n")}) {
    fs::path aside = run;
    aside += suffix;
    fs::create_directories(aside / "checkpoints");
    ASSERT_TRUE(write_file_atomic(aside / "checkpoints/LATEST", step));
  }
  const std::string expected = fmt::format("{0}.2 (step 40), {0}.1 (step 7)", run.string());
  std::string error_text = resume_error();  // there is no such run
  EXPECT_NE(error_text.find(expected), std::string::npos) << error_text;
  ASSERT_TRUE(load(false));  // it began, but ended before its first checkpoint
  error_text = resume_error();
  EXPECT_NE(error_text.find(expected), std::string::npos) << error_text;
}

}  // namespace
}  // namespace echoline::learner

// A worker's work without a network: what fails, fails alone, and memory that does not suffice halves the batch.
#include "worker/production.hpp"

#include <gtest/gtest.h>

#include <set>
#include <stdexcept>

#include "data_plane/trajectory.hpp"

namespace echoline::worker {
namespace {

constexpr std::uint32_t kGroup = 4;

class Broken final : public data_plane::Adapter {
 public:
  explicit Broken(std::unique_ptr<data_plane::Adapter> sound) : sound_(std::move(sound)) {}
  std::string_view name() const override { return "broken"; }
  Result<schema::Problem> problem(std::uint64_t index) const override { return sound_->problem(index); }
  std::vector<schema::Problem> evaluation() const override { return {}; }
  data_plane::Score score(const schema::Problem& problem, std::string_view response) const override {
    if (problem.id() == "unscorable") throw std::runtime_error("no verdict");
    return sound_->score(problem, response);
  }
  std::optional<std::string> demonstration(const schema::Problem&) const override { return std::nullopt; }

 private:
  std::unique_ptr<data_plane::Adapter> sound_;
};

class ProductionTest : public ::testing::Test {
 protected:
  ProductionTest() {
    schema::RunSpec spec;
    spec.set_seed(5);
    spec.set_model_config_json(model::preset("tiny-64")->to_json());
    spec.set_tokenizer_json(model::Tokenizer::characters(model::kCharacterAlphabet)->to_json());
    spec.add_eos(static_cast<std::uint32_t>(*model::Tokenizer::characters(model::kCharacterAlphabet)->end_of_text()));
    spec.set_prompt_json(R"({"text": "{prompt}"})");
    spec.set_adapter_name("arithmetic");
    spec.set_temperature(1);
    spec.set_top_p(1);
    spec.set_response_tokens_max(3);
    task_ = *make_task(std::move(spec));
    task_.model = *model::init(*model::preset("tiny-64"), 5);  // in place of a policy from the learner
    task_.adapter = std::make_unique<Broken>(std::move(task_.adapter));
  }

  static schema::Lease lease(std::uint64_t id, const std::string& prompt, const std::string& problem = "p") {
    schema::Lease lease;
    lease.set_id(id);
    lease.set_group(id);
    lease.set_rollouts(kGroup);
    lease.set_policy_digest("d");
    lease.mutable_problem()->set_id(problem);
    lease.mutable_problem()->set_prompt(prompt);
    lease.mutable_problem()->set_reference("7");
    return lease;
  }

  // The model, where no more than `fit_` prompt tokens fit at once and no prompt may hold `poison_`.
  Producer::Generate generate() {
    return [this](const auto& prompts, const auto& options, const auto& interrupted)
               -> Result<std::vector<model::Generation>> {
      sizes_.push_back(prompts.size());
      seeds_.insert(options.seed);
      std::size_t tokens = 0;
      for (const auto& prompt : prompts) {
        tokens += prompt.size();
        if (std::find(prompt.begin(), prompt.end(), poison_) != prompt.end())
          return fail(Code::kCorrupt, "generate", "the logits are not finite");
      }
      if (tokens > fit_) return fail(Code::kExhausted, "generate", "{} tokens", tokens);
      return model::generate(*task_.model, prompts, options, interrupted);
    };
  }

  Produced produce(Producer& producer, const std::vector<schema::Lease>& leases) {
    sizes_.clear();
    return producer.produce(leases, WorkerId{9}, [] { return false; });
  }

  static std::set<std::uint64_t> ids(const std::vector<schema::Submission>& submissions) {
    std::set<std::uint64_t> ids;
    for (const auto& submission : submissions) {
      ids.insert(submission.lease());
      EXPECT_EQ(submission.trajectories_size(), static_cast<int>(kGroup));
      std::uint32_t member = 0;
      for (const auto& t : submission.trajectories()) {
        EXPECT_TRUE(data_plane::check(t)) << data_plane::check(t).error().message();
        EXPECT_EQ(t.member(), member++);
      }
    }
    return ids;
  }
  static std::map<std::uint64_t, schema::WorkFailure> kinds(const std::vector<schema::WorkFailed>& failures) {
    std::map<std::uint64_t, schema::WorkFailure> kinds;
    for (const auto& failed : failures) kinds[failed.lease()] = failed.failure();
    return kinds;
  }
  using Ids = std::set<std::uint64_t>;
  using Kinds = std::map<std::uint64_t, schema::WorkFailure>;

  Task task_;
  std::size_t fit_ = 1'000'000;
  model::Token poison_ = -1;
  std::vector<std::size_t> sizes_;
  std::set<std::uint64_t> seeds_;
};

TEST_F(ProductionTest, OneBadGroupDoesNotTakeTheOthersWithIt) {
  poison_ = *task_.phrasing->tokenizer().id("!");
  Producer producer(task_, generate());
  const Produced produced = produce(
      producer, {lease(1, "1+2="), lease(2, "\xc3\xa9"), lease(3, "bad!"), lease(4, "3+4=", "unscorable"), lease(5, "5"),
                 lease(6, std::string(task_.model->config().positions_max + 1, '1'))});
  EXPECT_EQ(ids(produced.submissions), (Ids{1, 5}));
  EXPECT_EQ(kinds(produced.failures), (Kinds{{2, schema::WORK_FAILURE_PROMPT},
                                             {3, schema::WORK_FAILURE_GENERATION},
                                             {4, schema::WORK_FAILURE_SCORING},
                                             {6, schema::WORK_FAILURE_PROMPT}}));
  EXPECT_EQ(produced.rollouts, 2u * kGroup);
  EXPECT_FALSE(produced.interrupted);
}

TEST_F(ProductionTest, MemoryThatDoesNotSufficeHalvesTheBatchAndIsRemembered) {
  Producer producer(task_, generate());
  const std::vector<schema::Lease> four = {lease(1, "11"), lease(2, "22"), lease(3, "33"), lease(4, "44")};
  EXPECT_EQ(produce(producer, four).submissions.size(), 4u);
  EXPECT_EQ(sizes_, (std::vector<std::size_t>{16}));
  EXPECT_FALSE(producer.rows_max());
  fit_ = 2 * 5;  // rollouts of two tokens each
  EXPECT_EQ(ids(produce(producer, four).submissions), (Ids{1, 2, 3, 4}));
  EXPECT_EQ(sizes_, (std::vector<std::size_t>{16, 8, 4, 4, 4, 4}));
  EXPECT_EQ(ids(produce(producer, four).submissions), (Ids{1, 2, 3, 4}));
  EXPECT_EQ(sizes_, (std::vector<std::size_t>{4, 4, 4, 4}));
  fit_ = 2;  // one rollout at a time
  EXPECT_EQ(ids(produce(producer, {four[0]}).submissions), (Ids{1}));
  EXPECT_EQ(sizes_, (std::vector<std::size_t>{4, 2, 1, 1, 1, 1}));
  EXPECT_EQ(producer.rows_max(), 1u);
  fit_ = 1'000'000;  // and then there is memory again
  for (int i = 0; i < 20; ++i) produce(producer, four);
  EXPECT_GE(producer.rows_max(), 4u);
}

// Rollouts of a group that are generated apart must not be the same ones.
TEST_F(ProductionTest, PartsOfAGroupHaveSeedsOfTheirOwn) {
  fit_ = 2;
  Producer producer(task_, generate());
  produce(producer, {lease(1, "11")});
  seeds_.clear();
  produce(producer, {lease(2, "11"), lease(3, "11")});
  EXPECT_EQ(seeds_.size(), 2u * kGroup);
}

TEST_F(ProductionTest, AGroupThatIsTooLargeAloneFailsAloneAndDoesNotSlowTheRest) {
  fit_ = 40;
  Producer producer(task_, generate());
  const std::vector<schema::Lease> leases = {lease(1, "11"), lease(2, std::string(41, '2')), lease(3, "33")};
  const Produced produced = produce(producer, leases);
  EXPECT_EQ(ids(produced.submissions), (Ids{1, 3}));
  EXPECT_EQ(kinds(produced.failures), (Kinds{{2, schema::WORK_FAILURE_MEMORY}}));
  EXPECT_FALSE(producer.rows_max());
}

TEST_F(ProductionTest, NothingIsHandedInOfAnInterruptedBatch) {
  Producer producer(task_);
  int ticks = 0;
  const Produced produced = producer.produce({lease(1, "1+2=")}, WorkerId{9}, [&] { return ++ticks == 2; });
  EXPECT_TRUE(produced.interrupted);
  EXPECT_TRUE(produced.submissions.empty());
  EXPECT_TRUE(produced.failures.empty());
}

}  // namespace
}  // namespace echoline::worker

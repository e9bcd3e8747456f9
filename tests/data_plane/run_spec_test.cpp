#include "data_plane/run_spec.hpp"

#include <gtest/gtest.h>

namespace echoline::data_plane {
namespace {

TEST(RunSpec, IsPackedInOnePieceAndCheckedWhenUnpacked) {
  schema::RunSpec spec;
  spec.set_run("r");
  std::string tokenizer;
  for (int i = 0; i < 300'000; ++i) tokenizer += "\"token " + std::to_string(i) + "\",";
  spec.set_tokenizer_json(tokenizer);
  const auto packed = pack_run_spec(spec);
  ASSERT_TRUE(packed.has_value()) << packed.error().message();
  EXPECT_LT(packed->size(), tokenizer.size() / 3);
  const auto unpacked = unpack_run_spec(*packed);
  ASSERT_TRUE(unpacked.has_value()) << unpacked.error().message();
  EXPECT_EQ(unpacked->SerializeAsString(), spec.SerializeAsString());
  EXPECT_EQ(unpack_run_spec(packed->substr(0, packed->size() / 2)).error().code, Code::kCorrupt);
  EXPECT_EQ(unpack_run_spec("no zstd").error().code, Code::kCorrupt);
}

TEST(RunSpec, TheLargestSubmissionIsNotUnderestimated) {
  constexpr int kRollouts = 3, kPrompt = 500, kResponse = 2000;
  schema::WorkerMessage message;
  for (int r = 0; r < kRollouts; ++r) {
    schema::Trajectory& t = *message.mutable_submission()->add_trajectories();
    t.set_id(std::string(128, 'i'));
    t.set_problem_id(std::string(128, 'p'));
    t.set_policy_digest(std::string(64, 'd'));
    t.set_group(~0ull >> 1);
    t.set_lease(~0ull >> 1);
    for (int i = 0; i < kPrompt; ++i) t.add_prompt_tokens(262'000);
    for (int i = 0; i < kResponse; ++i) {
      t.add_response_tokens(262'000);
      t.add_logprobs(-1.5f);
      t.add_loss_mask(1);
    }
    for (int i = 0; i < 8; ++i) (*t.mutable_components())["component " + std::to_string(i)] = 1;
    t.set_text(std::string(kResponse * 6, 'x'));
    t.set_metadata_json(std::string(2000, ' '));
  }
  EXPECT_LT(message.ByteSizeLong(), submission_bytes_max(kRollouts, kPrompt, kResponse));
}

}  // namespace
}  // namespace echoline::data_plane

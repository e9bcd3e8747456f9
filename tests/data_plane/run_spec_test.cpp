// The run specification is unchanged after it was packed and unpacked, and damaged bytes are refused.
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

}  // namespace
}  // namespace echoline::data_plane

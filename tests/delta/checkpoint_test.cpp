// Checkpoints: single files, sharded folders, and what can be wrong with them.
#include "delta/checkpoint.hpp"

#include <gmock/gmock.h>

#include <algorithm>

#include "base/files.hpp"
#include "delta_test_util.hpp"

namespace echoline::delta {
namespace {

using namespace test;
using ::testing::AllOf;
using ::testing::HasSubstr;
namespace fs = std::filesystem;

class CheckpointTest : public ::testing::Test {
 protected:
  void SetUp() override {
    Random random(1);
    state_ = zeros({spec("a", DType::kBF16, {30}), spec("b", DType::kF32, {10}), spec("c", DType::kU8, {50}),
                    spec("d", DType::kU8, {0}), spec("e", DType::kI64, {})});
    fill_random(state_, random);
  }
  void write(Bytes shard_bytes_max = {5'000'000'000}) {
    const Status status = write_checkpoint(folder_.path(), state_.view(), shard_bytes_max);
    ASSERT_TRUE(status) << status.error().message();
  }
  std::string refusal() {
    const auto checkpoint = Checkpoint::open(folder_.path());
    if (checkpoint) return "accepted";
    EXPECT_EQ(checkpoint.error().code, Code::kInvalid) << checkpoint.error().message();
    return checkpoint.error().detail;
  }
  void write_index(std::string_view weight_map) {
    write_raw(folder_ / "model.safetensors.index.json",
              fmt::format(R"({{"metadata":{{}},"weight_map":{}}})", weight_map));
  }
  TemporaryFolder folder_;
  OwnedState state_;
};

TEST_F(CheckpointTest, OneFile) {
  write();
  EXPECT_TRUE(fs::exists(folder_ / "model.safetensors"));
  for (const fs::path& path : {folder_.path(), folder_ / "model.safetensors"}) {
    const auto checkpoint = Checkpoint::open(path);
    ASSERT_TRUE(checkpoint) << checkpoint.error().message();
    EXPECT_TRUE(same_bytes(checkpoint->view(), state_.view()));
    EXPECT_EQ(checkpoint->total_bytes().count, state_.total_bytes());
    EXPECT_EQ(checkpoint->metadata().at("format"), "pt");
  }
}

TEST_F(CheckpointTest, Shards) {
  for (const std::uint64_t shard_bytes_max : {0, 1, 60, 100, 157}) {  // the state has 158 bytes
    write({shard_bytes_max});
    EXPECT_FALSE(fs::exists(folder_ / "model.safetensors"));
    auto opened = Checkpoint::open(folder_.path());
    ASSERT_TRUE(opened) << opened.error().message();
    EXPECT_GT(opened->file_count(), 1u);
    const Checkpoint checkpoint = std::move(opened).value();
    EXPECT_TRUE(same_bytes(checkpoint.view(), state_.view()));
    EXPECT_THAT(*read_file(folder_ / "model.safetensors.index.json"), HasSubstr("\"total_size\": 158"));
  }
  write({158});  // back to one file: the index does not stay behind
  EXPECT_TRUE(fs::exists(folder_ / "model.safetensors"));
  EXPECT_FALSE(fs::exists(folder_ / "model.safetensors.index.json"));
}

TEST_F(CheckpointTest, MissingThings) {
  EXPECT_THAT(refusal(), AllOf(HasSubstr("model.safetensors.index.json"), HasSubstr("neither")));
  EXPECT_EQ(Checkpoint::open(folder_ / "absent").error().code, Code::kInvalid);
  write({60});
  fs::remove(folder_ / "model-00002-of-00003.safetensors");
  EXPECT_THAT(refusal(), AllOf(HasSubstr("model-00002-of-00003.safetensors"), HasSubstr("tensor 'b'")));
}

TEST_F(CheckpointTest, TruncatedShardIsNamedWithItsSizes) {
  write({60});
  const fs::path shard = folder_ / "model-00001-of-00003.safetensors";
  fs::resize_file(shard, fs::file_size(shard) - 1);
  EXPECT_THAT(refusal(), AllOf(HasSubstr(shard.string()), HasSubstr("60"), HasSubstr("59")));
}

TEST_F(CheckpointTest, TensorMissingFromItsShard) {
  write({60});
  write_index(R"({"a":"model-00001-of-00003.safetensors","zz":"model-00001-of-00003.safetensors"})");
  EXPECT_THAT(refusal(), AllOf(HasSubstr("'zz' is missing"), HasSubstr("model-00001-of-00003.safetensors")));
}

TEST_F(CheckpointTest, TensorInTwoShards) {
  ASSERT_TRUE(write_safetensors(folder_ / "x.safetensors", {state_.view()[0]}));
  ASSERT_TRUE(write_safetensors(folder_ / "y.safetensors", {state_.view()[0], state_.view()[1]}));
  write_index(R"({"a":"x.safetensors","b":"y.safetensors"})");
  EXPECT_THAT(refusal(),
              AllOf(HasSubstr("'a' is in two shards"), HasSubstr("x.safetensors"), HasSubstr("y.safetensors")));
  write_index(R"({"a":"x.safetensors","a":"y.safetensors"})");
  EXPECT_THAT(refusal(), HasSubstr("'a' occurs twice"));
}

TEST_F(CheckpointTest, BadIndexes) {
  const fs::path index = folder_ / "model.safetensors.index.json";
  for (const char* text : {"", "{", "[]", "{}", R"({"weight_map":[]})", R"({"weight_map":{}})",
                           R"({"metadata":{"delta_encoding":"overwrite"},"weight_map":{"a":"x.safetensors"}})",
                           R"({"weight_map":{"a":1}})", R"({"weight_map":{"a":""}})", R"({"weight_map":{"a":"../x"}})",
                           R"({"weight_map":{"a":"/etc/passwd"}})", R"({"weight_map":{"a":".."}})"}) {
    write_raw(index, text);
    EXPECT_THAT(refusal(), HasSubstr("model.safetensors.index.json")) << text;
  }
}

}  // namespace
}  // namespace echoline::delta

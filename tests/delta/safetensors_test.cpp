// The safetensors reader and writer: round trips and every kind of bad header.
#include "delta/safetensors.hpp"

#include <gmock/gmock.h>

#include "base/files.hpp"
#include "delta_test_util.hpp"

namespace echoline::delta {
namespace {

using namespace test;
using ::testing::HasSubstr;

std::string refusal(std::string_view header, std::string_view data) {
  const std::string file = safetensors_bytes(header, data);
  const auto parsed = parse_safetensors(bytes_of(file), "x.safetensors");
  if (parsed) return "accepted";
  EXPECT_EQ(parsed.error().code, Code::kInvalid);
  EXPECT_THAT(parsed.error().detail, HasSubstr("x.safetensors"));
  return parsed.error().detail;
}

TEST(Safetensors, RoundTripsEveryTypeAndMetadata) {
  const TemporaryFolder folder;
  Random random(1);
  StateView layout{spec("scalar", DType::kF64, {}), spec("empty", DType::kF32, {4, 0}), spec("", DType::kU8, {1})};
  for (const DType dtype : kAllDTypes)
    layout.push_back(spec(fmt::format("layer \"{}\" \\ ü", dtype_name(dtype)), dtype, {3, 8}));
  OwnedState state = zeros(layout);
  fill_random(state, random);
  const Metadata metadata{{"format", "pt"}, {"note", "line\nbreak \"quoted\""}};
  const Status written = write_safetensors(folder / "m.safetensors", state.view(), metadata);
  ASSERT_TRUE(written) << written.error().message();

  const auto file = SafetensorsFile::open(folder / "m.safetensors");
  ASSERT_TRUE(file) << file.error().message();
  EXPECT_TRUE(same_bytes(file->view(), state.view()));
  EXPECT_EQ(file->metadata(), metadata);
  for (const TensorView& t : file->view())
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(t.bytes.data()) % dtype_bytes(t.dtype), 0u) << t.name;
  const auto raw = read_file(folder / "m.safetensors");
  std::uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, raw->data(), 8);
  EXPECT_EQ(header_bytes % 8, 0u);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path()), {}), 1);  // nothing temporary left
}

TEST(Safetensors, RoundTripsRandomStates) {
  const TemporaryFolder folder;
  Random random(2);
  for (int round = 0; round < 50; ++round) {
    OwnedState state = zeros(random_layout(random, 6, 9));
    fill_random(state, random);
    ASSERT_TRUE(write_safetensors(folder / "m", state.view()));
    const auto file = SafetensorsFile::open(folder / "m");
    ASSERT_TRUE(file) << file.error().message();
    EXPECT_TRUE(same_bytes(file->view(), state.view()));
  }
}

TEST(Safetensors, ReadsAFileWrittenByHand) {
  const std::string file =
      safetensors_bytes(R"({"b":{"dtype":"I16","shape":[2],"data_offsets":[1,5]},"__metadata__":{"k":"v"},)"
                        R"("a":{"data_offsets":[0,1],"shape":[],"dtype":"U8"}}   )",
                        "\x07\x01\x02\x03\x04");
  const auto parsed = parse_safetensors(bytes_of(file), "x");
  ASSERT_TRUE(parsed) << parsed.error().message();
  ASSERT_EQ(parsed->tensors.size(), 2u);
  EXPECT_EQ(parsed->tensors[0].name, "a");
  EXPECT_EQ(parsed->tensors[0].bytes[0], std::byte{7});
  EXPECT_EQ(parsed->tensors[1].shape, std::vector<std::int64_t>{2});
  EXPECT_EQ(parsed->tensors[1].bytes[3], std::byte{4});
  EXPECT_EQ(parsed->metadata.at("k"), "v");
  EXPECT_TRUE(parse_safetensors(bytes_of(safetensors_bytes("{}", "")), "x")->tensors.empty());
}

TEST(Safetensors, RefusesEveryKindOfBadHeader) {
  struct Case {
    const char* header;
    const char* data;
    const char* reason;
  };
  const Case cases[] = {
      {"", "", "does not start with '{'"},
      {" {}", "", "does not start with '{'"},
      {"[]", "", "does not start with '{'"},
      {"{", "", "not valid JSON"},
      {"{} x", "", "not valid JSON"},
      {"{}{}", "", "not valid JSON"},
      {"{\"\xff\":{}}", "", "not valid JSON"},
      {R"({"a":1})", "", "'a' cannot be"},
      {R"({"a":null})", "", "'a' cannot be"},
      {R"({"a":[]})", "", "'a' cannot be"},
      {R"({"a":{}})", "", "lacks"},
      {R"({"a":{"dtype":"U8","shape":[0]}})", "", "lacks"},
      {R"({"a":{"dtype":"Q8","shape":[1],"data_offsets":[0,1]}})", "x", "unknown element type 'Q8'"},
      {R"({"a":{"dtype":8,"shape":[1],"data_offsets":[0,1]}})", "x", "'dtype' cannot be"},
      {R"({"a":{"dtype":["U8"],"shape":[1],"data_offsets":[0,1]}})", "x", "'dtype' cannot be"},
      {R"({"a":{"dtype":"U8","shape":1,"data_offsets":[0,1]}})", "x", "'shape' cannot be"},
      {R"({"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}})", "x", "'shape' cannot be"},
      {R"({"a":{"dtype":"U8","shape":[1.0],"data_offsets":[0,1]}})", "x", "'shape' cannot be"},
      {R"({"a":{"dtype":"U8","shape":["1"],"data_offsets":[0,1]}})", "x", "'shape' cannot be"},
      {R"({"a":{"dtype":"U8","shape":[[1]],"data_offsets":[0,1]}})", "x", "'shape' cannot be"},
      {R"({"a":{"dtype":"U8","shape":[{}],"data_offsets":[0,1]}})", "x", "'shape' cannot be"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0]}})", "x", "begin and an end"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1,2]}})", "x", "begin and an end"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[1,0]}})", "x", "begin and an end"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"extra":1}})", "x", "unknown key 'extra'"},
      {R"({"a":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}})", "x", "'dtype' twice"},
      {R"({"a":{"dtype":"U8","shape":[1],"shape":[1],"data_offsets":[0,1]}})", "x", "'shape' twice"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
       "xy", "'a' occurs twice"},
      {R"({"__metadata__":{"k":1}})", "", "'k' cannot be"},
      {R"({"__metadata__":{"k":["v"]}})", "", "'k' cannot be"},
      {R"({"__metadata__":{"k":"v","k":"w"}})", "", "'k' occurs twice"},
      {R"({"__metadata__":{},"__metadata__":{}})", "", "occurs twice"},
      {R"({"a":{"dtype":"BF16","shape":[2],"data_offsets":[0,2]}})", "xy", "takes 4 bytes"},
      {R"({"a":{"dtype":"U8","shape":[9223372036854775807,3],"data_offsets":[0,1]}})", "x", "2^63"},
      {R"({"a":{"dtype":"U8","shape":[18446744073709551615],"data_offsets":[0,1]}})", "x", "'shape' cannot be"},
      {R"({"a":{"dtype":"U8","shape":[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1],)"
       R"("data_offsets":[0,1]}})",
       "x", "too long"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})", "xy", "gap"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"U8","shape":[1],"data_offsets":[2,3]}})",
       "xyz", "gap"},
      {R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}})",
       "xyz", "overlap"},
      {R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}})", "x",
       "describes 2 bytes of tensor data, the file has 1"},
      {R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}})", "xyz",
       "describes 2 bytes of tensor data, the file has 3"},
      {"{}", "x", "describes 0 bytes of tensor data, the file has 1"},
  };
  for (const Case& c : cases) EXPECT_THAT(refusal(c.header, c.data), HasSubstr(c.reason)) << c.header;
}

TEST(Safetensors, RefusesBadLengthsAndDeepNesting) {
  EXPECT_FALSE(parse_safetensors({}, "x"));
  EXPECT_FALSE(parse_safetensors(bytes_of("1234567"), "x"));
  std::string file = safetensors_bytes("{}", "");
  const auto refusal_of_length = [&](std::uint64_t header_bytes) {
    std::memcpy(file.data(), &header_bytes, 8);
    return parse_safetensors(bytes_of(file), "x").error().detail;
  };
  EXPECT_THAT(refusal_of_length(3), HasSubstr("should have at least 11, it has 10"));
  EXPECT_THAT(refusal_of_length(100'000'001), HasSubstr("at most 100000000"));
  EXPECT_THAT(refusal_of_length(~0ull), HasSubstr("at most 100000000"));
  std::string deep_json = "{\"a\":";
  for (int i = 0; i < 100000; ++i) deep_json += "{\"a\":";
  EXPECT_NE(refusal(deep_json, ""), "accepted");
}

TEST(Safetensors, EveryTruncatedFileIsRefused) {
  const TemporaryFolder folder;
  OwnedState state = zeros({spec("w", DType::kF32, {9}), spec("v", DType::kU8, {3})});
  ASSERT_TRUE(write_safetensors(folder / "whole", state.view(), {{"format", "pt"}}));
  const std::string whole = *read_file(folder / "whole");
  for (std::size_t length = 0; length < whole.size(); ++length) {
    write_raw(folder / "cut", std::string_view(whole).substr(0, length));
    const auto file = SafetensorsFile::open(folder / "cut");
    ASSERT_FALSE(file) << length;
    EXPECT_EQ(file.error().code, Code::kInvalid);
    EXPECT_THAT(file.error().detail, HasSubstr((folder / "cut").string()));
  }
}

TEST(Safetensors, FilesThatCannotBeOpenedOrWritten) {
  const TemporaryFolder folder;
  EXPECT_EQ(SafetensorsFile::open(folder / "absent").error().code, Code::kNotFound);
  EXPECT_EQ(SafetensorsFile::open(folder.path()).error().code, Code::kInvalid);
  EXPECT_FALSE(write_safetensors(folder / "no" / "such" / "folder", {}));
  const Blob one_byte(1);
  EXPECT_EQ(write_safetensors(folder / "m", {{"__metadata__", DType::kU8, {1}, one_byte}}).error().code,
            Code::kInvalid);
  EXPECT_EQ(write_safetensors(folder / "m", {{"\xff", DType::kU8, {1}, one_byte}}).error().code, Code::kInvalid);
  EXPECT_FALSE(std::filesystem::exists(folder / "m"));
}

TEST(Safetensors, OverwritingKeepsAnOpenMapValid) {
  const TemporaryFolder folder;
  OwnedState first = zeros({spec("w", DType::kU8, {4})});
  ASSERT_TRUE(write_safetensors(folder / "m", first.view()));
  auto opened = SafetensorsFile::open(folder / "m");
  ASSERT_TRUE(opened);
  SafetensorsFile file = std::move(opened).value();
  OwnedState second = copy(first.view());
  second.mutable_bytes(0)[0] = std::byte{9};
  ASSERT_TRUE(write_safetensors(folder / "m", second.view()));
  EXPECT_TRUE(same_bytes(file.view(), first.view()));
  EXPECT_TRUE(same_bytes(SafetensorsFile::open(folder / "m")->view(), second.view()));
}

}  // namespace
}  // namespace echoline::delta

// Element types, shapes, canonical order, digests and OwnedState.
#include "delta/tensor.hpp"

#include <gmock/gmock.h>
#include <xxhash.h>

#include "delta_test_util.hpp"

namespace echoline::delta {
namespace {

using namespace test;
using ::testing::HasSubstr;

TEST(DType, NamesRoundTripAndSizesMatchTheNames) {
  for (const DType dtype : kAllDTypes) {
    const auto parsed = parse_dtype(dtype_name(dtype));
    ASSERT_TRUE(parsed);
    EXPECT_EQ(*parsed, dtype);
    const std::string name(dtype_name(dtype));
    std::size_t bytes = 1;
    for (const auto& [name_end, size] : {std::pair{"16", 2}, {"32", 4}, {"64", 8}})
      if (name.ends_with(name_end) && name.find("_E") == name.npos) bytes = static_cast<std::size_t>(size);
    EXPECT_EQ(dtype_bytes(dtype), bytes) << name;
  }
  const auto unknown = parse_dtype("F3");
  ASSERT_FALSE(unknown);
  EXPECT_EQ(unknown.error().code, Code::kInvalid);
  EXPECT_THAT(unknown.error().detail, HasSubstr("BF16"));
  EXPECT_FALSE(parse_dtype("bf16"));
}

TEST(Shape, CountsAndOverflows) {
  EXPECT_EQ(*element_count({}), 1);
  EXPECT_EQ(*element_count(std::vector<std::int64_t>{3, 0, 5}), 0);
  EXPECT_EQ(*element_count(std::vector<std::int64_t>{2, 3, 7}), 42);
  EXPECT_FALSE(element_count(std::vector<std::int64_t>{2, -1}));
  EXPECT_FALSE(element_count(std::vector<std::int64_t>{1ll << 32, 1ll << 31}));
  // A zero does not hide an overflow of the other dimensions.
  EXPECT_FALSE(element_count(std::vector<std::int64_t>{1ll << 40, 1ll << 40, 0}));
  EXPECT_EQ(*tensor_bytes(DType::kU16, std::vector<std::int64_t>{1ll << 62}), 1ull << 63);
  EXPECT_FALSE(tensor_bytes(DType::kU64, std::vector<std::int64_t>{1ll << 62}));
}

TEST(Shape, PackedElementsFillTheirBytes) {
  EXPECT_EQ(*tensor_bytes(DType::kF4, std::vector<std::int64_t>{3, 2}), 3u);
  EXPECT_EQ(*tensor_bytes(DType::kF6E2M3, std::vector<std::int64_t>{4, 3}), 9u);
  EXPECT_EQ(*tensor_bytes(DType::kF6E3M2, std::vector<std::int64_t>{0}), 0u);
  EXPECT_THAT(tensor_bytes(DType::kF4, std::vector<std::int64_t>{3}).error().detail, HasSubstr("last byte"));
  EXPECT_FALSE(tensor_bytes(DType::kF6E2M3, std::vector<std::int64_t>{2}));
  EXPECT_EQ(dtype_bytes(DType::kF4), 1u);
}

TEST(SameTensors, DifferencesAreCountedAndNamed) {
  const StateView before{spec("a", DType::kBF16, {2}), spec("b", DType::kBF16, {2}), spec("c", DType::kBF16, {2})};
  EXPECT_TRUE(check_same_tensors(before, before));
  const StateView after{spec("b", DType::kF16, {2}), spec("c", DType::kBF16, {3}), spec("d", DType::kU8, {1}),
                        spec("e", DType::kU8, {1})};
  EXPECT_EQ(
      check_same_tensors(before, after).error().detail,
      "tensors: 2 new ('d', ...), 1 gone ('a'), 2 of another type or shape ('b: BF16 [2] before, F16 [2] now', ...)");
}

TEST(Canonical, SortsTensorsAndNamesInvalidOnes) {
  const Blob two_bytes(2);
  const auto sorted = canonical({{"b", DType::kBF16, {}, two_bytes}, {"a", DType::kU8, {2}, two_bytes}});
  ASSERT_TRUE(sorted);
  EXPECT_EQ(sorted->front().name, "a");
  EXPECT_THAT(canonical({{"a", DType::kU8, {2}, two_bytes}, {"a", DType::kU8, {2}, two_bytes}}).error().detail,
              HasSubstr("'a'"));
  EXPECT_THAT(canonical({{"wide", DType::kF32, {2}, two_bytes}}).error().detail, HasSubstr("'wide'"));
  EXPECT_THAT(canonical({{"neg", DType::kF32, {-2}, two_bytes}}).error().detail, HasSubstr("'neg'"));
  EXPECT_FALSE(canonical({{"deep", DType::kU8, std::vector<std::int64_t>(33, 1), Blob(1)}}));
  EXPECT_FALSE(canonical({{std::string(5000, 'x'), DType::kU8, {2}, two_bytes}}));
}

TEST(Digest, HexRoundTripsAndRefusesOtherText) {
  Digest digest;
  for (std::size_t i = 0; i < 16; ++i) digest.bytes[i] = static_cast<std::byte>(i * 17);
  EXPECT_EQ(digest.hex(), "00112233445566778899aabbccddeeff");
  EXPECT_EQ(*Digest::parse(digest.hex()), digest);
  EXPECT_EQ(*Digest::parse("00112233445566778899AABBCCDDEEFF"), digest);
  for (const char* bad : {"", "00", "00112233445566778899aabbccddeef", "00112233445566778899aabbccddeefg",
                          "00112233445566778899aabbccddeeff0"})
    EXPECT_FALSE(Digest::parse(bad)) << bad;
  EXPECT_LT(Digest{}, digest);
}

// Computed from the description in delta/FORMAT.md alone.
TEST(Digest, FollowsTheFormatDescription) {
  const auto xxh128 = [](const std::string& bytes) {
    XXH128_canonical_t big_endian;
    XXH128_canonicalFromHash(&big_endian, XXH3_128bits(bytes.data(), bytes.size()));
    return std::string(reinterpret_cast<const char*>(big_endian.digest), 16);
  };
  std::string data(65536 + 4, '\0');  // two leaves
  for (std::size_t i = 0; i < data.size(); ++i) data[i] = static_cast<char>(i * 7);
  const std::string leaves = xxh128(data.substr(0, 65536)) + xxh128(data.substr(65536));
  const std::string tensor = xxh128(std::string("\x08\x01\x01\x00w\x02\x80\x00\x00\x00\x00\x00\x00", 13) + leaves);
  const std::string state = xxh128(std::string("echoline.state.2\x01\x00\x00\x00\x00\x00\x00\x00", 24) + tensor);
  for (const unsigned threads : {1, 3}) {
    const auto digest = digest_state({{"w", DType::kBF16, {32770}, bytes_of(data)}}, threads);
    ASSERT_TRUE(digest);
    EXPECT_EQ(std::memcmp(digest->bytes.data(), state.data(), 16), 0);
  }
}

TEST(Digest, BindsNameTypeShapeAndEveryByte) {
  const Blob data(8);
  const TensorView base{"w", DType::kBF16, {4}, data};
  const Digest digest = digest_tensor(base);
  TensorView other = base;
  other.name = "v";
  EXPECT_NE(digest_tensor(other), digest);
  other = base, other.dtype = DType::kF16;
  EXPECT_NE(digest_tensor(other), digest);
  other = base, other.shape = {2, 2};
  EXPECT_NE(digest_tensor(other), digest);
  for (std::size_t i = 0; i < data.size(); ++i) {
    Blob changed = data;
    changed[i] = std::byte{1};
    other = base, other.bytes = changed;
    EXPECT_NE(digest_tensor(other), digest);
  }
  EXPECT_NE(*digest_state({}), *digest_state({base}));
}

TEST(Digest, DoesNotDependOnTheOrderOfTheView) {
  const Blob a_bytes(2), b_bytes(2, std::byte{7});
  const TensorView a{"a", DType::kU8, {2}, a_bytes}, b{"b", DType::kU8, {2}, b_bytes};
  EXPECT_EQ(*digest_state({a, b}), *digest_state({b, a}));
}

TEST(OwnedState, AllocatesAlignedSortedTensors) {
  OwnedState state = zeros({spec("z", DType::kF32, {3}), spec("a", DType::kU8, {}), spec("m", DType::kF64, {0, 4})});
  ASSERT_EQ(state.size(), 3u);
  EXPECT_EQ(state.name(0), "a");
  EXPECT_EQ(state.total_bytes(), 13u);
  EXPECT_EQ(*state.find("z"), 2u);
  EXPECT_FALSE(state.find("b"));
  for (const TensorView& t : state.view()) {
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(t.bytes.data()) % 64, 0u);
    for (const std::byte b : t.bytes) EXPECT_EQ(b, std::byte{0});
  }
}

TEST(OwnedState, RefusesBadLayoutsAndImpossibleSizes) {
  EXPECT_FALSE(OwnedState::empty_like({spec("a", DType::kU8, {1}), spec("a", DType::kU8, {1})}));
  const auto huge = OwnedState::empty_like({spec("huge", DType::kF64, {1ll << 60})});
  ASSERT_FALSE(huge);
  EXPECT_EQ(huge.error().code, Code::kExhausted);
  EXPECT_THAT(huge.error().detail, HasSubstr("'huge'"));
}

TEST(OwnedState, DigestFollowsEveryWriteThroughAnOpenSpan) {
  OwnedState state = zeros({spec("w", DType::kU8, {4})});
  const auto recomputed_digest = [&] { return *digest_state(state.view()); };
  EXPECT_EQ(state.digest(), recomputed_digest());
  const auto writable_bytes = state.mutable_bytes(0);
  writable_bytes[0] = std::byte{1};
  EXPECT_EQ(state.digest(), recomputed_digest());
  writable_bytes[1] = std::byte{2};  // the same span, after a digest was taken
  EXPECT_EQ(state.digest(), recomputed_digest());
  state.seal();
  EXPECT_EQ(state.digest(), recomputed_digest());
  const std::byte* address = state.bytes(0).data();
  const OwnedState moved = std::move(state);
  EXPECT_EQ(moved.bytes(0).data(), address);
}

}  // namespace
}  // namespace echoline::delta

// Packed experts: they round-trip in few bytes, and no bytes do harm.
#include "data_plane/routed_experts.hpp"

#include <gtest/gtest.h>
#include <zstd.h>

#include <algorithm>
#include <numeric>

#include "base/random.hpp"
#include "tests/data_plane/trajectories.hpp"
#include "tests/fuzz/input.hpp"

namespace echoline::data_plane {
namespace {

// Experts of random tokens; every `unknown_every`-th token of a layer has none.
RoutedExperts random_experts(std::size_t tokens, std::uint32_t layers, std::uint32_t per_token, std::int16_t count,
                             std::uint64_t unknown_every = 7) {
  Random random(tokens + layers);
  RoutedExperts experts{layers, per_token, {}};
  std::vector<std::int16_t> all(static_cast<std::size_t>(count));
  std::iota(all.begin(), all.end(), std::int16_t{0});
  for (std::size_t row = 0; row < tokens * layers; ++row) {
    for (std::size_t i = 0; i < per_token; ++i) {
      std::swap(all[i], all[i + random.below(all.size() - i)]);
      experts.values.push_back(random.below(unknown_every) == 0 && i == 0 ? std::int16_t{-1} : all[i]);
    }
    auto first = experts.values.end() - per_token;
    if (*first == -1) std::fill(first, experts.values.end(), std::int16_t{-1});
  }
  EXPECT_TRUE(make_canonical(experts));
  return experts;
}

// As pack_experts() makes it, of any content.
std::string frame_of(const std::string& plain) {
  std::string packed(1 + ZSTD_compressBound(plain.size()), '\1');
  packed.resize(1 + ZSTD_compress(packed.data() + 1, packed.size() - 1, plain.data(), plain.size(), 3));
  return packed;
}

TEST(RoutedExperts, RoundTrip) {
  for (const auto& [tokens, layers, per_token, count] :
       {std::tuple{std::size_t{1}, 1u, 1u, std::int16_t{1}}, std::tuple{std::size_t{90}, 3u, 2u, std::int16_t{8}},
        std::tuple{std::size_t{40}, 48u, 8u, std::int16_t{128}},
        std::tuple{std::size_t{5}, 2u, 4u, std::int16_t{32767}}}) {
    const RoutedExperts experts = random_experts(tokens, layers, per_token, count);
    EXPECT_EQ(experts.tokens(), tokens);
    const std::string packed = pack_experts(experts);
    const auto again = unpack_experts(packed, tokens);
    ASSERT_TRUE(again) << again.error().message();
    EXPECT_EQ(*again, experts);
    EXPECT_FALSE(unpack_experts(packed, tokens + 1)) << "of another number of tokens";
  }
  EXPECT_EQ(unpack_experts("", 5).value(), RoutedExperts{});
  EXPECT_EQ(pack_experts({}), "");
}

// Uniformly random experts are the worst case: log2 of 128 over 8 is 40.4 bits for 8 of 128 experts.
TEST(RoutedExperts, TakeLittleMoreThanTheirInformation) {
  const RoutedExperts experts = random_experts(512, 48, 8, 128, /*unknown_every=*/1u << 30);
  const double bits = 8.0 * static_cast<double>(pack_experts(experts).size()) / (512 * 48);
  EXPECT_GT(bits, 40.4);
  EXPECT_LT(bits, 47);
}

TEST(RoutedExperts, OthersAreNoExperts) {
  const auto refusal = [](std::uint32_t layers, std::uint32_t per_token, std::vector<std::int16_t> values) {
    RoutedExperts experts{layers, per_token, std::move(values)};
    const Status status = make_canonical(experts);
    return status ? std::string() : status.error().detail;
  };
  EXPECT_EQ(refusal(1, 2, {5, 3, -1, -1}), "");
  EXPECT_NE(refusal(1, 2, {5, 5}).find("expected 2 different ones"), std::string::npos);
  EXPECT_NE(refusal(1, 2, {-1, 5}).find("-1 to 5"), std::string::npos);
  EXPECT_NE(refusal(1, 2, {-2, -2}), "");
  EXPECT_NE(refusal(1, 2, {1, 2, 3}).find("3 values"), std::string::npos);
  EXPECT_NE(refusal(0, 2, {1, 2}), "");
  EXPECT_NE(refusal(5000, 1, {}), "");
}

TEST(RoutedExperts, AreExtendedWithoutAChangeOfWhatIsKnown) {
  RoutedExperts known;
  extend(known, {1, 2, {0, 1}});
  extend(known, {1, 2, {4, 5, 2, 3}});
  extend(known, {1, 2, {9, 9}});
  extend(known, {2, 1, {7, 7, 7, 7, 7, 7}});
  extend(known, {});
  EXPECT_EQ(known, (RoutedExperts{1, 2, {0, 1, 2, 3}}));
}

TEST(RoutedExperts, BadBytesAreNamed) {
  const auto refusal = [](const std::string& packed, std::size_t tokens) {
    const auto experts = unpack_experts(packed, tokens);
    return experts ? std::string() : experts.error().detail;
  };
  EXPECT_NE(refusal("\2abc", 1).find("format 2, expected 1"), std::string::npos);
  EXPECT_NE(refusal("\1abc", 1).find("zstd frame"), std::string::npos);
  EXPECT_NE(refusal(std::string(kRoutedExpertsBytesMax + 1, '\1'), 1).find("at most"), std::string::npos);
  // One token, one layer, two experts.
  EXPECT_EQ(refusal(frame_of({1, 1, 2, 1, 1}), 1), "");
  EXPECT_EQ(refusal(frame_of({1, 1, 2, 0}), 1), "");
  EXPECT_NE(refusal(frame_of({1, 1, 2, 1, 0}), 1).find("no 2 different experts"), std::string::npos) << "twice";
  EXPECT_NE(refusal(frame_of({1, 1, 2, 1}), 1), "") << "cut";
  EXPECT_NE(refusal(frame_of({1, 1, 2, 1, 1, 1}), 1).find("after the experts"), std::string::npos);
  EXPECT_NE(refusal(frame_of({1, 1, 2, 1, '\xff', '\xff', '\x7f'}), 1), "") << "above 32767";
  EXPECT_NE(refusal(frame_of({1, 0, 2, 1, 1}), 1), "") << "no layers";
  EXPECT_NE(refusal(frame_of({1, 1}), 1), "");
  // A small frame that would unpack to far more than its tokens need.
  const std::string bomb = frame_of(std::string({1, 1, 2, 1, 1}) + std::string(100u << 20, '\0'));
  ASSERT_LT(bomb.size(), 100'000u);
  EXPECT_NE(refusal(bomb, 1).find("expected at most"), std::string::npos);
  std::string many;
  for (const int shift : {0, 7, 14})
    many.push_back(static_cast<char>((400'000 >> shift & 0x7f) | (shift < 14 ? 0x80 : 0)));
  EXPECT_NE(refusal(frame_of(many + std::string({'\x7f', '\x7f'})), 400'000).find("expected at most"),
            std::string::npos);
}

// A trajectory of before has no experts; one with experts is checked.
TEST(RoutedExperts, AreAnOptionalFieldOfATrajectory) {
  Trajectory trajectory = sound_trajectory();
  EXPECT_TRUE(check(trajectory));
  RoutedExperts experts = random_experts(6, 3, 2, 8);
  trajectory.set_routed_experts(pack_experts(experts));
  const auto parsed = parse_trajectory(trajectory.SerializeAsString());
  ASSERT_TRUE(parsed) << parsed.error().message();
  EXPECT_EQ(unpack_experts(parsed->routed_experts(), 6).value(), experts);
  trajectory.add_response_tokens(3);
  trajectory.add_logprobs(-1);
  trajectory.mutable_spans(0)->set_end(4);
  const Status refused = check(trajectory);
  ASSERT_FALSE(refused);
  EXPECT_NE(refused.error().detail.find("routed_experts: expected a zstd frame with the experts of 7 tokens"),
            std::string::npos)
      << refused.error().detail;
}

TEST(RoutedExperts, SpoiledBytesDoNoHarm) {
  Random random(11);
  const std::size_t tokens = 9;
  const std::string sound = pack_experts(random_experts(tokens, 3, 2, 8));
  int refused = 0;
  for (int i = 0; i < 20'000; ++i) {
    std::string bytes = sound;
    for (std::uint64_t n = 1 + random.below(4); n > 0; --n)
      bytes[random.below(bytes.size())] = static_cast<char>(random.below(256));
    if (random.below(4) == 0) bytes.resize(1 + random.below(bytes.size() - 1));
    refused += !unpack_experts(bytes, tokens);
    test::fuzz_input(static_cast<char>(tokens) + bytes);
  }
  EXPECT_GT(refused, 10'000);
}

}  // namespace
}  // namespace echoline::data_plane

// Policies that workers may still have, restored bit for bit from the newest.
#include "learner/way_back.hpp"

#include <gtest/gtest.h>

#include <cstring>

#include "base/random.hpp"

namespace echoline::learner {
namespace {

constexpr std::size_t kElements = 50'000;

// The same weights after another step: `share` of them move by a little, mostly the same ones every time.
Policy stepped(const Policy* last, std::uint64_t version, double share) {
  Random random(7, version), places(7, 0);
  Policy policy{Version{version}, {}, {}};
  const delta::StateView layout{{"w", delta::DType::kBF16, {static_cast<std::int64_t>(kElements)}, {}}};
  delta::OwnedState state = delta::OwnedState::empty_like(layout).value();
  const auto bytes = state.mutable_bytes(0);
  if (last) std::memcpy(bytes.data(), last->state->bytes(0).data(), bytes.size());
  for (std::size_t i = 0; i < kElements; ++i) {
    std::uint16_t w = 0;
    if (last)
      std::memcpy(&w, bytes.data() + 2 * i, 2);
    else
      w = static_cast<std::uint16_t>(0x3c00 + places.below(0x0400));
    const bool restless = places.uniform() < share;
    if (last && random.uniform() < (restless ? 0.8 : 0.01 * share)) w = static_cast<std::uint16_t>(w ^ 1);
    std::memcpy(bytes.data() + 2 * i, &w, 2);
  }
  state.seal();
  policy.digest = state.digest();
  policy.state = delta::share(std::move(state));
  return policy;
}

std::uint64_t delta_bytes(const Policy& from, const Policy& to) {
  return delta::write_delta(from.state->view(), to.state->view(), [](auto) { return ok(); }).value().patch_bytes;
}

TEST(WayBack, RestoresEveryPolicyItReaches) {
  std::vector<Policy> policies;
  WayBack way({});
  EXPECT_EQ(way.oldest(), std::nullopt);
  for (std::uint64_t v = 0; v <= 6; ++v) {
    policies.push_back(stepped(v ? &policies.back() : nullptr, 2 * v, 0.02));  // versions may skip
    if (v == 0) continue;
    ASSERT_TRUE(way.add(policies[v - 1], policies[v], 1 << 20).has_value());
  }
  EXPECT_EQ(way.oldest(), Version{0});
  std::uint64_t steps = 0;
  for (std::size_t i = 6; i-- > 0;) {
    const auto restored = way.restore(policies[i].version, policies[6]);
    ASSERT_TRUE(restored.has_value()) << restored.error().message();
    EXPECT_EQ(restored->digest, policies[i].digest);
    EXPECT_EQ(restored->state->view()[0].bytes.size(), 2 * kElements);
    EXPECT_EQ(std::memcmp(restored->state->bytes(0).data(), policies[i].state->bytes(0).data(), 2 * kElements), 0);
    steps += delta_bytes(policies[i], policies[i + 1]);
  }
  EXPECT_LT(delta_bytes(policies[0], policies[6]), steps / 2);  // which is what it is for
  EXPECT_EQ(way.restore(Version{3}, policies[6]).error().code, Code::kNotFound);
  EXPECT_EQ(way.restore(Version{0}, policies[5]).error().code, Code::kNotFound);
}

TEST(WayBack, ForgetsWhatHasNoRoomAndWhatDoesNotLeadOn) {
  std::vector<Policy> policies;
  for (std::uint64_t v = 0; v <= 5; ++v) policies.push_back(stepped(v ? &policies.back() : nullptr, v, 0.02));
  WayBack way({});
  const std::uint64_t room = 5 * delta_bytes(policies[1], policies[0]) / 2;  // for two steps
  for (std::size_t v = 1; v <= 4; ++v) ASSERT_TRUE(way.add(policies[v - 1], policies[v], room).has_value());
  EXPECT_EQ(way.oldest(), Version{2});
  EXPECT_TRUE(way.restore(Version{2}, policies[4]).has_value());
  EXPECT_EQ(way.restore(Version{1}, policies[4]).error().code, Code::kNotFound);
  EXPECT_EQ(way.add(policies[4], policies[5], 100).error().code, Code::kExhausted);
  way.clear();
  ASSERT_TRUE(way.add(policies[0], policies[1], room).has_value());
  ASSERT_TRUE(way.add(policies[2], policies[3], room).has_value());  // the step between was missed
  EXPECT_EQ(way.oldest(), Version{2});
}

}  // namespace
}  // namespace echoline::learner

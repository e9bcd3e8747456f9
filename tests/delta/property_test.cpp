// Ten thousand random states of every type and odd shapes: delta, snapshot and fold give exactly the original bits.
#include <gtest/gtest.h>

#include <cmath>

#include "delta_test_util.hpp"

namespace echoline::delta {
namespace {

using namespace test;

constexpr int kRounds = 10'000;

// Fills the state with noise, small numbers, or one value for all elements.
void fill(OwnedState& state, Random& random) {
  fill_random(state, random);
  const std::uint64_t kind = random.below(3);
  const StateView view = state.view();
  for (std::size_t t = 0; kind > 0 && t < state.size(); ++t) {
    const auto bytes = state.mutable_bytes(t);
    const std::size_t size = dtype_bytes(view[t].dtype);
    for (std::size_t i = 0; i < bytes.size(); ++i)
      if (kind == 1 ? i % size > 0 : i >= size) bytes[i] = kind == 1 ? std::byte{0} : bytes[i - size];
  }
  state.seal();
}

// Changes some elements: anywhere by one bit, or in a part of each tensor by the lowest two bits.
void change(OwnedState& state, Random& random) {
  const double density = std::pow(random.uniform(), 4);
  if (random.below(2) == 0) {
    flip_elements(state, density, random);
    return;
  }
  const StateView view = state.view();
  for (std::size_t t = 0; t < state.size(); ++t) {
    const auto bytes = state.mutable_bytes(t);
    const std::size_t size = dtype_bytes(view[t].dtype), count = bytes.size() / size;
    if (count == 0) continue;
    const std::size_t begin = random.below(count), end = begin + random.below(count - begin) + 1;
    for (std::size_t e = begin; e < end; ++e)
      if (random.uniform() < 0.5) bytes[e * size] ^= static_cast<std::byte>(1 + random.below(3));
  }
  state.seal();
}

void expect_applies(const Blob& patch, const OwnedState& prev, const OwnedState& cur, unsigned threads) {
  OwnedState state = copy(prev.view());
  const Status applied = apply_delta(patch, state, {.threads = threads});
  ASSERT_TRUE(applied) << applied.error().message();
  ASSERT_TRUE(same_bytes(state.view(), cur.view()));
  ASSERT_EQ(state.digest(), *digest_state(cur.view()));
}

TEST(Property, TenThousandRandomStatesComeBackBitForBit) {
  Random random(31);
  for (int round = 0; round < kRounds; ++round) {
    SCOPED_TRACE(fmt::format("round {}", round));
    OwnedState prev = zeros(random_layout(random, 5, round % 100 == 0 ? 400 : 20));
    fill(prev, random);
    OwnedState cur = copy(prev.view());
    change(cur, random);
    const auto threads = static_cast<unsigned>(1 + random.below(3));
    const auto patch = encode_delta(prev.view(), cur.view(), {.threads = threads});
    ASSERT_TRUE(patch) << patch.error().message();
    ASSERT_NO_FATAL_FAILURE(expect_applies(*patch, prev, cur, threads));
    const auto snapshot = encode_snapshot(cur.view(), {.threads = threads});
    ASSERT_TRUE(snapshot) << snapshot.error().message();
    const std::size_t segments = cur.size() + cur.total_bytes() / (8u << 20);
    ASSERT_LE(patch->size(), snapshot->size() + snapshot->size() / 100 + 64 * segments + 64);
    const auto decoded = decode_snapshot(*snapshot, {.threads = threads});
    ASSERT_TRUE(decoded) << decoded.error().message();
    ASSERT_TRUE(same_bytes(decoded->view(), cur.view()));
    if (round % 4 != 0) continue;
    OwnedState last = copy(cur.view());
    change(last, random);
    const auto second = encode_delta(cur.view(), last.view());
    ASSERT_TRUE(second);
    const std::vector<std::span<const std::byte>> parts{*patch, *second};
    for (const bool encodes_again : {false, true}) {
      Blob fold;
      const StateView base = prev.view();
      const auto folded = fold_deltas(parts,
                                      [&](std::span<const std::byte> b) {
                                        fold.insert(fold.end(), b.begin(), b.end());
                                        return ok();
                                      },
                                      encodes_again ? &base : nullptr, {.threads = threads});
      ASSERT_TRUE(folded) << folded.error().message();
      ASSERT_EQ(folded->patch_bytes, fold.size());
      ASSERT_NO_FATAL_FAILURE(expect_applies(fold, prev, last, threads));
    }
  }
}

}  // namespace
}  // namespace echoline::delta

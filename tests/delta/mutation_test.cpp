// A million damaged patches, most of them with corrected checksums, so that the damage reaches the decoder. Nothing
// crashes, a refused patch leaves the state unchanged, and an accepted one gives the promised state.
#include <gtest/gtest.h>

#include <algorithm>

#include "delta_test_util.hpp"

namespace echoline::delta {
namespace {

using namespace test;

constexpr int kDeltaRounds = 800'000, kSnapshotRounds = 200'000;

// The position of each frame's length, which its body follows. The first comes after the magic and the frame's type.
constexpr std::size_t kFirstLength = 11;
std::vector<std::size_t> frames_of(const Blob& patch) {
  std::vector<std::size_t> frames;
  for (std::size_t frame = kFirstLength; frame + 4 <= patch.size();) {
    std::uint32_t body_bytes = 0;
    std::memcpy(&body_bytes, patch.data() + frame, 4);
    frames.push_back(frame);
    frame += 4 + body_bytes + 8 + 1;  // length, body, checksum, the next frame's type
  }
  return frames;
}

// Edits within the bodies of frames, with adjusted lengths, so that most damage reaches the readers of the bodies.
void mutate(const Blob& patch, Random& random, Blob& damaged) {
  damaged = patch;
  for (std::uint64_t edits = 1 + random.below(3); edits > 0; --edits) {
    const std::vector<std::size_t> frames = frames_of(damaged);
    std::size_t frame = frames[random.below(frames.size())];
    // In three of four edits, the frame of a random byte, so that large frames are chosen more often.
    if (random.below(4) != 0) {
      const std::size_t byte = kFirstLength + random.below(damaged.size() - kFirstLength);
      frame = *(std::upper_bound(frames.begin(), frames.end(), byte) - 1);
    }
    std::uint32_t length = 0;
    std::memcpy(&length, damaged.data() + frame, 4);
    if (length == 0) continue;
    const std::size_t at = frame + 4 + random.below(length);
    const auto where = damaged.begin() + static_cast<std::ptrdiff_t>(at);
    switch (random.below(8)) {
      case 0:
        *where = static_cast<std::byte>(random.next());
        break;
      case 1:
      case 6:
      case 7:
        *where ^= static_cast<std::byte>(1u << random.below(8));
        break;
      case 2:
        damaged.insert(where, static_cast<std::byte>(random.next()));
        ++length;
        break;
      case 3:
        damaged.erase(where);
        --length;
        break;
      case 4: {  // a piece of the patch elsewhere
        const std::size_t bytes = std::min<std::size_t>(4, frame + 4 + length - at);
        std::copy_n(patch.begin() + static_cast<std::ptrdiff_t>(random.below(patch.size() - bytes)), bytes, where);
        break;
      }
      default:
        *where = random.below(2) ? std::byte{0xff} : std::byte{0x00};
    }
    std::memcpy(damaged.data() + frame, &length, 4);
  }
  if (random.below(20) == 0) damaged.resize(random.below(damaged.size()));
  if (random.below(20) != 0) fix_checksums(damaged);
}

class Mutations : public ::testing::Test {
 protected:
  void SetUp() override {
    Random random(41);
    auto [weights, moved] = weight_update(DType::kBF16, {40, 50}, 1e-5, random);
    prev_ = zeros({spec("e", DType::kF32, {30}), spec("s", DType::kI64, {}), spec("u", DType::kU8, {300}),
                   spec("w", DType::kBF16, {40, 50})});
    fill_random(prev_, random);
    cur_ = copy(prev_.view());
    flip_elements(cur_, 0.1, random);
    for (auto& [state, from] : {std::pair(&prev_, &weights), std::pair(&cur_, &moved)}) {
      std::memcpy(state->mutable_bytes(3).data(), from->bytes(0).data(), from->bytes(0).size());
      state->seal();
    }
    limits_ = {.state_bytes_max = 1 << 20, .tensors_max = 1000, .table_bytes_max = 1 << 16};
  }
  OwnedState prev_, cur_;
  DecodeOptions limits_;
};

TEST_F(Mutations, DamagedDeltasAndFoldsNeverGiveAnotherState) {
  Random random(42);
  OwnedState middle = copy(prev_.view());
  flip_elements(middle, 0.02, random);
  const Blob first = *encode_delta(prev_.view(), middle.view()), second = *encode_delta(middle.view(), cur_.view());
  std::vector<Blob> patches(2);
  patches[0] = *encode_delta(prev_.view(), cur_.view());
  const std::vector<std::span<const std::byte>> parts{first, second};
  ASSERT_TRUE(fold_deltas(parts, [&](std::span<const std::byte> b) {
    patches[1].insert(patches[1].end(), b.begin(), b.end());
    return ok();
  }));
  OwnedState state = copy(prev_.view());
  const Digest base = state.digest();
  Blob damaged;
  int accepted = 0, decoded = 0;
  for (int round = 0; round < kDeltaRounds; ++round) {
    mutate(patches[static_cast<std::size_t>(round) % 2], random, damaged);
    const Status status = apply_delta(damaged, state, limits_);
    accepted += status.has_value();
    decoded += !status && status.error().operation != "read patch";
    ASSERT_TRUE(same_bytes(state.view(), status ? cur_.view() : prev_.view())) << "round " << round;
    if (status) state = copy(prev_.view());
    ASSERT_EQ(state.digest(), base);
    if (round % 8) continue;
    const Status in_parts = apply_in_parts(damaged, state, 64, random, limits_);
    ASSERT_EQ(in_parts.has_value(), status.has_value()) << "round " << round;
    ASSERT_TRUE(same_bytes(state.view(), in_parts ? cur_.view() : prev_.view())) << "round " << round;
    if (in_parts) state = copy(prev_.view());
  }
  EXPECT_LT(accepted, kDeltaRounds / 5);  // edits of fields that only inform, or that are undone by another
  EXPECT_GT(decoded, kDeltaRounds / 10);  // damage that got past the parser
}

TEST_F(Mutations, DamagedSnapshotsNeverGiveAnotherState) {
  Random random(43);
  const Blob patch = *encode_snapshot(cur_.view());
  Blob damaged;
  int accepted = 0;
  for (int round = 0; round < kSnapshotRounds; ++round) {
    mutate(patch, random, damaged);
    const auto state = decode_snapshot(damaged, limits_);
    IncomingSnapshot incoming(limits_);
    const bool added = incoming.add(std::span(damaged).first(damaged.size() / 3)) &&
                       incoming.add(std::span(damaged).subspan(damaged.size() / 3));
    ASSERT_EQ(added && incoming.finish(), state.has_value()) << "round " << round;
    accepted += state.has_value();
    if (!state) continue;
    ASSERT_TRUE(same_bytes(state->view(), cur_.view())) << "round " << round;
  }
  EXPECT_LT(accepted, kSnapshotRounds / 5);
}

}  // namespace
}  // namespace echoline::delta

// Snapshots and deltas: round trips, refusals, rollback, damage, size bounds.
#include "delta/patch.hpp"

#include <gmock/gmock.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <future>

#include "delta/patch_format.hpp"
#include "delta_test_util.hpp"
#include "tests/delta/entropy_pass.hpp"

namespace echoline::delta {
namespace {

using namespace test;
using ::testing::HasSubstr;

Blob delta_of(const OwnedState& prev, const OwnedState& cur, PatchStats* stats = nullptr, EncodeOptions options = {}) {
  auto patch = encode_delta(prev.view(), cur.view(), options, stats);
  EXPECT_TRUE(patch) << (patch ? "" : patch.error().message());
  return patch ? std::move(patch).value() : Blob{};
}

Blob snapshot_of(const OwnedState& cur, PatchStats* stats = nullptr, EncodeOptions options = {}) {
  auto patch = encode_snapshot(cur.view(), options, stats);
  EXPECT_TRUE(patch) << (patch ? "" : patch.error().message());
  return patch ? std::move(patch).value() : Blob{};
}

// Checks that delta and snapshot give `cur`, and that their statistics agree.
void check_round_trip(const OwnedState& prev, const OwnedState& cur, std::uint64_t changed) {
  PatchStats stats;
  const Blob patch = delta_of(prev, cur, &stats);
  const Blob snapshot = snapshot_of(cur);
  EXPECT_EQ(stats.changed, changed);
  EXPECT_EQ(stats.patch_bytes, patch.size());
  EXPECT_LE(patch.size(), snapshot.size() + snapshot.size() / 100 + 16);

  const auto info = inspect(patch);
  ASSERT_TRUE(info) << info.error().message();
  EXPECT_EQ(info->kind, PatchKind::kDelta);
  EXPECT_EQ(info->base, stats.base);
  EXPECT_EQ(info->result, stats.result);
  EXPECT_EQ(info->changed, changed);
  EXPECT_EQ(info->state_bytes, cur.total_bytes());
  ASSERT_EQ(info->tensors.size(), cur.size());
  std::uint64_t payload = 0;
  for (const PatchTensor& t : info->tensors) payload += t.payload_bytes;
  EXPECT_EQ(payload, info->payload_bytes);

  OwnedState applied = copy(prev.view());
  const Status status = apply_delta(patch, applied);
  ASSERT_TRUE(status) << status.error().message();
  EXPECT_TRUE(same_bytes(applied.view(), cur.view()));
  EXPECT_EQ(applied.digest(), stats.result);
  EXPECT_EQ(applied.digest(), *digest_state(applied.view()));  // the cached digests are correct

  const auto decoded = decode_snapshot(snapshot);
  ASSERT_TRUE(decoded) << decoded.error().message();
  EXPECT_TRUE(same_bytes(decoded->view(), cur.view()));
}

TEST(Patch, RoundTripsEveryTypeAtEveryDensity) {
  Random random(1);
  for (const DType dtype : kAllDTypes) {
    for (const double density : {0.0, 0.001, 0.02, 0.3, 0.9, 1.0}) {
      OwnedState prev =
          zeros({spec("w", dtype, {37, 28}), spec("scalar", DType::kF32, {}), spec("empty", dtype, {0, 3})});
      fill_random(prev, random);
      OwnedState cur = copy(prev.view());
      const std::uint64_t changed = flip_elements(cur, density, random);
      SCOPED_TRACE(fmt::format("{} at density {}", dtype_name(dtype), density));
      check_round_trip(prev, cur, changed);
    }
  }
}

TEST(Patch, RoundTripsRandomStates) {
  Random random(2);
  for (int round = 0; round < 200; ++round) {
    SCOPED_TRACE(round);
    OwnedState prev = zeros(random_layout(random, 8, 20));
    fill_random(prev, random);
    OwnedState cur = copy(prev.view());
    const std::uint64_t changed = flip_elements(cur, std::pow(random.uniform(), 3), random);
    check_round_trip(prev, cur, changed);
  }
}

TEST(Patch, ReceivedBytesAreResolvedBeforeTheRestArrives) {
  Random random(5);
  const std::int64_t elements = 3 * (1 << 22);
  OwnedState prev = zeros({spec("a", DType::kBF16, {elements}), spec("b", DType::kBF16, {elements})});
  OwnedState cur = copy(prev.view());
  flip_elements(cur, 0.001, random);
  const Blob patch = delta_of(prev, cur);
  std::uint64_t resolved = 0;
  const DecodeOptions options{.progress = [&](std::uint64_t done, std::uint64_t) { resolved = done; }};
  OwnedState state = copy(prev.view());
  IncomingDelta incoming(state, options);
  const std::span<const std::byte> bytes(patch);
  for (std::size_t begin = 0; begin < bytes.size(); begin += 1000) {
    ASSERT_TRUE(incoming.add(bytes.subspan(begin, std::min<std::size_t>(1000, bytes.size() - begin))));
    EXPECT_EQ(incoming.bytes(), std::min(begin + 1000, bytes.size()));
    const double arrived = static_cast<double>(incoming.bytes()) / static_cast<double>(bytes.size());
    EXPECT_GE(static_cast<double>(resolved) / static_cast<double>(prev.total_bytes()), arrived - 0.2);
    EXPECT_TRUE(same_bytes(state.view(), prev.view()));
  }
  EXPECT_EQ(resolved, prev.total_bytes());
  const auto writes = incoming.apply();
  ASSERT_TRUE(writes) << writes.error().message();
  EXPECT_TRUE(same_bytes(state.view(), cur.view()));
  EXPECT_EQ(state.digest(), *digest_state(cur.view()));
  std::size_t write_count = 0;
  const auto count = [&](TensorWrite&&) {
    ++write_count;
    return ok();
  };
  ASSERT_TRUE(resolve_delta(patch, prev.view(), count));
  EXPECT_EQ(writes->size(), write_count);
  EXPECT_FALSE(incoming.apply()) << "once";
  EXPECT_FALSE(incoming.add(bytes.first(1))) << "nothing comes after the trailer";
}

// The new values of a large delta are in a file until all of them are verified.
TEST(Patch, NewValuesAboveALimitAreInAFile) {
  const std::filesystem::path folder =
      std::filesystem::temp_directory_path() / fmt::format("patch_test_{}", ::getpid());
  std::filesystem::create_directories(folder);
  Random random(8);
  const std::int64_t elements = kWritesInMemoryMax / 3;  // of two bytes, in two tensors: 4/3 of the limit
  OwnedState prev = zeros({spec("a", DType::kBF16, {elements}), spec("b", DType::kBF16, {elements})});
  fill_random(prev, random);
  OwnedState cur = copy(prev.view());
  fill_random(cur, random);
  const Blob patch = delta_of(prev, cur);
  for (const bool has_folder : {true, false}) {
    OwnedState state = copy(prev.view());
    IncomingDelta incoming(state, {.threads = 2, .folder = has_folder ? folder : folder / "missing"});
    ASSERT_TRUE(incoming.add(patch));
    const auto writes = incoming.apply();
    ASSERT_TRUE(writes) << writes.error().message();
    EXPECT_TRUE(same_bytes(state.view(), cur.view()));
    OwnedState second = copy(prev.view());
    for (const TensorWrite& write : *writes)
      write.write_to(second.mutable_bytes(write.tensor).subspan(write.first_byte, write.byte_count));
    EXPECT_TRUE(same_bytes(second.view(), cur.view()));
    std::ifstream maps("/proc/self/maps");
    const std::string text{std::istreambuf_iterator<char>(maps), {}};
    EXPECT_EQ(text.find(folder.string()) != std::string::npos, has_folder);
  }
  std::filesystem::remove_all(folder);
}

// With several threads, add() hands segments over and returns, so that decoding does not delay the receiving thread.
TEST(Patch, SegmentsAreDecodedWhileOthersArrive) {
  Random random(6);
  const std::int64_t elements = 3 * (1 << 22);
  OwnedState prev = zeros({spec("a", DType::kBF16, {elements}), spec("b", DType::kBF16, {elements})});
  OwnedState cur = copy(prev.view());
  flip_elements(cur, 0.001, random);
  std::promise<void> all_added;
  std::shared_future<void> added = all_added.get_future().share();
  std::atomic<bool> timed_out = false;
  std::uint64_t resolved = 0;
  const DecodeOptions options{.threads = 3, .progress = [&](std::uint64_t done, std::uint64_t) {
                                resolved = done;
                                if (added.wait_for(std::chrono::seconds(30)) != std::future_status::ready)
                                  timed_out = true;
                              }};
  for (const bool is_snapshot : {false, true}) {
    const Blob patch = is_snapshot ? snapshot_of(cur) : delta_of(prev, cur);
    OwnedState state = copy(prev.view());
    IncomingDelta delta(state, options);
    IncomingSnapshot snapshot(options);
    const std::span<const std::byte> bytes(patch);
    for (std::size_t begin = 0; begin < bytes.size(); begin += 100'000) {
      const auto part_bytes = bytes.subspan(begin, std::min<std::size_t>(100'000, bytes.size() - begin));
      const Blob part(part_bytes.begin(), part_bytes.end());  // freed before it is decoded
      ASSERT_TRUE(is_snapshot ? snapshot.add(part) : delta.add(part));
    }
    all_added.set_value();
    if (is_snapshot)
      state = snapshot.finish().value();
    else
      ASSERT_TRUE(delta.apply());
    EXPECT_FALSE(timed_out);
    EXPECT_EQ(resolved, prev.total_bytes());
    EXPECT_TRUE(same_bytes(state.view(), cur.view()));
    all_added = {};
    added = all_added.get_future().share();
  }
}

TEST(Patch, RoundTripsTensorsOfSeveralSegments) {
  Random random(3);
  const std::int64_t elements = 2 * (1 << 22) + 5;
  OwnedState prev = zeros({spec("big", DType::kBF16, {elements}), spec("bytes", DType::kU8, {elements})});
  OwnedState cur = copy(prev.view());
  for (const std::int64_t element : {0, (1 << 22) - 1, 1 << 22, static_cast<int>(elements) - 1}) {
    cur.mutable_bytes(0)[static_cast<std::size_t>(element) * 2] = std::byte{1};
    cur.mutable_bytes(1)[static_cast<std::size_t>(element)] = std::byte{1};
  }
  cur.seal();
  check_round_trip(prev, cur, 8);
}

// If an eighth of a segment changes, the segment is encoded whole, otherwise element by element. Both give the new
// state.
TEST(Patch, DenseChangesAreEncodedAsWholeSegments) {
  Random random(31);
  for (const double density : {0.05, 0.3}) {
    SCOPED_TRACE(density);
    OwnedState prev = zeros({spec("w", DType::kBF16, {300, 700})});
    fill_random(prev, random);
    OwnedState cur = copy(prev.view());
    flip_elements(cur, density, random);
    OwnedState state = copy(prev.view());
    std::size_t writes = 0;
    const auto sink = [&](TensorWrite&& write) {
      ++writes;
      EXPECT_EQ(write.whole, density > 0.125);
      EXPECT_EQ(write.positions.empty(), write.whole);
      EXPECT_EQ(write.values.size(), write.whole ? write.byte_count : 2 * write.positions.size());
      write.write_to(state.mutable_bytes(write.tensor).subspan(write.first_byte, write.byte_count));
      return ok();
    };
    ASSERT_TRUE(resolve_delta(*encode_delta(prev.view(), cur.view()), prev.view(), sink));
    EXPECT_EQ(writes, 1u);
    EXPECT_TRUE(same_bytes(state.view(), cur.view()));
  }
}

TEST(Patch, RawVectorsKeepTheirContentWhenTheyGrow) {
  RawVector<std::uint32_t> numbers;
  for (std::uint32_t i = 0; i < 2'000'000; ++i) numbers.push_back(i);  // across the size that gets huge pages
  for (std::uint32_t i = 0; i < numbers.size(); ++i) ASSERT_EQ(numbers[i], i);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(numbers.data()) % (2u << 20), 0u);
  RawVector<std::uint32_t> other = numbers;
  numbers = {1, 2};
  other.resize(3);
  EXPECT_EQ(other, (RawVector<std::uint32_t>{0, 1, 2}));
}

// Two experts' worth of small tensors, a large one and another type between them.
StateView expert_layout() {
  StateView layout;
  for (int i = 0; i < 60; ++i)
    layout.push_back(spec(fmt::format("e{:03}", i), i == 20 ? DType::kF32 : DType::kBF16,
                          {i == 30 ? 40'000 : 50, i % 7 == 0 ? 13 : 20}));
  layout.push_back(spec("e040.empty", DType::kBF16, {0}));
  return layout;
}

// An update of some of the tensors.
OwnedState updated(const OwnedState& prev, Random& random) {
  OwnedState cur = copy(prev.view());
  for (std::size_t t = 0; t < cur.size(); ++t) {
    if (t % 3 == 1) continue;
    const auto bytes = cur.mutable_bytes(t);
    for (std::size_t i = 0; i < bytes.size(); i += 4)
      if (random.below(4) == 0) bytes[i] ^= static_cast<std::byte>(1 + random.below(3));
  }
  cur.seal();
  return cur;
}

// The types of a patch's frames: (H)eader, (S)egment, (G)roup, (T)railer.
std::string frame_types(const Blob& patch) {
  std::string types;
  for (std::size_t frame = 10; frame < patch.size();) {
    std::uint32_t body_bytes = 0;
    std::memcpy(&body_bytes, patch.data() + frame + 1, 4);
    types += static_cast<char>(patch[frame]);
    frame += 5 + body_bytes + 8;
  }
  return types;
}

TEST(Patch, SmallTensorsSideBySideAreCodedTogether) {
  Random random(61);
  OwnedState prev = zeros(expert_layout());
  fill_random(prev, random);
  const OwnedState cur = updated(prev, random);
  for (const unsigned threads : {1u, 3u}) {
    PatchStats stats;
    const Blob patch = *encode_delta(prev.view(), cur.view(), {.threads = threads}, &stats);
    // A group ends at another type, at a large tensor and at an empty one.
    EXPECT_EQ(frame_types(patch), "HGSGSGGT");
    OwnedState applied = copy(prev.view());
    ASSERT_TRUE(apply_delta(patch, applied, {.threads = threads}));
    EXPECT_TRUE(same_bytes(applied.view(), cur.view()));
    EXPECT_EQ(applied.digest(), *digest_state(cur.view()));
    OwnedState applied_in_parts = copy(prev.view());
    ASSERT_TRUE(apply_in_parts(patch, applied_in_parts, 700, random));
    EXPECT_TRUE(same_bytes(applied_in_parts.view(), cur.view()));
    EXPECT_EQ(inspect(patch)->changed, stats.changed);
  }
  // Only changed tensors are written.
  std::vector<std::size_t> written;
  const auto sink = [&](TensorWrite&& write) {
    written.push_back(write.tensor);
    return ok();
  };
  ASSERT_TRUE(resolve_delta(*encode_delta(prev.view(), cur.view()), prev.view(), sink));
  for (const std::size_t t : written) EXPECT_FALSE(std::ranges::equal(prev.bytes(t), cur.bytes(t))) << t;
}

// Tensors of all sizes that a group may have, so that they begin and end anywhere within the leaves.
TEST(Patch, GroupsOfAnySizesAndDensitiesApply) {
  Random random(63);
  for (const DType dtype : {DType::kU8, DType::kBF16, DType::kF32, DType::kF64})
    for (const double density : {0.0002, 0.02, 0.13, 0.6}) {
      SCOPED_TRACE(fmt::format("{} {}", dtype_name(dtype), density));
      StateView specs;
      std::uint64_t bytes = 0;
      while (bytes < (5u << 20)) {
        const std::uint64_t tensor_bytes_max = random.below(3) == 0 ? kGroupedBytes : 3000;
        const std::uint64_t elements = 1 + random.below(tensor_bytes_max / dtype_bytes(dtype));
        specs.push_back(spec(fmt::format("t{:05}", specs.size()), dtype, {static_cast<std::int64_t>(elements)}));
        bytes += elements * dtype_bytes(dtype);
      }
      OwnedState prev = zeros(specs);
      fill_random(prev, random);
      OwnedState cur = copy(prev.view());
      for (std::size_t t = 0; t < cur.size(); ++t)
        for (std::size_t i = 0; i < cur.bytes(t).size(); i += dtype_bytes(dtype))
          if (random.uniform() < density) cur.mutable_bytes(t)[i] ^= std::byte{1};
      cur.seal();
      PatchStats stats;
      const Blob patch = *encode_delta(prev.view(), cur.view(), {}, &stats);
      EXPECT_EQ(frame_types(patch), "HGT");
      EXPECT_EQ(stats.result, *digest_state(cur.view()));
      OwnedState state = copy(prev.view());
      ASSERT_TRUE(apply_delta(patch, state));
      EXPECT_TRUE(same_bytes(state.view(), cur.view()));
      EXPECT_EQ(state.digest(), stats.result);
    }
}

TEST(Patch, ContentInPiecesIsCodedLikeContentInOnePiece) {
  Random random(64);
  OwnedState prev = zeros({spec("all", DType::kBF16, {700'000})});
  fill_random(prev, random);
  OwnedState cur = copy(prev.view());
  for (std::size_t i = 0; i < cur.bytes(0).size(); i += 2)
    if (random.below(30) == 0) cur.mutable_bytes(0)[i] ^= std::byte{1};
  const auto in_pieces = [&](std::span<const std::byte> bytes, std::uint64_t seed) {
    Random cuts(seed);
    std::vector<std::span<const std::byte>> pieces;
    while (!bytes.empty()) {
      pieces.push_back(bytes.first(std::min<std::size_t>(2 * cuts.below(20'000), bytes.size())));
      bytes = bytes.subspan(pieces.back().size());
    }
    return Content(std::move(pieces));
  };
  SegmentEncoder encoder(1);
  const SegmentPlace place{.dtype = DType::kBF16, .row_elements = 700};
  const auto from_one_piece = encoder.encode(prev.bytes(0), cur.bytes(0), place, {}, nullptr);
  ASSERT_TRUE(from_one_piece);
  const Blob expected(from_one_piece->payload.begin(), from_one_piece->payload.end());
  const auto from_pieces = encoder.encode(in_pieces(prev.bytes(0), 1), in_pieces(cur.bytes(0), 2), place, {}, nullptr);
  ASSERT_TRUE(from_pieces);
  EXPECT_EQ(from_pieces->changed, from_one_piece->changed);
  EXPECT_TRUE(std::ranges::equal(from_pieces->payload, expected));
}

TEST(Patch, DeltasOfSmallTensorsFold) {
  Random random(62);
  OwnedState first = zeros(expert_layout());
  fill_random(first, random);
  const OwnedState second = updated(first, random), third = updated(second, random);
  const Blob a = *encode_delta(first.view(), second.view()), b = *encode_delta(second.view(), third.view());
  const std::vector<std::span<const std::byte>> both{a, b};
  const StateView base = first.view();
  for (const StateView* known_base : {static_cast<const StateView*>(nullptr), &base}) {
    Blob fold;
    const auto stats = fold_deltas(
        both,
        [&](std::span<const std::byte> part) {
          fold.insert(fold.end(), part.begin(), part.end());
          return ok();
        },
        known_base);
    ASSERT_TRUE(stats) << stats.error().message();
    OwnedState state = copy(first.view());
    ASSERT_TRUE(apply_delta(fold, state));
    EXPECT_TRUE(same_bytes(state.view(), third.view()));
  }
  // The same change with a segment for each tensor, as in version 3, applies as well, but does not fold with groups.
  Blob ungrouped;
  const PatchSink keep = [&](std::span<const std::byte> part) {
    ungrouped.insert(ungrouped.end(), part.begin(), part.end());
    return ok();
  };
  PatchWriter writer(keep);
  const StateView before = *canonical(first.view()), after = *canonical(second.view());
  ASSERT_TRUE(writer.begin(PatchKind::kDelta, before, 1));
  SegmentEncoder encoder(1);
  for (std::size_t t = 0; t < before.size(); ++t) {
    if (before[t].bytes.empty()) continue;
    const auto layer = encoder.encode(before[t].bytes, after[t].bytes, {before[t].dtype, 0, 0}, {}, nullptr);
    if (!layer) continue;
    ASSERT_TRUE(writer.add({t, 0, {*layer}}));
  }
  PatchStats stats;
  ASSERT_TRUE(encode_delta(first.view(), second.view(), {}, &stats));
  ASSERT_TRUE(writer.finish(stats));
  OwnedState state = copy(first.view());
  ASSERT_TRUE(apply_delta(ungrouped, state));
  EXPECT_TRUE(same_bytes(state.view(), second.view()));
  const std::vector<std::span<const std::byte>> mixed{ungrouped, b};
  const auto refused = fold_deltas(mixed, [](std::span<const std::byte>) { return ok(); });
  ASSERT_FALSE(refused);
  EXPECT_THAT(refused.error().message(), ::testing::HasSubstr("divide small tensors differently"));
}

TEST(Patch, LargeMemoryIsKeptForTheNextVector) {
  std::uintptr_t first = 0;
  for (int round = 0; round < 2; ++round) {
    const RawVector<std::byte> memory(3u << 20);
    const auto address = reinterpret_cast<std::uintptr_t>(memory.data());
    EXPECT_TRUE(round == 0 || address == first);
    first = address;
  }
  std::vector<RawVector<std::byte>> many(40);
  for (auto& v : many) v.resize(4u << 20);  // 160 MiB, of which 64 are kept
  many.clear();
  ByteVector zeros(5u << 20, std::byte{1});
  zeros = ByteVector(5u << 20);  // zeroed again, over other content
  EXPECT_TRUE(std::ranges::all_of(zeros, [](std::byte b) { return b == std::byte{0}; }));
}

TEST(Patch, SignedZerosAndNanPayloadsAreChanges) {
  OwnedState prev = zeros({spec("f", DType::kF32, {4}), spec("h", DType::kBF16, {4})});
  const std::uint32_t f[] = {0x00000000, 0x80000000, 0x7fc00000, 0x7fc00001};
  const std::uint16_t h[] = {0x0000, 0x8000, 0x7fc0, 0xffc1};
  std::memcpy(prev.mutable_bytes(0).data(), f, sizeof f);
  std::memcpy(prev.mutable_bytes(1).data(), h, sizeof h);
  OwnedState cur = copy(prev.view());
  const std::uint32_t f2[] = {0x80000000, 0x00000000, 0x7fc00001, 0xffc00001};
  const std::uint16_t h2[] = {0x8000, 0x0000, 0x7fc1, 0x7fc1};
  std::memcpy(cur.mutable_bytes(0).data(), f2, sizeof f2);
  std::memcpy(cur.mutable_bytes(1).data(), h2, sizeof h2);
  check_round_trip(prev, cur, 8);
}

TEST(Patch, EverySixteenBitStepIsLossless) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    OwnedState prev = zeros({spec("w", dtype, {65536})});
    OwnedState cur = zeros(prev.view());
    for (const std::uint16_t stride : {1, 3, 32768, 65535, 40503}) {
      for (unsigned i = 0; i < 65536; ++i) {
        const std::uint16_t old_bits = static_cast<std::uint16_t>(i);
        const std::uint16_t new_bits = static_cast<std::uint16_t>(i + stride);
        std::memcpy(prev.mutable_bytes(0).data() + 2 * i, &old_bits, 2);
        std::memcpy(cur.mutable_bytes(0).data() + 2 * i, &new_bits, 2);
      }
      check_round_trip(prev, cur, 65536);
    }
  }
}

TEST(Patch, BytesDoNotDependOnThreads) {
  Random random(4);
  OwnedState prev = zeros(random_layout(random, 30, 40));
  fill_random(prev, random);
  OwnedState cur = copy(prev.view());
  flip_elements(cur, 0.05, random);
  EXPECT_EQ(delta_of(prev, cur, nullptr, {.threads = 1}), delta_of(prev, cur, nullptr, {.threads = 4}));
  EXPECT_EQ(snapshot_of(cur, nullptr, {.threads = 1}), snapshot_of(cur, nullptr, {.threads = 4}));
}

TEST(Patch, EmptyStateAndUnchangedStateAreFine) {
  check_round_trip(OwnedState{}, OwnedState{}, 0);
  OwnedState state = zeros({spec("w", DType::kBF16, {1000})});
  check_round_trip(state, state, 0);
}

// As with an adapter, whose base is the same memory in all versions.
TEST(Patch, MemoryThatBothStatesShareIsNotRead) {
  Random random(11);
  OwnedState base = zeros({spec("base", DType::kBF16, {3000, 1000}), spec("small", DType::kBF16, {10})});
  OwnedState first = zeros({spec("adapter", DType::kBF16, {100, 8})});
  fill_random(base, random);
  fill_random(first, random);
  OwnedState second = copy(first.view());
  flip_elements(second, 0.3, random);
  const auto joined = [&](const OwnedState& adapter) {
    StateView state = base.view();
    state.push_back(adapter.view().front());
    return canonical(state).value();
  };
  OwnedState received = copy(joined(first));
  const Digest first_digest = *digest_state(joined(first)), second_digest = *digest_state(joined(second));

  LeafDigests leaves;
  PatchStats stats;
  ASSERT_TRUE(encode_snapshot(joined(first), {.leaves = &leaves}, &stats));
  EXPECT_EQ(stats.result, first_digest);
  // An encoder that read the base now would find other bytes.
  for (std::size_t i = 0; i < base.size(); ++i) base.mutable_bytes(i)[7] ^= std::byte{1};
  const auto patch = encode_delta(joined(first), joined(second), {.base = stats.result, .leaves = &leaves}, &stats);
  ASSERT_TRUE(patch) << patch.error().message();
  EXPECT_EQ(stats.result, second_digest);
  const Status applied = apply_delta(*patch, received);
  ASSERT_TRUE(applied) << applied.error().message();
  EXPECT_EQ(received.digest(), second_digest);
  // The next delta finds the leaves of the newest state.
  ASSERT_TRUE(encode_delta(joined(second), joined(first), {.base = stats.result, .leaves = &leaves}, &stats));
  EXPECT_EQ(stats.result, first_digest);

  // Without the digest of the base or of its leaves, all is read.
  for (std::size_t i = 0; i < base.size(); ++i) base.mutable_bytes(i)[7] ^= std::byte{1};
  leaves.clear();
  ASSERT_TRUE(encode_delta(joined(first), joined(second), {.base = first_digest, .leaves = &leaves}, &stats));
  EXPECT_EQ(stats.result, second_digest);
  ASSERT_TRUE(encode_delta(joined(second), joined(first), {.leaves = &leaves}, &stats));
  EXPECT_EQ(stats.result, first_digest);
  EXPECT_EQ(stats.base, second_digest);
}

double bytes_per_change(const PatchStats& stats) {
  return static_cast<double>(stats.patch_bytes) / static_cast<double>(stats.changed);
}

// Weights of a normal distribution. Their fp32 copies change a little and are cast to bf16 again.
TEST(Patch, ARealisticUpdateTakesLittleMoreThanItsEntropy) {
  Random random(5);
  const auto [prev, cur] = weight_update(DType::kBF16, {1024, 1024}, 2e-6, random);
  PatchStats stats, snapshot_stats;
  const Blob patch = delta_of(prev, cur, &stats);
  snapshot_of(cur, &snapshot_stats);
  EXPECT_GT(stats.density(), 0.01);
  EXPECT_LT(stats.density(), 0.1);
  const auto entropy = entropy_bound(prev.view(), cur.view(), 1);
  ASSERT_TRUE(entropy);
  EXPECT_LT(static_cast<double>(stats.patch_bytes), 1.08 * entropy->total.bytes());
  const auto info = inspect(patch);  // the encoder's own figure is about the same bound
  EXPECT_NEAR(static_cast<double>(info->bound_bits) / 8, entropy->total.bytes(), 0.05 * entropy->total.bytes());
  EXPECT_LT(static_cast<double>(snapshot_stats.patch_bytes),
            0.72 * static_cast<double>(snapshot_stats.state_bytes));  // exponents compress
}

// Rows without updates, and rows whose updates differ in size, cost less than the bound that knows exponents only.
TEST(Patch, UntouchedRowsCostAlmostNothing) {
  Random random(6);
  constexpr std::size_t kRows = 5000, kRowElements = 1000, kRowBytes = 2 * kRowElements;
  auto [prev, cur] = weight_update(DType::kBF16, {kRows, kRowElements}, 2e-6, random);
  PatchStats all_rows, some_rows;
  delta_of(prev, cur, &all_rows);
  const auto cur_bytes = cur.mutable_bytes(0);
  for (std::size_t row = 0; row < kRows; ++row)
    if (random.uniform() > 0.05)
      std::memcpy(cur_bytes.data() + row * kRowBytes, prev.bytes(0).data() + row * kRowBytes, kRowBytes);
  cur.seal();
  delta_of(prev, cur, &some_rows);
  EXPECT_LT(bytes_per_change(some_rows), 1.15 * bytes_per_change(all_rows));
  const auto entropy = entropy_bound(prev.view(), cur.view(), 1);
  ASSERT_TRUE(entropy);
  EXPECT_LT(static_cast<double>(some_rows.patch_bytes), 0.85 * entropy->total.bytes());
}

// Anonymous memory, which is allocated only when written.
class Zeros {
 public:
  explicit Zeros(std::size_t bytes)
      : bytes_(bytes),
        memory_(::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {
    EXPECT_NE(memory_, MAP_FAILED);
  }
  ~Zeros() { ::munmap(memory_, bytes_); }
  Zeros(const Zeros&) = delete;
  Zeros& operator=(const Zeros&) = delete;
  std::span<std::byte> bytes() { return {static_cast<std::byte*>(memory_), bytes_}; }

 private:
  std::size_t bytes_;
  void* memory_;
};

TEST(Patch, ATensorOfMoreThanFourBillionElements) {
  constexpr std::uint64_t kElements = (1ull << 32) + 70'000;
  Zeros before(kElements), after(kElements);
  const std::vector<std::uint64_t> changed = {0, 1ull << 31, (1ull << 32) - 1, 1ull << 32, kElements - 1};
  for (const std::uint64_t element : changed) after.bytes()[element] = std::byte{9};
  const auto state = [&](Zeros& memory) {
    return StateView{{"huge", DType::kU8, {static_cast<std::int64_t>(kElements)}, memory.bytes()}};
  };
  const auto patch = encode_delta(state(before), state(after), {.threads = 2});
  ASSERT_TRUE(patch) << patch.error().message();
  std::vector<std::uint64_t> written;
  const auto note_written = [&](TensorWrite&& write) {
    Blob part(write.byte_count);
    write.write_to(part);
    for (std::size_t i = 0; i < part.size(); ++i)
      if (part[i] == std::byte{9}) written.push_back(write.first_byte + i);
    return ok();
  };
  const auto resolved = resolve_delta(*patch, state(before), note_written, {.threads = 2});
  ASSERT_TRUE(resolved) << resolved.error().message();
  std::sort(written.begin(), written.end());
  EXPECT_EQ(written, changed);
}

TEST(Patch, TensorsThatDoNotMatchAreNamed) {
  OwnedState prev = zeros({spec("a", DType::kBF16, {2, 3}), spec("b", DType::kF32, {1})});
  const auto refusal = [&](const StateView& layout) {
    const auto patch = encode_delta(prev.view(), zeros(layout).view());
    EXPECT_FALSE(patch);
    EXPECT_EQ(patch.error().code, Code::kInvalid);
    return patch.error().detail;
  };
  EXPECT_THAT(refusal({spec("a", DType::kBF16, {2, 3})}), HasSubstr("1 gone ('b')"));
  EXPECT_THAT(refusal({spec("a", DType::kBF16, {2, 3}), spec("b", DType::kF32, {1}), spec("c", DType::kU8, {})}),
              HasSubstr("1 new ('c')"));
  EXPECT_THAT(refusal({spec("a", DType::kBF16, {3, 2}), spec("b", DType::kF32, {1})}),
              HasSubstr("1 of another type or shape ('a: BF16 [2, 3] before, BF16 ["));
  EXPECT_THAT(refusal({spec("a", DType::kF16, {2, 3}), spec("b", DType::kF32, {1})}),
              HasSubstr("1 of another type or shape ('a: BF16 [2, 3] before, F16 [2, 3] now')"));
  TensorView bad{"a", DType::kBF16, {2, 3}, {}};
  EXPECT_FALSE(encode_snapshot({bad}));
}

class Refusals : public ::testing::Test {
 protected:
  void SetUp() override {
    Random random(6);
    prev_ = zeros({spec("layer.0.w", DType::kBF16, {40, 30}), spec("layer.1.w", DType::kF32, {50}),
                   spec("s", DType::kI64, {}), spec("u", DType::kU8, {300})});
    fill_random(prev_, random);
    cur_ = copy(prev_.view());
    flip_elements(cur_, 0.1, random);
    delta_ = delta_of(prev_, cur_);
    snapshot_ = snapshot_of(cur_);
  }
  // Applies to a fresh copy of prev; checks that a failure left it alone and a success reached cur.
  Status apply(const Blob& patch) {
    OwnedState state = copy(prev_.view());
    const Digest before = state.digest();
    Status status = apply_delta(patch, state);
    EXPECT_TRUE(same_bytes(state.view(), status ? cur_.view() : prev_.view()));
    EXPECT_EQ(state.digest(), *digest_state(state.view()));
    if (!status) {
      EXPECT_EQ(state.digest(), before);
    }
    OwnedState arriving = copy(prev_.view());
    const Status in_parts = apply_in_parts(patch, arriving, 1 + random_.below(200), random_);
    EXPECT_EQ(in_parts.has_value(), status.has_value());
    if (!status && !in_parts) {
      EXPECT_EQ(in_parts.error().code, status.error().code);
    }
    EXPECT_TRUE(same_bytes(arriving.view(), state.view()));
    return status;
  }
  Random random_{8};
  OwnedState prev_, cur_;
  Blob delta_, snapshot_;
};

TEST_F(Refusals, WrongBaseIsRefusedAndTheStateUntouched) {
  OwnedState other = copy(prev_.view());
  other.mutable_bytes(3)[7] ^= std::byte{1};
  other.seal();
  const OwnedState witness = copy(other.view());
  const Status status = apply_delta(delta_, other);
  ASSERT_FALSE(status);
  EXPECT_EQ(status.error().code, Code::kStale);
  EXPECT_THAT(status.error().detail, HasSubstr(prev_.digest().hex()));
  EXPECT_TRUE(same_bytes(other.view(), witness.view()));
  // A second application has the wrong base.
  OwnedState twice = copy(prev_.view());
  ASSERT_TRUE(apply_delta(delta_, twice));
  EXPECT_EQ(apply_delta(delta_, twice).error().code, Code::kStale);
  EXPECT_TRUE(same_bytes(twice.view(), cur_.view()));
}

TEST_F(Refusals, ANotSealedStateIsHashedAgain) {
  OwnedState state = copy(prev_.view());
  const auto open = state.mutable_bytes(3);
  EXPECT_EQ(state.digest(), prev_.digest());
  open[0] ^= std::byte{1};  // after the digest was taken
  EXPECT_EQ(apply_delta(delta_, state).error().code, Code::kStale);
  open[0] ^= std::byte{1};
  EXPECT_TRUE(apply_delta(delta_, state));
}

TEST_F(Refusals, OtherModelsAndOtherKinds) {
  OwnedState other = zeros({spec("x", DType::kU8, {3})});
  EXPECT_EQ(apply_delta(delta_, other).error().code, Code::kInvalid);
  OwnedState empty;
  EXPECT_EQ(apply_delta(delta_, empty).error().code, Code::kInvalid);
  EXPECT_EQ(apply(snapshot_).error().code, Code::kInvalid);
  EXPECT_EQ(decode_snapshot(delta_).error().code, Code::kInvalid);
}

TEST_F(Refusals, AWrongResultDigestLeavesTheStateAlone) {
  constexpr std::size_t kResultFromEnd = 72;  // the trailer's second field
  Blob patch = delta_;
  patch[patch.size() - kResultFromEnd] ^= std::byte{1};
  fix_checksums(patch);
  const Status status = apply(patch);
  ASSERT_FALSE(status);
  EXPECT_EQ(status.error().code, Code::kCorrupt);
  EXPECT_THAT(status.error().detail, HasSubstr("left as it was"));
  Blob snapshot = snapshot_;
  snapshot[snapshot.size() - kResultFromEnd] ^= std::byte{1};
  fix_checksums(snapshot);
  EXPECT_EQ(decode_snapshot(snapshot).error().code, Code::kCorrupt);
}

TEST_F(Refusals, LimitsAreEnforced) {
  EXPECT_EQ(inspect(snapshot_, {.state_bytes_max = prev_.total_bytes() - 1}).error().code, Code::kExhausted);
  EXPECT_TRUE(inspect(snapshot_, {.state_bytes_max = prev_.total_bytes()}));
  EXPECT_EQ(inspect(delta_, {.tensors_max = 3}).error().code, Code::kExhausted);
  EXPECT_EQ(decode_snapshot(snapshot_, {.table_bytes_max = 10}).error().code, Code::kExhausted);
}

TEST_F(Refusals, EveryTruncationIsRefused) {
  for (std::size_t length = 0; length < delta_.size(); ++length) {
    Blob cut(delta_.begin(), delta_.begin() + static_cast<std::ptrdiff_t>(length));
    EXPECT_FALSE(apply(cut)) << length;
    fix_checksums(cut);
    EXPECT_FALSE(apply(cut)) << length << " with a right checksum";
  }
  for (std::size_t length = 0; length < snapshot_.size(); length += 7) {
    Blob cut(snapshot_.begin(), snapshot_.begin() + static_cast<std::ptrdiff_t>(length));
    fix_checksums(cut);
    EXPECT_FALSE(decode_snapshot(cut)) << length;
  }
}

TEST_F(Refusals, EveryFlippedBitIsRefusedByTheChecksum) {
  for (std::size_t i = 0; i < delta_.size(); ++i) {
    Blob damaged = delta_;
    damaged[i] ^= static_cast<std::byte>(1u << i % 8);
    EXPECT_EQ(inspect(damaged).error().code, Code::kCorrupt) << i;
  }
}

}  // namespace
}  // namespace echoline::delta

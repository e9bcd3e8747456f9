// Extraction and application on a device: on the emulated one (cuda_emulation.hpp), and on a CUDA device if the machine
// has one.
#include <xxhash.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <ostream>
#include <set>

#include "delta/cuda/device.hpp"
#include "delta/segment.hpp"
#include "tests/delta/cuda_emulation.hpp"
#include "tests/delta/delta_test_util.hpp"
#include "tests/delta/own_memory.hpp"

namespace echoline::delta::cuda {
namespace {

using namespace echoline::delta::test;
using cuda::test::EmulatedBackend;

static_assert(std::uint64_t{kTilesPerSegment} * kTileBytes == kSegmentBytes);

template <class T>
T must(Result<T> result) {
  EXPECT_TRUE(result) << (result ? "" : result.error().message());
  return std::move(result).value();
}
void must(const Status& status) { EXPECT_TRUE(status) << (status ? "" : status.error().message()); }

// Writes of the differing elements, found by comparing every element.
std::vector<TensorWrite> differences(const StateView& prev, const StateView& cur) {
  std::vector<TensorWrite> writes;
  for (std::size_t t = 0; t < cur.size(); ++t) {
    const std::size_t size = dtype_bytes(cur[t].dtype);
    for (std::uint64_t first = 0; first < cur[t].bytes.size(); first += kSegmentBytes) {
      TensorWrite write;
      write.tensor = t;
      write.first_byte = first;
      write.byte_count = std::min<std::uint64_t>(kSegmentBytes, cur[t].bytes.size() - first);
      write.element_bytes = size;
      RawVector<std::uint32_t> positions;
      RawVector<std::byte> values;
      for (std::uint64_t offset = 0; offset < write.byte_count; offset += size) {
        const auto old = prev[t].bytes.subspan(first + offset, size), now = cur[t].bytes.subspan(first + offset, size);
        if (std::memcmp(old.data(), now.data(), size) == 0) continue;
        positions.push_back(static_cast<std::uint32_t>(offset / size));
        values.insert(values.end(), now.begin(), now.end());
      }
      if (positions.empty()) continue;
      writes.push_back(in_own_memory(write, std::move(positions), std::move(values)));
    }
  }
  return writes;
}

void expect_same(const std::vector<TensorWrite>& found, const std::vector<TensorWrite>& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    EXPECT_EQ(found[i].tensor, expected[i].tensor);
    EXPECT_EQ(found[i].first_byte, expected[i].first_byte);
    EXPECT_EQ(found[i].byte_count, expected[i].byte_count);
    EXPECT_EQ(found[i].element_bytes, expected[i].element_bytes);
    EXPECT_FALSE(found[i].whole);
    EXPECT_TRUE(std::ranges::equal(found[i].positions, expected[i].positions)) << "write " << i;
    EXPECT_TRUE(std::ranges::equal(found[i].values, expected[i].values)) << "write " << i;
  }
}

struct Versions {
  OwnedState prev, cur;
};

Versions versions(const StateView& layout, double density, Random& random) {
  Versions v{zeros(layout), {}};
  fill_random(v.prev, random);
  v.cur = copy(v.prev.view());
  flip_elements(v.cur, density, random);
  return v;
}

// Tensors of every element size: empty, of less than a vector, of less than a leaf, and of several segments.
StateView mixed_layout() {
  return {spec("a.empty", DType::kBF16, {0, 7}),    spec("b.scalar", DType::kF64, {}),
          spec("c.bytes", DType::kU8, {241}),       spec("d.odd", DType::kI8, {65'537}),
          spec("e.half", DType::kBF16, {123, 457}), spec("f.leaves", DType::kF16, {65'536}),
          spec("g.float", DType::kF32, {100'003}),  spec("h.double", DType::kF64, {30'001}),
          spec("i.long", DType::kBF16, {4'200'001})};
}

// ---- the device code alone ----

TEST(CudaHash, IsXxh3ForEveryLength) {
  Random random(1);
  const std::size_t bytes_max = 64u << 10;
  std::byte* data = static_cast<std::byte*>(std::aligned_alloc(64, bytes_max));
  for (std::size_t i = 0; i < bytes_max; ++i) data[i] = static_cast<std::byte>(random.next());
  std::set<std::uint32_t> lengths{65'535, 65'536, 64'513, 64'512, 65'472, 65'473};
  for (std::uint32_t bytes = kShortLeafBytes + 1; bytes <= 4200; ++bytes) lengths.insert(bytes);
  for (int i = 0; i < 300; ++i) lengths.insert(static_cast<std::uint32_t>(random.between(4201, 65'535)));
  cuda::test::LoopWarp warp;
  for (const std::uint32_t bytes : lengths) {
    std::uint64_t words[2];
    hash_leaf(warp, data, bytes, words);
    XXH128_canonical_t expected;
    XXH128_canonicalFromHash(&expected, XXH3_128bits(data, bytes));
    ASSERT_EQ(std::memcmp(words, expected.digest, sizeof words), 0) << bytes << " bytes";
  }
  std::free(data);
}

// ---- the whole codec, on both kinds of device ----

struct Backend {
  std::string name;
  std::function<Result<Device>(const DeviceOptions&)> open;
};
void PrintTo(const Backend& backend, std::ostream* out) { *out << backend.name; }

class OnDevice : public testing::TestWithParam<Backend> {
 protected:
  void SetUp() override {
    if (GetParam().name != "cuda") return;
    if (const Status status = device_available(); !status)
      GTEST_SKIP() << "no CUDA device to run on: " << status.error().message();
  }
  Device open(const DeviceOptions& options = {}) { return must(GetParam().open(options)); }
};

const auto kBackends =
    testing::Values(Backend{"emulated",
                            [](const DeviceOptions& options) -> Result<Device> {
                              return Device(std::make_shared<EmulatedBackend>(7), options);
                            }},
                    Backend{"cuda", [](const DeviceOptions& options) { return Device::open(options); }});
INSTANTIATE_TEST_SUITE_P(Cuda, OnDevice, kBackends, [](const auto& test) { return test.param.name; });

// A sink that appends the changes to `writes`.
ChangeSink sink_into(std::vector<TensorWrite>& writes) {
  return [&](std::span<const ChangedPart> parts) {
    for (const ChangedPart& p : parts) {
      TensorWrite write;
      write.tensor = p.tensor;
      write.first_byte = p.first_byte;
      write.byte_count = p.byte_count;
      write.element_bytes = p.element_bytes;
      writes.push_back(
          in_own_memory(write, {p.positions.begin(), p.positions.end()}, {p.values.begin(), p.values.end()}));
    }
    return ok();
  };
}

std::vector<TensorWrite> extracted(Device& device, const DeviceState& prev, const DeviceState& cur) {
  std::vector<TensorWrite> writes;
  const ExtractStats stats = must(device.extract(prev, cur, sink_into(writes)));
  std::uint64_t changed = 0;
  for (const TensorWrite& write : writes) changed += write.positions.size();
  EXPECT_EQ(stats.changed, changed);
  return writes;
}

TEST_P(OnDevice, WeightsGoThereAndBack) {
  Random random(2);
  const Versions v = versions(mixed_layout(), 0.5, random);
  Device device = open();
  DeviceState a = must(device.upload(v.prev.view())), b = must(device.upload(v.cur.view()));
  EXPECT_EQ(a.total_bytes(), v.prev.total_bytes());
  EXPECT_TRUE(same_bytes(must(device.download(a)).view(), v.prev.view()));
  must(device.copy(b, a));
  EXPECT_TRUE(same_bytes(must(device.download(a)).view(), v.cur.view()));
  must(device.assign(a, v.prev.view()));
  EXPECT_TRUE(same_bytes(must(device.download(a)).view(), v.prev.view()));
  EXPECT_TRUE(same_bytes(must(device.download(b)).view(), v.cur.view()));
}

TEST_P(OnDevice, DigestsAreThoseOfTheCpu) {
  Random random(3);
  Device device = open();
  OwnedState mixed = zeros(mixed_layout());
  fill_random(mixed, random);
  DeviceState state = must(device.upload(mixed.view()));
  EXPECT_EQ(must(device.digest(state)), mixed.digest());
  EXPECT_EQ(must(device.digest(state)), mixed.digest());  // from cached leaf digests
  fill_random(mixed, random);
  must(device.assign(state, mixed.view()));
  EXPECT_EQ(must(device.digest(state)), mixed.digest());
  for (int round = 0; round < 30; ++round) {
    OwnedState on_host = zeros(random_layout(random, 8, 60));
    fill_random(on_host, random);
    DeviceState on_device = must(device.upload(on_host.view()));
    EXPECT_EQ(must(device.digest(on_device)), on_host.digest());
  }
  StateView lengths;  // around the limits of XXH3's cases
  for (const std::int64_t bytes :
       {1, 3, 4, 8, 9, 16, 17, 128, 129, 240, 241, 255, 256, 257, 1023, 1024, 1025, 1088, 1089})
    for (const std::int64_t leaves : {0, 1})
      lengths.push_back(spec(fmt::format("{:04}.{}", bytes, leaves), DType::kU8,
                             {bytes + leaves * static_cast<std::int64_t>(kLeafBytes)}));
  OwnedState on_host = zeros(lengths);
  fill_random(on_host, random);
  DeviceState on_device = must(device.upload(on_host.view()));
  EXPECT_EQ(must(device.digest(on_device)), on_host.digest());
}

TEST_P(OnDevice, FindsTheSameDifferencesAsTheCpu) {
  Random random(4);
  Device device = open();
  for (const double density : {0.0, 1e-5, 0.0144, 0.5, 1.0}) {
    SCOPED_TRACE(density);
    const Versions v = versions(mixed_layout(), density, random);
    const DeviceState prev = must(device.upload(v.prev.view())), cur = must(device.upload(v.cur.view()));
    expect_same(extracted(device, prev, cur), differences(v.prev.view(), v.cur.view()));
  }
  for (int round = 0; round < 50; ++round) {
    const Versions v = versions(random_layout(random, 6, 50), random.uniform(), random);
    const DeviceState prev = must(device.upload(v.prev.view())), cur = must(device.upload(v.cur.view()));
    expect_same(extracted(device, prev, cur), differences(v.prev.view(), v.cur.view()));
  }
}

TEST_P(OnDevice, SmallBuffersTakeMorePasses) {
  Random random(5);
  StateView layout{spec("a", DType::kU8, {3'000'000}), spec("b", DType::kBF16, {300'000}),
                   spec("c", DType::kF32, {100'000}), spec("d", DType::kI64, {10'000})};
  for (int i = 0; i < 9; ++i) layout.push_back(spec(fmt::format("e{}", i), DType::kU8, {500'000}));
  const Versions v = versions(layout, 0.9, random);
  for (const std::uint64_t batch_bytes : {1u, 1u << 22, 1u << 30}) {
    SCOPED_TRACE(batch_bytes);
    DeviceOptions options;
    options.batch_bytes = batch_bytes;  // from every piece on its own to more than there is room for
    options.changes_bytes = 1;          // room for one piece
    Device device = open(options);
    const DeviceState prev = must(device.upload(v.prev.view())), cur = must(device.upload(v.cur.view()));
    expect_same(extracted(device, prev, cur), differences(v.prev.view(), v.cur.view()));
  }
}

TEST_P(OnDevice, SingleBitsCount) {
  Random random(6);
  Device device = open();
  OwnedState zero = zeros({spec("x", DType::kBF16, {70'000})});
  OwnedState other = copy(zero.view());
  other.mutable_bytes(0)[1] = std::byte{0x80};           // -0
  other.mutable_bytes(0)[139'998] = std::byte{0x01};     // a denormal
  other.mutable_bytes(0)[32'768 * 2] = std::byte{0x01};  // first element behind a leaf
  other.seal();
  const DeviceState prev = must(device.upload(zero.view())), cur = must(device.upload(other.view()));
  const auto writes = extracted(device, prev, cur);
  ASSERT_EQ(writes.size(), 1u);
  EXPECT_TRUE(std::ranges::equal(writes[0].positions, RawVector<std::uint32_t>{0, 32'768, 69'999}));
}

// The learner's use: no dense weights leave the device, and the patch equals the one made on the CPU.
TEST_P(OnDevice, AMirrorFollows) {
  Random random(7);
  Device device = open();
  const Versions v = versions(mixed_layout(), 0.02, random);
  const DeviceState prev = must(device.upload(v.prev.view())), cur = must(device.upload(v.cur.view()));
  OwnedState mirror = copy(v.prev.view());
  for (const TensorWrite& write : extracted(device, prev, cur))
    write.write_to(mirror.mutable_bytes(write.tensor).subspan(write.first_byte, write.byte_count));
  mirror.seal();
  EXPECT_TRUE(same_bytes(mirror.view(), v.cur.view()));
  EXPECT_EQ(must(encode_delta(v.prev.view(), mirror.view())), must(encode_delta(v.prev.view(), v.cur.view())));
}

// The worker's use.
TEST_P(OnDevice, AppliesDeltas) {
  Random random(8);
  Device device = open();
  Versions v = versions(mixed_layout(), 0.02, random);
  DeviceState state = must(device.upload(v.prev.view()));
  for (const double density : {0.02, 0.0001, 0.9, 0.0}) {
    SCOPED_TRACE(density);
    const Blob patch = must(encode_delta(v.prev.view(), v.cur.view()));
    std::vector<TensorWrite> writes;
    const PatchInfo info = must(resolve_delta(patch, v.prev.view(), [&](TensorWrite&& write) {
      writes.push_back(std::move(write));
      return ok();
    }));
    const ApplyStats stats = must(device.apply(writes, info.result, state));
    EXPECT_GE(stats.changed, info.changed);
    EXPECT_TRUE(same_bytes(must(device.download(state)).view(), v.cur.view()));
    EXPECT_EQ(must(device.digest(state)), v.cur.digest());
    v.prev = copy(v.cur.view());
    flip_elements(v.cur, density, random);
  }
}

TEST_P(OnDevice, HashesOnlyChangedLeaves) {
  Random random(9);
  Device device = open();
  Versions v = versions({spec("x", DType::kBF16, {10 * 32'768 + 5})}, 0, random);
  v.cur.mutable_bytes(0)[3 * kLeafBytes] ^= std::byte{1};
  v.cur.mutable_bytes(0)[10 * kLeafBytes + 9] ^= std::byte{1};
  v.cur.seal();
  DeviceState state = must(device.upload(v.prev.view()));
  EXPECT_EQ(must(device.digest(state)), v.prev.digest());
  const auto writes = differences(v.prev.view(), v.cur.view());
  EXPECT_EQ(must(device.apply(writes, v.cur.digest(), state)).hashed_bytes, kLeafBytes + 10);
  const auto reverse_writes = differences(v.cur.view(), v.prev.view());
  state.forget_leaf_digests();
  EXPECT_EQ(must(device.apply(reverse_writes, v.prev.digest(), state)).hashed_bytes, state.total_bytes());
}

// Parts of every kind that the interface allows: whole, at odd places, with positions and writes in any order.
TEST_P(OnDevice, AppliesWritesOfEveryKind) {
  Random random(10);
  Device device = open();
  for (int round = 0; round < 40; ++round) {
    const Versions v = versions(
        {spec("a", DType::kU8, {random.between(1, 70'000)}), spec("b", DType::kBF16, {random.between(1, 70'000)}),
         spec("c", DType::kF64, {random.between(1, 9'000)})},
        random.uniform(), random);
    std::vector<TensorWrite> writes;
    const StateView cur = v.cur.view();
    for (std::size_t t = 0; t < cur.size(); ++t) {
      const std::uint64_t size = dtype_bytes(cur[t].dtype), elements = cur[t].bytes.size() / size;
      for (std::uint64_t first = 0; first < elements;) {
        const std::uint64_t count = 1 + random.below(elements - first);
        TensorWrite write;
        write.tensor = t;
        write.first_byte = first * size;
        write.byte_count = count * size;
        write.element_bytes = size;
        write.whole = random.below(2) == 0;
        const auto part = cur[t].bytes.subspan(write.first_byte, write.byte_count);
        if (write.whole) {
          write = in_own_memory(write, {}, {part.begin(), part.end()});
        } else {
          RawVector<std::uint32_t> order(count);
          for (std::uint32_t i = 0; i < count; ++i) order[i] = i;
          if (random.below(2) == 0)
            for (std::uint64_t i = count; i > 1; --i) std::swap(order[i - 1], order[random.below(i)]);
          RawVector<std::byte> values;
          for (const std::uint32_t i : order)
            values.insert(values.end(), part.begin() + static_cast<std::ptrdiff_t>(i * size),
                          part.begin() + static_cast<std::ptrdiff_t>((i + 1) * size));
          write = in_own_memory(write, std::move(order), std::move(values));
        }
        writes.push_back(std::move(write));
        first += count;
      }
    }
    for (std::size_t i = writes.size(); i > 1; --i) std::swap(writes[i - 1], writes[random.below(i)]);
    DeviceState state = must(device.upload(v.prev.view()));
    must(device.apply(writes, digest_state(v.cur.view()).value(), state));
    EXPECT_TRUE(same_bytes(must(device.download(state)).view(), v.cur.view()));
  }
}

// More changes than the pinned memory for transfers holds.
TEST_P(OnDevice, ManyChangesTravelInTurns) {
  Random random(26);
  DeviceOptions options;
  options.threads = 3;
  Device device = open(options);
  constexpr std::uint32_t kElements = 14u << 20;  // positions and values take 70 MiB
  OwnedState next = zeros({spec("x", DType::kU8, {kElements})});
  DeviceState state = must(device.upload(next.view()));
  RawVector<std::uint32_t> positions(kElements);
  RawVector<std::byte> values(kElements);
  std::iota(positions.begin(), positions.end(), 0u);
  for (std::uint32_t i = 0; i < kElements; ++i)
    next.mutable_bytes(0)[i] = values[i] = static_cast<std::byte>(1 + i % 251);
  const TensorWrite write = in_own_memory({.tensor = 0,
                                           .first_byte = 0,
                                           .byte_count = kElements,
                                           .element_bytes = 1,
                                           .whole = false,
                                           .positions = {},
                                           .values = {},
                                           .memory = {}},
                                          std::move(positions), std::move(values));
  next.seal();
  must(device.apply({&write, 1}, next.digest(), state));
  EXPECT_TRUE(same_bytes(must(device.download(state)).view(), next.view()));
}

TEST_P(OnDevice, AWrongResultPutsTheOldValuesBack) {
  Random random(11);
  Device device = open();
  Versions v = versions(mixed_layout(), 0.1, random);
  for (const bool is_digest_known : {false, true}) {
    DeviceState state = must(device.upload(v.prev.view()));
    if (is_digest_known) (void)must(device.digest(state));
    const auto writes = differences(v.prev.view(), v.cur.view());
    const auto failed = device.apply(writes, v.prev.digest(), state);
    ASSERT_FALSE(failed);
    EXPECT_EQ(failed.error().code, Code::kCorrupt);
    EXPECT_TRUE(same_bytes(must(device.download(state)).view(), v.prev.view()));
    EXPECT_EQ(must(device.digest(state)), v.prev.digest());
    must(device.apply(writes, v.cur.digest(), state));
    EXPECT_EQ(must(device.digest(state)), v.cur.digest());
  }
}

TEST_P(OnDevice, AnotherBaseIsNoticed) {
  Random random(12);
  Device device = open();
  Versions v = versions({spec("x", DType::kBF16, {100'000})}, 0.01, random);
  OwnedState other = copy(v.prev.view());
  const auto writes = differences(v.prev.view(), v.cur.view());
  std::size_t unwritten = 0;  // an element that no write puts right
  while (std::binary_search(writes[0].positions.begin(), writes[0].positions.end(), unwritten)) ++unwritten;
  other.mutable_bytes(0)[2 * unwritten] ^= std::byte{1};
  other.seal();
  DeviceState state = must(device.upload(other.view()));
  const auto failed = device.apply(writes, v.cur.digest(), state);
  ASSERT_FALSE(failed);
  EXPECT_EQ(failed.error().code, Code::kCorrupt);
  EXPECT_TRUE(same_bytes(must(device.download(state)).view(), other.view()));
}

TEST_P(OnDevice, UnsoundWritesChangeNothing) {
  Random random(13);
  Device device = open();
  const Versions v = versions({spec("x", DType::kBF16, {1000}), spec("y", DType::kU8, {1000})}, 0.3, random);
  DeviceState state = must(device.upload(v.prev.view()));
  const auto refused = [&](std::string_view why, const std::function<void(std::vector<TensorWrite>&)>& spoil) {
    auto writes = differences(v.prev.view(), v.cur.view());
    spoil(writes);
    const auto failed = device.apply(writes, digest_state(v.cur.view()).value(), state);
    ASSERT_FALSE(failed) << why;
    EXPECT_EQ(failed.error().code, Code::kInvalid);
    EXPECT_NE(failed.error().detail.find(why), std::string::npos) << failed.error().detail;
    EXPECT_TRUE(same_bytes(must(device.download(state)).view(), v.prev.view()));
  };
  refused("is for tensor 2, the state has 2", [](auto& w) { w[1].tensor = 2; });
  refused("the tensor's have 1", [](auto& w) { w[0].tensor = 1; });
  refused("the tensor has 2000", [](auto& w) { w[0].byte_count = 2002; });
  refused("the tensor has 2000", [](auto& w) { w[0].first_byte = ~0ull - 1; });
  refused("the tensor has 2000", [](auto& w) { w[0].byte_count = ~0ull - 1; });
  refused("not whole elements", [](auto& w) { w[0].byte_count -= 1; });
  refused("bytes of values", [](auto& w) { w[0].values = w[0].values.first(w[0].values.size() - 1); });
  refused("bytes of values", [](auto& w) { w[0].whole = true; });
  refused("names element 1000 of 1000", [](auto& w) {
    RawVector<std::uint32_t> positions(w[0].positions.begin(), w[0].positions.end());
    positions.back() = 1000;
    w[0] = in_own_memory(w[0], std::move(positions), {w[0].values.begin(), w[0].values.end()});
  });
  refused("twice", [](auto& w) {
    RawVector<std::uint32_t> positions(w[0].positions.begin(), w[0].positions.end());
    positions[5] = positions[9];
    w[0] = in_own_memory(w[0], std::move(positions), {w[0].values.begin(), w[0].values.end()});
  });
  refused("overlap", [](auto& w) { w.push_back(w[0]); });
  refused("overlap", [](auto& w) {
    w.push_back(in_own_memory({.tensor = 0,
                               .first_byte = 1998,
                               .byte_count = 2,
                               .element_bytes = 2,
                               .whole = true,
                               .positions = {},
                               .values = {},
                               .memory = {}},
                              {}, {std::byte{1}, std::byte{2}}));
    std::swap(w.front(), w.back());
  });
}

TEST_P(OnDevice, StatesMustBeOfOneModelAndDevice) {
  Random random(14);
  Device device = open(), second = open();
  const Versions v = versions({spec("x", DType::kBF16, {100})}, 1, random);
  OwnedState longer = zeros({spec("x", DType::kBF16, {101})});
  OwnedState renamed = zeros({spec("y", DType::kBF16, {100})});
  OwnedState empty = zeros({});
  DeviceState state = must(device.upload(v.prev.view()));
  const ChangeSink sink = [](std::span<const ChangedPart>) { return ok(); };
  for (const OwnedState* other : {&longer, &renamed, &empty}) {
    DeviceState other_state = must(device.upload(other->view()));
    EXPECT_EQ(device.extract(state, other_state, sink).error().code, Code::kInvalid);
    EXPECT_EQ(device.copy(other_state, state).error().code, Code::kInvalid);
    EXPECT_EQ(device.assign(state, other->view()).error().code, Code::kInvalid);
  }
  EXPECT_EQ(second.download(state).error().code, Code::kInvalid);
  EXPECT_EQ(second.digest(state).error().code, Code::kInvalid);
  EXPECT_TRUE(same_bytes(must(device.download(state)).view(), v.prev.view()));
}

TEST_P(OnDevice, AnErrorOfTheSinkEndsExtraction) {
  Random random(15);
  DeviceOptions options;
  options.batch_bytes = 1;  // the sink is called for every piece
  Device device = open(options);
  const Versions v = versions(mixed_layout(), 0.1, random);
  const DeviceState prev = must(device.upload(v.prev.view())), cur = must(device.upload(v.cur.view()));
  int calls = 0;
  const auto failed = device.extract(prev, cur, [&](std::span<const ChangedPart>) -> Status {
    return ++calls < 2 ? ok() : Status(fail(Code::kCancelled, "test", "enough"));
  });
  ASSERT_FALSE(failed);
  EXPECT_EQ(failed.error().code, Code::kCancelled);
  EXPECT_EQ(calls, 2);
  expect_same(extracted(device, prev, cur), differences(v.prev.view(), v.cur.view()));
}

// Attaches to memory that another owner allocated, here another state.
TEST_P(OnDevice, AttachesToExistingMemory) {
  Random random(16);
  Device device = open();
  Versions v = versions({spec("a", DType::kU8, {1000}), spec("b", DType::kBF16, {50'000})}, 0.1, random);
  const DeviceState owner = must(device.upload(v.prev.view()));
  StateView addresses = owner.layout();
  for (std::size_t i = 0; i < addresses.size(); ++i) addresses[i].bytes = {owner.address(i), v.prev.bytes(i).size()};
  DeviceState state = must(device.attach(addresses));
  EXPECT_EQ(must(device.digest(state)), v.prev.digest());
  must(device.apply(differences(v.prev.view(), v.cur.view()), v.cur.digest(), state));
  EXPECT_TRUE(same_bytes(must(device.download(owner)).view(), v.cur.view()));
  const DeviceState copied = must(device.upload(v.prev.view()));
  must(device.copy(copied, state));
  EXPECT_TRUE(same_bytes(must(device.download(owner)).view(), v.prev.view()));

  addresses[0].bytes = addresses[0].bytes.subspan(1, 999);
  addresses[0].shape = {999};
  EXPECT_NE(device.attach(addresses).error().detail.find("multiple of 16"), std::string::npos);
  alignas(16) std::array<std::byte, 999> on_host{};
  addresses[0].bytes = on_host;
  EXPECT_EQ(device.attach(addresses).error().code, Code::kInvalid);
}

TEST_P(OnDevice, ChangesBeyondTheLimitAreRefused) {
  Random random(17);
  DeviceOptions options;
  options.apply_bytes_max = 1000;
  Device device = open(options);
  Versions v = versions({spec("x", DType::kBF16, {1000})}, 0.5, random);
  DeviceState state = must(device.upload(v.prev.view()));
  const auto failed = device.apply(differences(v.prev.view(), v.cur.view()), v.cur.digest(), state);
  ASSERT_FALSE(failed);
  EXPECT_EQ(failed.error().code, Code::kExhausted);
  EXPECT_TRUE(same_bytes(must(device.download(state)).view(), v.prev.view()));
}

// ---- failures, on the emulated device only ----

struct Emulated {
  std::shared_ptr<EmulatedBackend> backend = std::make_shared<EmulatedBackend>(18);
  Device device{backend, {}};
};

// If any call fails, and any number of calls after it, the content is unchanged or the state reports that it is torn.
TEST(CudaFailures, ApplicationIsAllOrNothing) {
  Random random(19);
  Versions v = versions({spec("a", DType::kU8, {5000}), spec("b", DType::kBF16, {40'000})}, 0.1, random);
  const auto writes = differences(v.prev.view(), v.cur.view());
  const Digest before = v.prev.digest(), after = v.cur.digest();
  std::set<std::string> outcomes;
  for (const std::uint64_t failures : {std::uint64_t{1}, std::uint64_t{2}, std::uint64_t{3}, EmulatedBackend::kNever}) {
    for (std::uint64_t calls = 0;; ++calls) {
      SCOPED_TRACE(fmt::format("{} failures after {} calls", failures, calls));
      Emulated e;
      DeviceState state = must(e.device.upload(v.prev.view()));
      e.backend->fail_after(calls, failures);
      const bool applied = e.device.apply(writes, after, state).has_value();
      e.backend->stop_failing();
      const auto content = e.device.download(state);
      if (!content) {
        ASSERT_FALSE(applied);
        outcomes.insert("torn");
        EXPECT_NE(content.error().detail.find("assign()"), std::string::npos) << content.error().message();
        EXPECT_FALSE(e.device.digest(state));
        EXPECT_FALSE(e.device.apply(writes, after, state));
        must(e.device.assign(state, v.prev.view()));
        must(e.device.apply(writes, after, state));
        continue;
      }
      outcomes.insert(applied ? "applied" : "refused");
      ASSERT_TRUE(same_bytes(content->view(), applied ? v.cur.view() : v.prev.view()));
      ASSERT_EQ(must(e.device.digest(state)), applied ? after : before);
      if (applied) break;
    }
  }
  EXPECT_EQ(outcomes, (std::set<std::string>{"applied", "refused", "torn"}));
}

TEST(CudaFailures, AFailedExtractionIsAnError) {
  Random random(20);
  const Versions v = versions({spec("a", DType::kU8, {200'000}), spec("b", DType::kBF16, {100'000})}, 0.9, random);
  for (std::uint64_t calls = 0;; ++calls) {
    auto backend = std::make_shared<EmulatedBackend>(21);
    DeviceOptions options;
    options.batch_bytes = 1;
    options.changes_bytes = 1;
    Device device(backend, options);
    const DeviceState prev = must(device.upload(v.prev.view())), cur = must(device.upload(v.cur.view()));
    std::vector<TensorWrite> writes;
    backend->fail_after(calls, 1);
    const auto result = device.extract(prev, cur, sink_into(writes));
    backend->stop_failing();
    expect_same(extracted(device, prev, cur), differences(v.prev.view(), v.cur.view()));  // the device is fit for more
    if (!result) continue;
    expect_same(writes, differences(v.prev.view(), v.cur.view()));
    EXPECT_GE(backend->kernels_run(), 8u);
    break;
  }
}

TEST(CudaFailures, FillingLeavesNoHalfStateBehind) {
  Random random(22);
  const Versions v = versions({spec("a", DType::kU8, {5000}), spec("b", DType::kBF16, {4000})}, 0.5, random);
  Emulated e;
  const DeviceState source = must(e.device.upload(v.cur.view()));
  for (const bool on_device : {false, true}) {
    for (std::uint64_t calls = 0;; ++calls) {
      DeviceState state = must(e.device.upload(v.prev.view()));
      e.backend->fail_after(calls, 1);
      const bool filled =
          on_device ? e.device.copy(source, state).has_value() : e.device.assign(state, v.cur.view()).has_value();
      e.backend->stop_failing();
      EXPECT_EQ(e.device.download(state).has_value(), filled);
      if (filled) break;
      EXPECT_EQ(e.device.extract(source, state, [](std::span<const ChangedPart>) { return ok(); }).error().code,
                Code::kInvalid);
      must(e.device.copy(source, state));
      EXPECT_TRUE(same_bytes(must(e.device.download(state)).view(), v.cur.view()));
    }
  }
}

TEST(CudaFailures, TooLittleMemoryChangesNothing) {
  Random random(23);
  Versions v = versions({spec("b", DType::kBF16, {40'000})}, 0.1, random);
  const auto writes = differences(v.prev.view(), v.cur.view());
  for (std::uint64_t memory_bytes = 0;; memory_bytes = memory_bytes * 2 + 1000) {
    Emulated e;
    DeviceState state = must(e.device.upload(v.prev.view()));
    e.backend->limit_memory(memory_bytes);
    const auto applied = e.device.apply(writes, v.cur.digest(), state);
    e.backend->limit_memory(EmulatedBackend::kNever);
    ASSERT_TRUE(same_bytes(must(e.device.download(state)).view(), applied ? v.cur.view() : v.prev.view()));
    if (applied) break;
    EXPECT_EQ(applied.error().code, Code::kExhausted);
  }
}

TEST(CudaMemory, BuffersAreKeptAndFreed) {
  Random random(24);
  Versions v = versions(mixed_layout(), 0.01, random);
  const auto writes = differences(v.prev.view(), v.cur.view()),
             reverse_writes = differences(v.cur.view(), v.prev.view());
  auto backend = std::make_shared<EmulatedBackend>(25);
  {
    Device device(backend, {});
    DeviceState prev = must(device.upload(v.prev.view())), cur = must(device.upload(v.cur.view()));
    std::size_t blocks_before = 0;  // after the previous round
    for (int round = 0; round < 3; ++round) {
      (void)extracted(device, prev, cur);
      must(device.apply(writes, v.cur.digest(), prev));
      must(device.apply(reverse_writes, v.prev.digest(), prev));
      EXPECT_TRUE(round == 0 || backend->blocks_allocated() == blocks_before);
      blocks_before = backend->blocks_allocated();
    }
  }
  EXPECT_EQ(backend->blocks_allocated(), 0u);
}

TEST(CudaAvailability, NamesTheReason) {
  const Status status = device_available();
  const auto device = Device::open();
  EXPECT_EQ(status.has_value(), device.has_value());
  if (status) return;
  EXPECT_EQ(device.error().message(), status.error().message());
  EXPECT_TRUE(status.error().code == Code::kInvalid || status.error().code == Code::kUnavailable);
  DeviceOptions absent_device;
  absent_device.ordinal = 1'000'000;
  EXPECT_FALSE(Device::open(absent_device));
}

}  // namespace
}  // namespace echoline::delta::cuda

// The codec against delta/FORMAT.md: a second decoder written from the description, old files, and every instruction
// set.
#include <gtest/gtest.h>

#include <cmath>

#include "base/files.hpp"
#include "delta/block.hpp"
#include "delta_test_util.hpp"
#include "reference_decoder.hpp"

namespace echoline::delta {
namespace {

using namespace test;

// The state in the reference decoder's form.
reference::State reference_state(const StateView& state) {
  reference::State result;
  for (const TensorView& t : state) {
    reference::Tensor tensor{t.name, static_cast<int>(t.dtype), {}, {}};
    for (const std::int64_t dim : t.shape) tensor.shape.push_back(static_cast<std::uint64_t>(dim));
    for (const std::byte b : t.bytes) tensor.data.push_back(static_cast<std::uint8_t>(b));
    result.push_back(std::move(tensor));
  }
  return result;
}

void expect_same(const reference::State& actual, const StateView& expected_view) {
  const reference::State expected = reference_state(expected_view);
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i) {
    EXPECT_EQ(actual[i].name, expected[i].name);
    EXPECT_TRUE(actual[i].data == expected[i].data) << actual[i].name;
  }
}

TEST(Format, ASecondDecoderWrittenFromTheDescriptionAgrees) {
  Random random(21);
  for (int round = 0; round < 60; ++round) {
    SCOPED_TRACE(round);
    OwnedState prev = zeros(random_layout(random, 6, 40));
    fill_random(prev, random);
    OwnedState cur = copy(prev.view());
    flip_elements(cur, std::pow(random.uniform(), 3), random);
    const Blob patch = *encode_delta(prev.view(), cur.view());
    expect_same(reference::decode(patch, reference_state(prev.view())), cur.view());
    expect_same(reference::decode(*encode_snapshot(cur.view()), {}), cur.view());
  }
}

TEST(Format, ASecondDecoderAgreesOnUpdatesOfWeights) {
  Random random(22);
  for (const auto& [dtype, step] :
       {std::pair(DType::kBF16, 2e-6), std::pair(DType::kF16, 1e-4), std::pair(DType::kF32, 1e-9),
        std::pair(DType::kBF16, 1e-3), std::pair(DType::kF64, 1e-17)}) {
    for (const std::int64_t row : {1, 100, 1500, 6000, 40000}) {
      SCOPED_TRACE(fmt::format("{} rows of {}", dtype_name(dtype), row));
      const auto [prev, cur] = weight_update(dtype, {120000 / row, row}, step, random);
      const Blob patch = *encode_delta(prev.view(), cur.view());
      expect_same(reference::decode(patch, reference_state(prev.view())), cur.view());
    }
  }
}

TEST(Format, ASecondDecoderAgreesOnFolds) {
  Random random(23);
  OwnedState first = zeros({spec("w", DType::kBF16, {300, 40}), spec("x", DType::kU8, {70000})});
  fill_random(first, random);
  OwnedState last = copy(first.view());
  std::vector<Blob> patches;
  for (int i = 0; i < 4; ++i) {
    const OwnedState before = copy(last.view());
    flip_elements(last, i == 2 ? 1.0 : 0.01, random);
    patches.push_back(*encode_delta(before.view(), last.view()));
  }
  const std::vector<std::span<const std::byte>> parts(patches.begin(), patches.end());
  Blob fold;
  ASSERT_TRUE(fold_deltas(parts, [&](std::span<const std::byte> b) {
    fold.insert(fold.end(), b.begin(), b.end());
    return ok();
  }));
  expect_same(reference::decode(fold, reference_state(first.view())), last.view());
}

Blob stored(std::string_view name) {
  const auto content = read_file(std::filesystem::path("tests/delta/corpus/patch") / name);
  EXPECT_TRUE(content);
  const auto bytes = bytes_of(*content);
  return Blob(bytes.begin(), bytes.end());
}

// Files of format version 3 stay readable.
TEST(Format, ReadsFilesWrittenEarlier) {
  OwnedState state = zeros({spec("a", DType::kBF16, {40, 5}), spec("b", DType::kF32, {9})});
  for (std::size_t t = 0; t < state.size(); ++t)
    for (std::size_t i = 0; std::byte & b : state.mutable_bytes(t)) b = static_cast<std::byte>(i++ * 37 + t);
  state.seal();
  const Status status = apply_delta(stored("delta"), state);
  ASSERT_TRUE(status) << status.error().message();
  EXPECT_EQ(inspect(stored("delta"))->changed, 24u);
  const auto whole = decode_snapshot(stored("snapshot"));
  ASSERT_TRUE(whole) << whole.error().message();
  EXPECT_TRUE(same_bytes(whole->view(), state.view()));
}

// Weights of many exponents, and an update of half of them; the same on every machine.
inline std::pair<OwnedState, OwnedState> earlier_pair() {
  OwnedState prev = zeros({spec("w", DType::kBF16, {200, 500})});
  OwnedState cur = zeros(prev.view());
  Random random(7);
  for (std::size_t i = 0; i < 100000; ++i) {
    const auto drop = static_cast<unsigned>(std::countr_zero(random.next() | 1u << 12));  // halves each time
    const std::uint64_t bits = random.next();
    const auto old = static_cast<std::uint16_t>((bits & 0x807f) | (120 - drop) << 7);
    const auto step = static_cast<std::int64_t>(1u << (bits >> 32) % (drop + 1));
    const auto now = static_cast<std::uint16_t>(bits >> 62 < 2 ? old : bits >> 62 == 2 ? old + step : old - step);
    std::memcpy(prev.mutable_bytes(0).data() + 2 * i, &old, 2);
    std::memcpy(cur.mutable_bytes(0).data() + 2 * i, &now, 2);
  }
  prev.seal();
  cur.seal();
  return {std::move(prev), std::move(cur)};
}

// Every set of kernels, one after the other.
template <class F>
void with_every_instruction_set(F&& f) {
  struct Restore {
    const Kernels& set = kernels();
    ~Restore() { select_kernels(set); }
  } restore;
  const KernelList list = available_kernels();
  for (int k = 0; k < list.count; ++k) {
    SCOPED_TRACE(list.kernels[k]->name);
    select_kernels(*list.kernels[k]);
    f();
  }
}

// Version 3 coded dense ranges with 64 states of 32 bits.
TEST(Format, ReadsDenseSymbolsOfVersion3) {
  const std::pair<OwnedState, OwnedState> pair = earlier_pair();
  const OwnedState &prev = pair.first, &cur = pair.second;
  const Blob patch = stored("dense_version_3");
  ASSERT_EQ(static_cast<int>(patch[8]), 3);
  expect_same(reference::decode(patch, reference_state(prev.view())), cur.view());
  with_every_instruction_set([&] {
    OwnedState state = copy(prev.view());
    const Status applied = apply_delta(patch, state);
    ASSERT_TRUE(applied) << applied.error().message();
    EXPECT_TRUE(same_bytes(state.view(), cur.view()));
  });
  // Folded with a delta of today.
  const Blob back = *encode_delta(cur.view(), prev.view());
  const std::vector<std::span<const std::byte>> parts{patch, back, patch};
  Blob fold;
  ASSERT_TRUE(fold_deltas(parts, [&](std::span<const std::byte> b) {
    fold.insert(fold.end(), b.begin(), b.end());
    return ok();
  }));
  OwnedState state = copy(prev.view());
  ASSERT_TRUE(apply_delta(fold, state));
  EXPECT_TRUE(same_bytes(state.view(), cur.view()));
}

// Encodes and decodes with one set of kernels after the other; all must agree to the byte.
TEST(Format, EveryInstructionSetGivesTheSameBytes) {
  struct Restore {
    const Kernels& set = kernels();
    ~Restore() { select_kernels(set); }
  } restore;
  Random random(24);
  const KernelList list = available_kernels();
  for (int round = 0; round < 40; ++round) {
    SCOPED_TRACE(round);
    const DType dtype = kAllDTypes[static_cast<std::size_t>(round) % kAllDTypes.size()];
    OwnedState prev = zeros({spec("w", dtype, {static_cast<std::int64_t>(random.between(1, 300)), 336})});
    fill_random(prev, random);
    OwnedState cur = copy(prev.view());
    flip_elements(cur, std::pow(random.uniform(), 3), random);
    if (round % 2 == 0 && (dtype == DType::kBF16 || dtype == DType::kF16 || dtype == DType::kF32))
      std::tie(prev, cur) = weight_update(dtype, {99, 1777}, std::pow(10, -7 + 4 * random.uniform()), random);
    std::optional<Blob> expected;
    for (int k = 0; k < list.count; ++k) {
      SCOPED_TRACE(list.kernels[k]->name);
      select_kernels(*list.kernels[k]);
      const Blob patch = *encode_delta(prev.view(), cur.view());
      if (!expected) expected = patch;
      EXPECT_TRUE(patch == *expected);
      OwnedState state = copy(prev.view());
      const Status applied = apply_delta(patch, state);
      ASSERT_TRUE(applied) << applied.error().message();
      EXPECT_TRUE(same_bytes(state.view(), cur.view()));
    }
  }
}

}  // namespace
}  // namespace echoline::delta

// The entropy bound against counts worked out by hand and against a straightforward computation.
#include "delta/entropy.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <map>

#include "base/random.hpp"
#include "delta/block.hpp"
#include "delta/patch.hpp"
#include "tests/delta/entropy_pass.hpp"
#include "tests/delta/in_memory.hpp"

namespace echoline::delta {
namespace {

double coin(double n, double k) {  // n·H2(k/n), bits
  const auto term = [&](double x) { return x > 0 ? -x * std::log2(x / n) : 0.0; };
  return term(k) + term(n - k);
}

template <class T>
TensorView view_of(std::string name, DType dtype, const std::vector<T>& values) {
  return {std::move(name), dtype, {static_cast<std::int64_t>(values.size())}, std::as_bytes(std::span(values))};
}

StateEntropy must_bound(const StateView& prev, const StateView& cur, unsigned threads = 1) {
  auto result = entropy_bound(prev, cur, threads);
  EXPECT_TRUE(result) << (result ? "" : result.error().message());
  return result ? *result : StateEntropy{};
}

TEST(Entropy, CountsWorkedOutByHand) {
  // bf16: eight elements in [1, 2), of which two rise by one step, one falls by one and one rises by three; eight in
  // [2, 4) that stay.
  std::vector<std::uint16_t> prev, cur;
  for (int i = 0; i < 8; ++i) prev.push_back(static_cast<std::uint16_t>(0x3f80 + i));
  for (int i = 0; i < 8; ++i) prev.push_back(static_cast<std::uint16_t>(0xc000 + i));  // negative
  cur = prev;
  ++cur[0], ++cur[1], --cur[2];
  cur[3] = static_cast<std::uint16_t>(cur[3] + 3);
  const StateEntropy e = must_bound({view_of("w", DType::kBF16, prev)}, {view_of("w", DType::kBF16, cur)});
  EXPECT_EQ(e.total.elements, 16u);
  EXPECT_EQ(e.total.changed, 4u);
  EXPECT_NEAR(e.total.position_bits, coin(8, 4), 1e-9);  // 8 bits; nothing for the other class
  EXPECT_NEAR(e.total.step_bits, 4 * 1.5, 1e-9);         // 2, 1, 1 of 4
  EXPECT_NEAR(e.total.bytes(), 14.0 / 8, 1e-9);
  ASSERT_EQ(e.tensors.size(), 1u);
  EXPECT_NEAR(e.tensors[0].bound.bytes(), e.total.bytes(), 1e-9);
}

TEST(Entropy, StepsCrossZeroAndSignsAreNotClasses) {
  // +0 to -0 is one step; so is the smallest positive number to +0.
  const std::vector<std::uint16_t> prev = {0x0000, 0x0001, 0x8001, 0x0000};
  const std::vector<std::uint16_t> cur = {0x8000, 0x0000, 0x8002, 0x0000};
  const StateEntropy e = must_bound({view_of("w", DType::kBF16, prev)}, {view_of("w", DType::kBF16, cur)});
  EXPECT_EQ(e.total.changed, 3u);
  EXPECT_NEAR(e.total.step_bits, 0, 1e-9);  // all fall by one
  EXPECT_NEAR(e.total.position_bits, coin(4, 3), 1e-9);
}

TEST(Entropy, NothingChangedCostsNothing) {
  const std::vector<std::uint16_t> weights(1000, 0x3c00);
  const StateView state = {view_of("w", DType::kF16, weights)};
  const StateEntropy e = must_bound(state, state);
  EXPECT_EQ(e.total.changed, 0u);
  EXPECT_EQ(e.total.bytes(), 0.0);
  EXPECT_EQ(must_bound({}, {}).total.elements, 0u);
}

// The definition, computed with maps.
template <class T>
EntropyBound by_definition(const std::vector<std::pair<T, T>>& elements, unsigned mantissa_bits, unsigned exponent_bits,
                           bool is_signed) {
  const auto ordered = [&](T bits) -> T {
    const T sign = static_cast<T>(T{1} << (8 * sizeof(T) - 1));
    if (exponent_bits == 0) return is_signed ? static_cast<T>(bits ^ sign) : bits;
    return bits & sign ? static_cast<T>(~bits) : static_cast<T>(bits | sign);
  };
  std::map<T, double> n, k;
  std::map<std::pair<T, T>, double> steps;
  EntropyBound bound;
  for (const auto& [from, to] : elements) {
    const T c = static_cast<T>(from >> mantissa_bits & ((T{1} << exponent_bits) - 1));
    ++n[c];
    ++bound.elements;
    if (from == to) continue;
    ++bound.changed;
    ++k[c];
    ++steps[{c, static_cast<T>(ordered(to) - ordered(from))}];
  }
  for (const auto& [c, count] : n) bound.position_bits += coin(count, k[c]);
  for (const auto& [key, count] : steps) bound.step_bits += -count * std::log2(count / k[key.first]);
  return bound;
}

template <class T>
void check_type(DType dtype, unsigned mantissa_bits, unsigned exponent_bits, bool is_signed) {
  Random random(7, static_cast<std::uint64_t>(dtype));
  std::vector<T> prev_a, cur_a, prev_b, cur_b;
  std::vector<std::pair<T, T>> all, in_a;
  for (int i = 0; i < 20'011; ++i) {
    const T from = static_cast<T>(random.next());
    T to = from;
    if (random.below(5) == 0) to = static_cast<T>(to + random.below(7));                         // small steps
    if (random.below(20) == 0) to = static_cast<T>(to ^ (T{1} << random.below(8 * sizeof(T))));  // far ones
    const bool first = i < 9000;
    (first ? prev_a : prev_b).push_back(from);
    (first ? cur_a : cur_b).push_back(to);
    all.emplace_back(from, to);
    if (first) in_a.emplace_back(from, to);
  }
  const StateView prev = {view_of("b", dtype, prev_b), view_of("a", dtype, prev_a)};
  const StateView cur = {view_of("b", dtype, cur_b), view_of("a", dtype, cur_a)};
  const StateEntropy found = must_bound(prev, cur);
  const EntropyBound total = by_definition(all, mantissa_bits, exponent_bits, is_signed);
  const EntropyBound a = by_definition(in_a, mantissa_bits, exponent_bits, is_signed);
  EXPECT_EQ(found.total.elements, total.elements);
  EXPECT_EQ(found.total.changed, total.changed);
  EXPECT_NEAR(found.total.position_bits, total.position_bits, 1e-6) << dtype_name(dtype);
  EXPECT_NEAR(found.total.step_bits, total.step_bits, 1e-6) << dtype_name(dtype);
  ASSERT_EQ(found.tensors.size(), 2u);
  EXPECT_EQ(found.tensors[0].name, "a");
  EXPECT_EQ(found.tensors[0].bound.changed, a.changed);
  EXPECT_NEAR(found.tensors[0].bound.position_bits, a.position_bits, 1e-6) << dtype_name(dtype);
  EXPECT_NEAR(found.tensors[0].bound.step_bits, a.step_bits, 1e-6) << dtype_name(dtype);
}

// An encoder's own counts, taken block by block on several threads, against the definition.
template <class T>
void check_encoder(DType dtype, std::size_t elements, unsigned mantissa_bits, unsigned exponent_bits, bool is_signed) {
  Random random(11, static_cast<std::uint64_t>(dtype));
  std::vector<T> prev(elements), cur;
  for (T& bits : prev) bits = static_cast<T>(random.next());
  cur = prev;
  std::vector<std::pair<T, T>> all;
  for (std::size_t i = 0; i < cur.size(); ++i) {
    if (random.below(100) == 0) cur[i] = static_cast<T>(cur[i] + random.below(4));
    if (random.below(1000) == 0) cur[i] = static_cast<T>(random.next());
    all.emplace_back(prev[i], cur[i]);
  }
  const EntropyBound expected = by_definition(all, mantissa_bits, exponent_bits, is_signed);
  const StateView from = {view_of("w", dtype, prev)}, to = {view_of("w", dtype, cur)};
  for (const unsigned threads : {1u, 3u}) {
    PatchStats stats;
    ASSERT_TRUE(encode_delta(from, to, {.threads = threads, .count_entropy = true}, &stats));
    ASSERT_TRUE(stats.entropy);
    EXPECT_EQ(stats.entropy->elements, expected.elements);
    EXPECT_EQ(stats.entropy->changed, expected.changed);
    EXPECT_NEAR(stats.entropy->bytes() / expected.bytes(), 1, 1e-9) << dtype_name(dtype);
    const EntropyBound apart = must_bound(from, to).total;
    EXPECT_EQ(stats.entropy->position_bits, apart.position_bits);  // what is printed is the same to the last digit
    EXPECT_EQ(stats.entropy->step_bits, apart.step_bits);
  }
  PatchStats uncounted;
  ASSERT_TRUE(encode_delta(from, to, {}, &uncounted));
  EXPECT_FALSE(uncounted.entropy);
}

TEST(Entropy, AnEncoderCountsTheElementsItPasses) {
  check_encoder<std::uint16_t>(DType::kBF16, (17u << 19) + 3, 7, 8, false);  // three segments
  check_encoder<std::uint32_t>(DType::kF32, 100'003, 23, 8, false);
  check_encoder<std::uint8_t>(DType::kI8, 100'003, 0, 0, true);
}

TEST(Entropy, AgreesWithTheDefinitionForEveryType) {
  const Kernels& usual = kernels();
  const KernelList sets = available_kernels();
  for (int k = 0; k < sets.count; ++k) {
    SCOPED_TRACE(sets.kernels[k]->name);
    select_kernels(*sets.kernels[k]);
    check_type<std::uint8_t>(DType::kBool, 0, 0, false);
    check_type<std::uint8_t>(DType::kU8, 0, 0, false);
    check_type<std::uint8_t>(DType::kI8, 0, 0, true);
    check_type<std::uint8_t>(DType::kF8E4M3, 3, 4, false);
    check_type<std::uint8_t>(DType::kF8E5M2, 2, 5, false);
    check_type<std::uint16_t>(DType::kI16, 0, 0, true);
    check_type<std::uint16_t>(DType::kU16, 0, 0, false);
    check_type<std::uint16_t>(DType::kF16, 10, 5, false);
    check_type<std::uint16_t>(DType::kBF16, 7, 8, false);
    check_type<std::uint32_t>(DType::kI32, 0, 0, true);
    check_type<std::uint32_t>(DType::kU32, 0, 0, false);
    check_type<std::uint32_t>(DType::kF32, 23, 8, false);
    check_type<std::uint64_t>(DType::kI64, 0, 0, true);
    check_type<std::uint64_t>(DType::kU64, 0, 0, false);
    check_type<std::uint64_t>(DType::kF64, 52, 11, false);
  }
  select_kernels(usual);
}

TEST(Entropy, ThreadsDoNotMatter) {
  Random random(3);
  std::vector<std::uint16_t> prev(1u << 20), cur;
  for (std::uint16_t& bits : prev) bits = static_cast<std::uint16_t>(random.next());
  cur = prev;
  for (std::uint16_t& bits : cur)
    if (random.below(50) == 0) bits = static_cast<std::uint16_t>(bits + random.below(300));
  const StateView from = {view_of("w", DType::kBF16, prev)}, to = {view_of("w", DType::kBF16, cur)};
  const StateEntropy one = must_bound(from, to, 1), three = must_bound(from, to, 3);
  EXPECT_EQ(one.total.changed, three.total.changed);
  EXPECT_EQ(one.total.position_bits, three.total.position_bits);
  EXPECT_EQ(one.total.step_bits, three.total.step_bits);
}

}  // namespace
}  // namespace echoline::delta

// Policies that the ranks of a trainer hand in as shards.
#include "learner/external/shards.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <numeric>

#include "base/random.hpp"
#include "delta/safetensors.hpp"
#include "learner/external/arriving_body.hpp"

namespace echoline::learner {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;
using Shape = std::vector<std::int64_t>;

struct Tensor {
  std::string name;
  delta::DType dtype;
  Shape shape;
  std::string bytes;
};

struct Piece {
  Tensor content;
  std::string name;  // of the whole tensor
  Shape shape, offset;
};

Tensor random_tensor(std::string name, delta::DType dtype, Shape shape, Random& random) {
  std::string bytes(*delta::tensor_bytes(dtype, shape), '\0');
  for (char& byte : bytes) byte = static_cast<char>(random.below(256));
  return {std::move(name), dtype, std::move(shape), std::move(bytes)};
}

// The box of a tensor, element by element.
Piece cut(const Tensor& whole, const Shape& offset, const Shape& length) {
  Piece piece{{"", whole.dtype, length, ""}, whole.name, whole.shape, offset};
  const std::size_t element_bytes = delta::dtype_bytes(whole.dtype);
  const std::int64_t count = std::accumulate(length.begin(), length.end(), std::int64_t{1}, std::multiplies<>());
  for (std::int64_t i = 0; i < count; ++i) {
    std::int64_t rest = i, target = 0, stride = 1;
    for (std::size_t d = length.size(); d-- > 0;) {
      target += (offset[d] + rest % length[d]) * stride;
      rest /= length[d];
      stride *= whole.shape[d];
    }
    piece.content.bytes += whole.bytes.substr(static_cast<std::size_t>(target) * element_bytes, element_bytes);
  }
  return piece;
}

std::string part_text(std::uint32_t rank, std::uint32_t ranks, const std::vector<Piece>& pieces,
                      const std::string& attempt) {
  json tensors = json::object();
  delta::StateView state;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    const std::string key = fmt::format("{}#{}", pieces[i].name, i);
    tensors[key] = {{"name", pieces[i].name}, {"shape", pieces[i].shape}, {"offset", pieces[i].offset}};
    state.push_back(
        {key, pieces[i].content.dtype, pieces[i].content.shape, std::as_bytes(std::span(pieces[i].content.bytes))});
  }
  const json metadata = {{"rank", rank}, {"ranks", ranks}, {"attempt", attempt}, {"tensors", tensors}};
  const auto bytes =
      delta::safetensors_bytes(*delta::canonical(std::move(state)), {{"echoline_shards", metadata.dump()}});
  return *bytes;
}

overlay::Slice part(std::uint32_t rank, std::uint32_t ranks, const std::vector<Piece>& pieces,
                    const std::string& attempt = "first") {
  return slice_of(part_text(rank, ranks, pieces, attempt));
}

std::string error_of(const Result<std::optional<delta::OwnedState>>& result) {
  return result ? "accepted" : result.error().detail;
}

// Cuts every tensor along one dimension, as FSDP (the first) and tensor parallelism (any) do.
TEST(Shards, JoinedShardsAreTheWholePolicy) {
  Random random(7);
  for (int round = 0; round < 100; ++round) {
    SCOPED_TRACE(round);
    const auto ranks = static_cast<std::uint32_t>(random.between(1, 5));
    std::vector<Tensor> tensors;
    std::vector<std::vector<Piece>> pieces(ranks);
    for (int t = 0; t < 6; ++t) {
      Shape shape(random.below(4));
      for (auto& dim : shape) dim = random.between(1, 7);
      const delta::DType dtype = delta::kAllDTypes[random.below(15)];
      const Tensor whole = random_tensor(fmt::format("t{}", t), dtype, shape, random);
      if (shape.empty()) {
        for (auto& of_rank : pieces) of_rank.push_back(cut(whole, {}, {}));  // replicated
      } else {
        const std::size_t dimension = random.below(shape.size());
        for (std::uint32_t rank = 0; rank < ranks; ++rank) {
          Shape offset(shape.size(), 0), length = shape;
          const std::int64_t begin = shape[dimension] * rank / ranks, end = shape[dimension] * (rank + 1) / ranks;
          offset[dimension] = begin;
          length[dimension] = end - begin;
          pieces[rank].push_back(cut(whole, offset, length));
        }
      }
      tensors.push_back(whole);
    }
    ShardCollector collector(Bytes{1 << 20});
    std::vector<std::uint32_t> order(ranks);
    std::iota(order.begin(), order.end(), 0);
    for (std::size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random.below(i)]);
    for (std::uint32_t i = 0; i < ranks; ++i) {
      auto joined = collector.add(Version{3}, part(order[i], ranks, pieces[order[i]]));
      ASSERT_TRUE(joined) << joined.error().message();
      ASSERT_EQ(joined->has_value(), i + 1 == ranks);
      if (!*joined) continue;
      ASSERT_EQ((*joined)->size(), tensors.size());
      for (std::size_t t = 0; t < tensors.size(); ++t) {
        EXPECT_EQ((*joined)->name(t), tensors[t].name);
        EXPECT_TRUE(std::memcmp((*joined)->bytes(t).data(), tensors[t].bytes.data(), tensors[t].bytes.size()) == 0);
      }
    }
    EXPECT_TRUE(collector.status().is_null());
  }
}

class TwoRanks : public ::testing::Test {
 protected:
  Random random_{1};
  const Tensor whole_ = random_tensor("w", delta::DType::kBF16, {4, 3}, random_);
  const Piece top_ = cut(whole_, {0, 0}, {2, 3}), bottom_ = cut(whole_, {2, 0}, {2, 3});
  ShardCollector collector_{Bytes{1 << 16}};
};

TEST_F(TwoRanks, MissingRanksAreShown) {
  ASSERT_TRUE(collector_.add(Version{2}, part(1, 3, {bottom_})));
  EXPECT_EQ(collector_.status(),
            json({{"version", 2}, {"attempt", "first"}, {"ranks", 3}, {"missing", json::array({0, 2})}}));
}

TEST_F(TwoRanks, EqualPartsMayComeAgain) {
  for (int i = 0; i < 2; ++i) EXPECT_FALSE(collector_.add(Version{2}, part(0, 2, {top_}))->has_value());
  EXPECT_TRUE(collector_.add(Version{2}, part(1, 2, {bottom_}))->has_value());
  EXPECT_FALSE(collector_.add(Version{2}, part(0, 2, {top_}))->has_value());  // after the end, too
  EXPECT_TRUE(collector_.status().is_null());
}

TEST_F(TwoRanks, OtherValuesNeedAnotherAttempt) {
  Piece other = top_;
  other.content.bytes[0] ^= 1;
  ASSERT_TRUE(collector_.add(Version{2}, part(0, 2, {top_})));
  EXPECT_THAT(error_of(collector_.add(Version{2}, part(0, 2, {other}))), HasSubstr("rank 0 hands in other shards"));
  EXPECT_FALSE(collector_.add(Version{2}, part(0, 2, {other}, "second"))->has_value());
  const auto joined = collector_.add(Version{2}, part(1, 2, {bottom_}, "second"));
  ASSERT_TRUE(joined && *joined);
  EXPECT_TRUE(std::memcmp((*joined)->bytes(0).data(), other.content.bytes.data(), other.content.bytes.size()) == 0);
}

TEST_F(TwoRanks, AVersionThatWasLeftUnfinishedIsDropped) {
  ASSERT_TRUE(collector_.add(Version{2}, part(0, 2, {top_})));
  ASSERT_TRUE(collector_.add(Version{3}, part(0, 2, {top_})));
  EXPECT_EQ(collector_.status()["version"], 3);
  const auto late = collector_.add(Version{2}, part(1, 2, {bottom_}));
  ASSERT_FALSE(late);
  EXPECT_EQ(late.error().code, Code::kStale);
}

TEST_F(TwoRanks, ShardsThatDoNotFitAreNamed) {
  const auto last_of = [&](const std::vector<Piece>& first, const std::vector<Piece>& second) {
    ShardCollector collector(Bytes{1 << 16});
    EXPECT_TRUE(collector.add(Version{2}, part(0, 2, first)));
    return error_of(collector.add(Version{2}, part(1, 2, second)));
  };
  EXPECT_EQ(last_of({top_}, {cut(whole_, {2, 0}, {1, 3})}),
            "tensor 'w': the shards of 2 ranks have 9 of its 12 elements");
  EXPECT_THAT(last_of({top_}, {cut(whole_, {1, 0}, {3, 3})}),
              HasSubstr("tensor 'w': [2, 3] from [0, 0] of rank 0 and [3, 3] from [1, 0] of rank 1 overlap"));
  Piece other = top_;
  other.content.bytes[3] ^= 1;
  EXPECT_THAT(last_of({top_, bottom_}, {other}),
              HasSubstr("of rank 0 and [2, 3] from [0, 0] of rank 1 are one part with different values"));
  Piece reshaped = bottom_;
  reshaped.shape = {5, 3};
  EXPECT_THAT(last_of({top_}, {reshaped}), HasSubstr("their shapes or types differ"));
  EXPECT_THAT(error_of(collector_.add(Version{2}, part(0, 2, {Piece{top_.content, "w", {1, 3}, {0, 0}}}))),
              HasSubstr("[2, 3] from [0, 0] is not within the tensor's shape [1, 3]"));
  EXPECT_THAT(error_of(collector_.add(Version{2}, part(2, 2, {top_}))), HasSubstr("expected the metadata"));
  EXPECT_THAT(error_of(collector_.add(Version{2}, slice_of("no safetensors"))), HasSubstr("the shards of a rank"));
  ASSERT_TRUE(collector_.add(Version{2}, part(0, 2, {top_})));
  EXPECT_THAT(error_of(collector_.add(Version{2}, part(1, 3, {bottom_}))), HasSubstr("rank 1 is of 3 ranks"));
  ShardCollector small(Bytes{100});
  const auto refused = small.add(Version{2}, part(0, 2, {top_}));
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Code::kExhausted);
}

TEST_F(TwoRanks, DamagedPartsAreRefusedOrJoined) {
  const std::string good = part_text(0, 2, {top_, cut(whole_, {0, 0}, {0, 3})}, "first");
  for (int round = 0; round < 20'000; ++round) {
    std::string damaged = good;
    for (std::uint64_t changes = 1 + random_.below(4); changes-- > 0;)
      damaged[random_.below(damaged.size())] = static_cast<char>(random_.below(256));
    if (random_.below(5) == 0) damaged.resize(random_.below(damaged.size()));
    ShardCollector collector(Bytes{1 << 16});
    if (collector.add(Version{2}, slice_of(std::move(damaged)))) (void)collector.add(Version{2}, part(1, 2, {bottom_}));
  }
}

}  // namespace
}  // namespace echoline::learner

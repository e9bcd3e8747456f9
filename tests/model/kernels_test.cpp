// Every available set of kernels against double precision, at sizes on both sides of every register and page.
#include "model/kernels.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <numeric>
#include <thread>
#include <vector>

#include "base/random.hpp"

namespace echoline::model {
namespace {

class KernelTest : public testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    if (GetParam() >= available_kernels().count) GTEST_SKIP() << "not on this processor";
    set = available_kernels().best_first[GetParam()];
  }
  std::vector<float> random_floats(std::int64_t count) {
    std::vector<float> out;
    while (std::ssize(out) < count) out.push_back(float(random.uniform() * 4 - 2));
    return out;
  }
  const Kernels* set = nullptr;
  Random random{11};
};
INSTANTIATE_TEST_SUITE_P(Sets, KernelTest, testing::Range(0, 4));

// `count` floats at a multiple of 64 bytes.
class Aligned {
 public:
  explicit Aligned(std::int64_t count) : storage_(std::size_t(count) + 16) {}
  float* data() { return storage_.data() + (64 - reinterpret_cast<std::uintptr_t>(storage_.data()) % 64) % 64 / 4; }

 private:
  std::vector<float> storage_;
};

TEST_P(KernelTest, Products) {
  for (const std::int64_t in : {1, 15, 16, 20, 31, 32, 64, 100})
    for (const std::int64_t rows : {1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 33, 50})
      for (const std::int64_t out : {1, 3, 4, 9, 12, 18, 70}) {
        const auto x = random_floats(rows * in), w = random_floats(out * in), initial = random_floats(rows * (out + 2));
        std::vector<Bf16> bf16_weights;
        for (const float v : w) bf16_weights.push_back(Bf16(std::bit_cast<std::uint32_t>(v) >> 16));
        Aligned packed(set->packed_floats(rows, in));
        const std::int64_t some_rows = rows / 32 * 16;
        set->pack(x.data(), rows, in, 0, some_rows, packed.data());
        set->pack(x.data(), rows, in, some_rows, rows, packed.data());
        for (const bool bf16 : {false, true})
          for (const bool add : {false, true}) {
            auto y = initial;
            const std::int64_t begin = out / 3;  // as a part of the work
            if (bf16) {
              set->product_bf16(packed.data(), rows, in, bf16_weights.data(), begin, out, y.data(), out + 2, add);
            } else {
              set->product_fp32(x.data(), rows, in, w.data(), begin, out, y.data(), out + 2, add);
            }
            for (std::int64_t r = 0; r < rows; ++r)
              for (std::int64_t o = 0; o < out + 2; ++o) {
                const std::size_t index = std::size_t(r * (out + 2) + o);
                double want = initial[index];
                if (o >= begin && o < out) {
                  want = add ? want : 0;
                  for (std::int64_t i = 0; i < in; ++i) {
                    const std::size_t k = std::size_t(o * in + i);
                    const float weight = bf16 ? std::bit_cast<float>(std::uint32_t{bf16_weights[k]} << 16) : w[k];
                    want += double(x[std::size_t(r * in + i)]) * double(weight);
                  }
                }
                ASSERT_NEAR(y[index], want, 1e-4) << set->name << " " << in << " " << rows << " " << out << " " << bf16;
              }
          }
      }
}

// Wide enough for several panels of weights and several blocks of activations, which small sizes never fill.
TEST_P(KernelTest, LargeProducts) {
  const std::int64_t in = 6000, rows = 100, out = 72;
  const auto x = random_floats(rows * in), w = random_floats(out * in);
  std::vector<Bf16> bf16_weights;
  for (const float v : w) bf16_weights.push_back(Bf16(std::bit_cast<std::uint32_t>(v) >> 16));
  Aligned packed(set->packed_floats(rows, in));
  set->pack(x.data(), rows, in, 0, rows, packed.data());
  std::vector<float> y(std::size_t(rows * out));
  set->product_bf16(packed.data(), rows, in, bf16_weights.data(), 0, out, y.data(), out, false);
  for (std::int64_t r = 0; r < rows; r += 9)
    for (std::int64_t o = 0; o < out; ++o) {
      double want = 0;
      for (std::int64_t i = 0; i < in; ++i)
        want += double(x[std::size_t(r * in + i)]) *
                double(std::bit_cast<float>(std::uint32_t{bf16_weights[std::size_t(o * in + i)]} << 16));
      ASSERT_NEAR(y[std::size_t(r * out + o)], want, 2e-3) << set->name << " " << r << " " << o;
    }
}

// Shapes on no boundary of a tile, a panel or a block, as one piece and divided between two threads. Both give the same
// bits, and nearly the same as in double.
TEST_P(KernelTest, RandomProductsInParts) {
  const auto random_up_to = [&](std::int64_t maximum) { return 1 + std::int64_t(random.uniform() * double(maximum)); };
  for (int round = 0; round < 60; ++round) {
    const std::int64_t rows = random_up_to(round % 2 == 0 ? 12 : 90), in = random_up_to(700), out = random_up_to(160);
    const auto x = random_floats(rows * in);
    std::vector<Bf16> w;
    for (const float v : random_floats(out * in)) w.push_back(Bf16(std::bit_cast<std::uint32_t>(v) >> 16));
    const auto weight = [&](std::int64_t index) {
      return std::bit_cast<float>(std::uint32_t{w[std::size_t(index)]} << 16);
    };
    Aligned packed(set->packed_floats(rows, in));
    set->pack(x.data(), rows, in, 0, rows, packed.data());
    std::vector<float> in_one_piece(std::size_t(rows * out)), in_parts = in_one_piece;
    const auto multiply = [&](std::int64_t begin, std::int64_t end, std::vector<float>& y) {
      set->product_bf16(packed.data(), rows, in, w.data(), begin, end, y.data(), out, false);
    };
    multiply(0, out, in_one_piece);
    const std::int64_t middle = out / 32 * 16;  // threads begin at multiples of 16
    std::thread other([&] { multiply(middle, out, in_parts); });
    multiply(0, middle, in_parts);
    other.join();
    ASSERT_EQ(in_one_piece, in_parts) << set->name << " " << rows << " " << in << " " << out;
    for (std::int64_t r = 0; r < rows; ++r)
      for (std::int64_t o = 0; o < out; ++o) {
        double want = 0;
        for (std::int64_t i = 0; i < in; ++i) want += double(x[std::size_t(r * in + i)]) * double(weight(o * in + i));
        ASSERT_NEAR(in_one_piece[std::size_t(r * out + o)], want, 2e-4)
            << set->name << " " << rows << " " << in << " " << out;
      }
  }
}

// Weights that select one activation each return it to the last bit, with bf16 weights too, so nothing is rounded on
// the way.
TEST_P(KernelTest, ActivationsKeepAllTheirBits) {
  const std::int64_t in = 64;
  std::vector<Bf16> unit(std::size_t(in * in));
  for (std::int64_t i = 0; i < in; ++i) unit[std::size_t(i * in + i)] = 0x3f80;
  for (const std::int64_t rows : {1, 4, 8, 9, 16, 40, 300}) {
    const auto x = random_floats(rows * in);
    Aligned packed(set->packed_floats(rows, in));
    set->pack(x.data(), rows, in, 0, rows, packed.data());
    std::vector<float> y(x.size());
    set->product_bf16(packed.data(), rows, in, unit.data(), 0, in, y.data(), in, false);
    EXPECT_EQ(y, x) << set->name << " " << rows;
  }
}

TEST_P(KernelTest, NormsRotationsGatesSumsAndSoftmax) {
  for (const std::int64_t count : {2, 6, 16, 30, 64, 128, 1000}) {
    const auto x = random_floats(count), weight = random_floats(count), cos = random_floats(count),
               sin = random_floats(count);
    const auto value = [](const std::vector<float>& v, std::int64_t i) { return double(v[std::size_t(i)]); };
    double squares = 0, total = 0;
    for (const float v : x) squares += double(v) * double(v), total += double(v);
    const double scale = 1 / std::sqrt(squares / double(count) + 1e-6);
    std::vector<float> out(x.size()), rotated = x, gated = x;
    set->rms_norm(x.data(), weight.data(), count, 1e-6f, out.data());
    set->rotate(rotated.data(), weight.data(), count, 1e-6f, cos.data(), sin.data());
    set->gate(gated.data(), weight.data(), count);
    EXPECT_NEAR(set->sum(x.data(), count), total, 1e-9);
    const auto normed = [&](std::int64_t i) { return value(x, i) * scale * value(weight, i); };
    for (std::int64_t i = 0; i < count; ++i) {
      EXPECT_NEAR(value(out, i), normed(i), 1e-5) << set->name << " " << count;
      EXPECT_NEAR(value(rotated, i), normed(i) * value(cos, i) + normed((i + count / 2) % count) * value(sin, i), 2e-5);
      EXPECT_NEAR(value(gated, i), value(x, i) / (1 + std::exp(-value(x, i))) * value(weight, i), 1e-5);
    }
  }
  for (const std::int64_t count : {1, 7, 16, 100, 1300}) {
    const auto x = random_floats(count);
    double total = 0;
    for (const float v : x) total += std::exp(double(v));
    std::vector<float> out(x.size());
    set->log_softmax(x.data(), count, out.data());
    for (std::size_t i = 0; i < x.size(); ++i)
      EXPECT_NEAR(out[i], double(x[i]) - std::log(total), 2e-6) << set->name << " " << count;
  }
  for (const float bad : {NAN, INFINITY}) {
    std::vector<float> x = random_floats(40), out(40);
    x[33] = bad;
    set->log_softmax(x.data(), 40, out.data());
    for (const float v : out) EXPECT_TRUE(std::isnan(v)) << set->name;
  }
  std::vector<float> extreme = {-1000, 1000, -INFINITY, NAN, 0};
  const std::vector<float> one(5, 1);
  set->gate(extreme.data(), one.data(), 5);
  EXPECT_NEAR(extreme[0], 0, 1e-30);
  EXPECT_EQ(extreme[1], 1000);
  EXPECT_TRUE(std::isnan(extreme[3]));
  EXPECT_EQ(extreme[4], 0);
}

TEST_P(KernelTest, AttentionOverPages) {
  for (const std::int64_t dim : {6, 16, 20, 128})
    for (const std::int64_t token_count : {1, 15, 16, 17, 50})
      for (const std::int64_t heads : {1, 2, 3, 4, 7}) {
        const std::vector<std::int64_t> pages = {3, 0, 2, 4};
        const std::int64_t stride = 2 * 16 * dim;  // of another head between them
        const auto q = random_floats(heads * dim), keys = random_floats(5 * stride), values = random_floats(5 * stride);
        std::vector<float> scratch(std::size_t(heads * 64)), out(q.size());
        // No window, or one that begins within any page.
        const std::int64_t first_token = (dim + heads) % 3 == 0 ? 0 : (dim + 5 * heads) % token_count;
        set->attend(q.data(), heads, dim, first_token, token_count, pages.data(), keys.data(), values.data(), stride,
                    scratch.data(), out.data());
        for (std::int64_t h = 0; h < heads; ++h) {
          std::vector<double> p;
          for (std::int64_t s = 0; s < token_count; ++s) {
            double score = 0;
            for (std::int64_t d = 0; d < dim; ++d)
              score += double(q[std::size_t(h * dim + d)]) *
                       double(keys[std::size_t(pages[std::size_t(s / 16)] * stride + d * 16 + s % 16)]);
            p.push_back(s < first_token ? 0 : std::exp(score));
          }
          const double sum = std::accumulate(p.begin(), p.end(), 0.0);
          for (std::int64_t d = 0; d < dim; ++d) {
            double want = 0;
            for (std::int64_t s = 0; s < token_count; ++s)
              want += p[std::size_t(s)] / sum *
                      double(values[std::size_t(pages[std::size_t(s / 16)] * stride + s % 16 * dim + d)]);
            ASSERT_NEAR(out[std::size_t(h * dim + d)], want, 2e-4)
                << set->name << " " << dim << " " << token_count << " " << heads;
          }
        }
      }
}

}  // namespace
}  // namespace echoline::model

// The kernels of a training pass on a GPU: their device code, emulated on the CPU, against libtorch in fp64, and on a
// GPU, if the machine has one, against libtorch's own functions.
#include "model/cuda/training_device.hpp"

#include <torch/cuda.h>

#include "helpers.hpp"
#include "model/device_ops.hpp"
#include "training_emulation.hpp"

namespace echoline::model::training {
namespace {

using test::run_blocks;
using torch::Tensor;

template <class T>
constexpr torch::ScalarType kType = sizeof(T) == 4 ? torch::kFloat : torch::kBFloat16;
template <class T>
T* data(const Tensor& t) {
  return t.defined() ? static_cast<T*>(t.data_ptr()) : nullptr;
}
std::int64_t parts(std::int64_t count, std::int64_t each) { return (count + each - 1) / each; }

// ||a - b|| / ||b||
double error(const Tensor& a, const Tensor& b) {
  const Tensor x = a.detach().to(torch::kCPU, torch::kDouble), y = b.detach().to(torch::kCPU, torch::kDouble);
  return ((x - y).norm() / y.norm().clamp_min(1e-30)).item<double>();
}
template <class T>
constexpr double kBound = sizeof(T) == 4 ? 2e-6 : 4e-3;

Tensor exact(const Tensor& t) { return t.detach().to(torch::kDouble).requires_grad_(true); }

template <class T>
class DeviceCode : public testing::Test {
 protected:
  DeviceCode() { torch::manual_seed(7); }
  Tensor random(torch::IntArrayRef shape) { return torch::randn(shape).to(kType<T>); }
};
using Types = testing::Types<float, Bf16>;
TYPED_TEST_SUITE(DeviceCode, Types);

template <class T>
Tensor sums_of(const Tensor& sums) {
  const Tensor out = torch::empty({sums.size(1)}, kType<T>);
  const ColumnSumsJob<T> job{data<float>(sums), data<T>(out), sums.size(0), sums.size(1)};
  run_blocks<kColumnThreads>(parts(job.width, kWarpSize),
                             [&](auto& block, std::int64_t i) { column_sums(block, job, i); });
  return out;
}

TYPED_TEST(DeviceCode, NormsAndTheirGradients) {
  using T = TypeParam;
  for (const std::int64_t width : {8, 72, 1032})
    for (const bool adds : {false, true}) {
      const std::int64_t rows = 13;
      const Tensor x = this->random({rows, width}), w = this->random({width}), dy = this->random({rows, width});
      const Tensor addend = adds ? this->random({rows, width}) : Tensor();
      const Tensor beside = adds ? this->random({rows, width}) : Tensor();
      const Tensor out = torch::empty_like(x), dx = torch::empty_like(x);
      const Tensor sum = adds ? torch::empty_like(x) : x;
      const Tensor sums = torch::full({parts(rows, kNormBackwardRows), width}, NAN);
      const NormJob<T> job{data<T>(x), data<T>(w), data<T>(out), data<T>(addend), adds ? data<T>(sum) : nullptr,
                           rows,       width,      1e-6f};
      run_blocks<kNormThreads>(parts(rows, kNormRows), [&](auto& block, std::int64_t i) { norm_rows(block, job, i); });
      EXPECT_TRUE(!adds || torch::equal(sum, x + addend));
      const NormBackwardJob<T> back{
          data<T>(sum), data<T>(w), data<T>(dy), data<T>(beside), data<T>(dx), data<float>(sums), rows, width, 1e-6f};
      run_blocks<kNormThreads>(sums.size(0), [&](auto& block, std::int64_t i) { norm_backward_rows(block, back, i); });
      const Tensor x64 = exact(sum), w64 = exact(w);
      const Tensor y = x64 * torch::rsqrt(x64.square().mean(-1, true) + 1e-6) * w64;
      y.backward(dy.to(torch::kDouble));
      EXPECT_LT(error(out, y), kBound<T>) << width;
      EXPECT_LT(error(dx, adds ? x64.grad() + beside.to(torch::kDouble) : x64.grad()), kBound<T>) << width;
      EXPECT_LT(error(sums_of<T>(sums), w64.grad()), 2 * kBound<T>) << width;
      // Rounds like libtorch, except for the order of the sum of squares.
      const Tensor wide = sum.to(torch::kFloat);
      const Tensor as_libtorch = (wide * torch::rsqrt(wide.square().mean(-1, true) + 1e-6)).to(x.scalar_type()) * w;
      EXPECT_LT(error(out, as_libtorch), sizeof(T) == 4 ? 1e-6 : 1e-3);
    }
}

TYPED_TEST(DeviceCode, SumsOfColumns) {
  const Tensor sums = torch::randn({1000, 70});
  EXPECT_LT(error(sums_of<TypeParam>(sums), sums.to(torch::kDouble).sum(0)), kBound<TypeParam>);
}

struct Shape {
  std::int64_t heads, kv_heads, dim;
  bool normed;
};

TYPED_TEST(DeviceCode, RotationsOfHeadsAndTheirGradients) {
  using T = TypeParam;
  for (const Shape s :
       {Shape{4, 2, 64, true}, Shape{6, 1, 128, true}, Shape{2, 2, 20, false}, Shape{3, 3, 256, true}}) {
    const std::int64_t tokens = 22, positions = 11, all_heads = s.heads + 2 * s.kv_heads,
                       rotated_heads = s.heads + s.kv_heads;
    const Tensor x = this->random({tokens, all_heads, s.dim}), out = torch::empty_like(x);
    const Tensor cos = torch::randn({positions, s.dim}), sin = torch::randn({positions, s.dim});
    const Tensor q_norm = s.normed ? this->random({s.dim}) : Tensor(),
                 k_norm = s.normed ? this->random({s.dim}) : Tensor();
    RotateJob<T> job{data<T>(x), data<T>(out), data<float>(cos), data<float>(sin), data<T>(q_norm), data<T>(k_norm),
                     tokens,     positions,    int(s.heads),     int(s.kv_heads),  int(s.dim),      1e-6f};
    // Heads of more than 128 values have more pairs in a lane.
    run_blocks<kRotateThreads>(tokens, [&](auto& block, std::int64_t i) {
      s.dim > 128 ? rotate_token<2>(block, job, i) : rotate_token<1>(block, job, i);
    });

    const Tensor x64 = exact(x), q64 = s.normed ? exact(q_norm) : Tensor(), k64 = s.normed ? exact(k_norm) : Tensor();
    Tensor qk = x64.narrow(1, 0, rotated_heads);
    if (s.normed)
      qk = qk * torch::rsqrt(qk.square().mean(-1, true) + 1e-6) *
           torch::cat({q64.expand({s.heads, s.dim}), k64.expand({s.kv_heads, s.dim})});
    const auto per_token = [&](const Tensor& t) { return t.to(torch::kDouble).repeat({2, 1}).unsqueeze(1); };
    qk = qk * per_token(cos) + qk.roll(s.dim / 2, -1) * per_token(sin);
    const Tensor want = torch::cat({qk, x64.narrow(1, rotated_heads, s.kv_heads)}, 1);
    EXPECT_LT(error(out, want), kBound<T>) << s.dim;

    // Token 3 occurs in three rows, token 5 in none, and the others in one.
    std::vector<std::int32_t> rows;
    for (std::int32_t t = 0; t < tokens; ++t)
      if (t != 5) rows.push_back(t);
    rows.push_back(3), rows.insert(rows.begin() + 9, 3);
    std::vector<std::int32_t> first{0}, copies;
    for (std::int32_t t = 0; t < tokens; ++t) {
      for (std::size_t r = 0; r < rows.size(); ++r)
        if (rows[r] == t) copies.push_back(static_cast<std::int32_t>(r));
      first.push_back(static_cast<std::int32_t>(copies.size()));
    }
    const auto keys = static_cast<std::int64_t>(rows.size());
    const std::int64_t repeats = s.heads / s.kv_heads;
    const Tensor dq = this->random({tokens, s.heads, s.dim}), dk = this->random({keys, s.heads, s.dim}),
                 dv = this->random({keys, 2 * s.heads, s.dim}).narrow(1, s.heads, s.heads);
    const Tensor dx = torch::empty_like(x), sums = torch::full({parts(tokens, kRotateBackwardTokens), 2 * s.dim}, NAN);
    job.out = nullptr;
    const RotateBackwardJob<T> back{job,           data<T>(dq),  data<T>(dk),       data<T>(dv),
                                    dq.stride(0),  dk.stride(0), dv.stride(0),      first.data(),
                                    copies.data(), data<T>(dx),  data<float>(sums), static_cast<int>(repeats)};
    run_blocks<kRotateThreads>(sums.size(0), [&](auto& block, std::int64_t i) {
      s.dim > 128 ? rotate_backward_tokens<2>(block, back, i) : rotate_backward_tokens<1>(block, back, i);
    });
    const Tensor index = torch::tensor(std::vector<std::int64_t>(rows.begin(), rows.end()), torch::kLong);
    const auto sum_by_token = [&](const Tensor& d) {
      const Tensor of_kv = d.to(torch::kDouble).reshape({keys, s.kv_heads, repeats, s.dim}).sum(2);
      return torch::zeros({tokens, s.kv_heads, s.dim}, torch::kDouble).index_add(0, index, of_kv);
    };
    want.backward(torch::cat({dq.to(torch::kDouble), sum_by_token(dk), sum_by_token(dv)}, 1));
    EXPECT_LT(error(dx, x64.grad()), kBound<T>) << s.dim;
    if (s.normed) {
      const Tensor norms = sums_of<T>(sums);
      EXPECT_LT(error(norms.narrow(0, 0, s.dim), q64.grad()), 2 * kBound<T>) << s.dim;
      EXPECT_LT(error(norms.narrow(0, s.dim, s.dim), k64.grad()), 2 * kBound<T>) << s.dim;
    }
  }
}

TYPED_TEST(DeviceCode, RowsAreGathered) {
  using T = TypeParam;
  const Tensor from = this->random({9, 3, 16}), rows = torch::tensor({3, 3, 8, 0}, torch::kInt),
               to = torch::empty({4, 6, 16}, kType<T>);
  const GatherJob<T> job{data<T>(from) + 16, data<T>(to), data<std::int32_t>(rows), 4, 48, 32, 16, 3};
  run_blocks<kGatherThreads>(4, [&](auto& block, std::int64_t i) { gather_row(block, job, i); });
  EXPECT_TRUE(torch::equal(to, from.narrow(1, 1, 2).index_select(0, rows.to(torch::kLong)).repeat_interleave(3, 1)));
}

TYPED_TEST(DeviceCode, GatesAndTheirGradients) {
  using T = TypeParam;
  const std::int64_t rows = 53, width = 72, stride = 160;  // two gates in a row, with a gap
  const Tensor both = 3 * this->random({rows, stride}), d = this->random({rows, width});
  const Tensor out = torch::empty_like(d), slopes = torch::zeros_like(both);
  const auto half = [](const Tensor& t, std::int64_t index) { return t.narrow(1, index * 80, 72); };
  GateJob<T> job{data<T>(both), data<T>(both) + 80, nullptr, data<T>(out), nullptr, nullptr, rows, width, stride};
  GateJob<T> back{data<T>(both),   data<T>(both) + 80,   data<T>(d), nullptr,
                  data<T>(slopes), data<T>(slopes) + 80, rows,       width,
                  stride};
  const std::int64_t blocks = parts(rows * width, kGateThreads * kValuesPerPack<T>);
  run_blocks<kGateThreads>(blocks, [&](auto& block, std::int64_t i) { gate_part(block, job, i); });
  run_blocks<kGateThreads>(blocks, [&](auto& block, std::int64_t i) { gate_backward_part(block, back, i); });
  const Tensor g = half(both, 0), u = half(both, 1), g64 = exact(g), u64 = exact(u), want = torch::silu(g64) * u64;
  want.backward(d.to(torch::kDouble));
  EXPECT_LT(error(out, want), kBound<T>);
  EXPECT_LT(error(half(slopes, 0), g64.grad()), kBound<T>);
  EXPECT_LT(error(half(slopes, 1), u64.grad()), kBound<T>);
  EXPECT_LT(error(out, torch::silu(g) * u), kBound<T>) << "not as libtorch rounds";
  EXPECT_EQ(slopes.narrow(1, 72, 8).abs().max().template item<float>(), 0) << "written between the gates";
}

TYPED_TEST(DeviceCode, ScoresAndTheirGradients) {
  using T = TypeParam;
  for (const std::int64_t width : {67, 4104, 20000})
    for (const double temperature : {1.0, 0.7}) {
      const std::int64_t rows = 5;
      const Tensor logits = 4 * this->random({rows, width}), d = logits.clone(),
                   targets = torch::randint(width, {rows}, torch::kLong);
      const Tensor logprobs = torch::empty({rows}), entropies = torch::empty({rows}), sums = torch::empty({rows});
      const Tensor slopes = torch::randn({rows});
      ScoreJob<T> job{data<T>(logits),
                      data<std::int64_t>(targets),
                      data<float>(logprobs),
                      data<float>(entropies),
                      data<float>(sums),
                      nullptr,
                      rows,
                      width,
                      float(1 / temperature),
                      width % 8 == 0};
      run_blocks<kScoreThreads>(rows, [&](auto& block, std::int64_t i) { score_row(block, job, i); });
      job.logits = data<T>(d);
      job.slopes = data<float>(slopes);
      run_blocks<kScoreThreads>(rows, [&](auto& block, std::int64_t i) { score_backward_row(block, job, i); });
      const Tensor l64 = exact(logits), log_p = (l64 / temperature).log_softmax(1);
      const Tensor want = log_p.gather(1, targets.unsqueeze(1)).squeeze(1);
      want.backward(slopes.to(torch::kDouble));
      EXPECT_LT(error(logprobs, want), 1e-6) << width;
      EXPECT_LT(error(entropies, -(log_p.exp() * log_p).sum(1)), 2e-5) << width;
      EXPECT_LT(error(d, l64.grad()), sizeof(T) == 4 ? 1e-5 : 4e-3) << width;
    }
}

// The update on the CPU, against the same formula in fp64 with the stored values.
TEST(DeviceUpdate, ChangesEveryTensorByTheFormula) {
  torch::manual_seed(3);
  for (const bool coded : {false, true}) {
    struct Entry {
      Tensor parameter, master, m, v, s1, s2, gradient, m64, v64, w64;
    };
    std::vector<Entry> tensors;
    std::vector<UpdateEntry> entries;
    std::int64_t first = 0;
    const std::int64_t sizes[] = {1, 255, 256, 257, kUpdatePart, kUpdatePart + 1, 3 * kUpdatePart + 700};
    for (std::size_t i = 0; i < std::size(sizes); ++i) {
      const std::int64_t n = sizes[i], blocks = parts(n, kValueBlock);
      const bool is_fp32 = i % 2 == 0, no_gradient = i == 3;
      Entry entry;
      entry.master = torch::randn({n});
      entry.parameter = torch::empty({n}, is_fp32 ? torch::kFloat : torch::kBFloat16);
      entry.m = torch::zeros({n}, coded ? torch::kChar : torch::kFloat);
      entry.v = torch::zeros({n}, coded ? torch::kByte : torch::kFloat);
      if (coded) entry.s1 = torch::zeros({blocks}), entry.s2 = torch::zeros({blocks});
      if (!no_gradient) entry.gradient = torch::randn({n});
      entry.m64 = torch::zeros({n}, torch::kDouble), entry.v64 = entry.m64.clone(),
      entry.w64 = entry.master.to(torch::kDouble);
      entries.push_back({entry.parameter.data_ptr(), data<float>(entry.master), entry.m.data_ptr(), entry.v.data_ptr(),
                         data<float>(entry.s1), data<float>(entry.s2), data<float>(entry.gradient), nullptr, n, first,
                         is_fp32, i % 3 == 0, false, i % 4 != 0});
      first += parts(n, kUpdatePart);
      tensors.push_back(entry);
    }
    const std::int64_t count = std::ssize(entries);
    const double rate = 0.01, beta1 = 0.9, beta2 = 0.95, decay = 0.1, clip = 0.25;
    for (int n = 1; n <= 3; ++n) {
      const double c1 = 1 - std::pow(beta1, n), c2 = 1 - std::pow(beta2, n);
      const Tensor thresholds = torch::rand({kValueBlock});
      UpdateJob job{entries.data(),          count,        first,
                    data<float>(thresholds), float(clip),  float(beta1),
                    float(1 - beta1),        float(beta2), float(1 - beta2),
                    1 / float(c2),           1e-8f,        float(1 - rate * decay),
                    float(-rate / c1)};
      std::vector<Tensor> old1, old2;
      for (const Entry& entry : tensors) old1.push_back(entry.m.clone()), old2.push_back(entry.v.clone());
      run_blocks<kUpdateThreads>(first, [&](auto& block, std::int64_t i) { update_part(block, job, i); });
      for (std::size_t i = 0; i < tensors.size(); ++i) {
        Entry& entry = tensors[i];
        const Tensor g =
            entry.gradient.defined() ? entry.gradient.to(torch::kDouble) * clip : torch::zeros_like(entry.m64);
        entry.m64 = beta1 * entry.m64 + (1 - beta1) * g;
        entry.v64 = beta2 * entry.v64 + (1 - beta2) * g * g;
        if (entries[i].decays) entry.w64 = entry.w64 * (1 - rate * decay);
        entry.w64 = entry.w64 - rate / c1 * entry.m64 / ((entry.v64 / c2).sqrt() + 1e-8);
        EXPECT_TRUE(torch::equal(entry.parameter.to(torch::kBFloat16), entry.master.to(torch::kBFloat16))) << i;
        if (!coded) {
          EXPECT_LT(error(entry.master, entry.w64), 1e-6) << i;
          if (!entry.gradient.defined()) continue;
          EXPECT_LT(error(entry.m, entry.m64), 1e-6) << i;
          EXPECT_LT(error(entry.v, entry.v64), 1e-6) << i;
          continue;
        }
        // Each block stays within a step of its codes. The masters then differ by the rounding of the codes.
        EXPECT_LT(error(entry.master, entry.w64), 1e-2) << i;
        if (!entry.gradient.defined()) continue;
        const auto spread = [&](const Tensor& s) {
          return s.repeat_interleave(kValueBlock).narrow(0, 0, entry.m.numel()).to(torch::kDouble);
        };
        const Tensor root = entry.m.to(torch::kDouble) / 127;
        EXPECT_LT(((root * root.abs() * spread(entry.s1)) - entry.m64).abs().max().item<double>(), 0.05) << i;
        EXPECT_GT(entry.v.min().item<int>(), 0) << "a second moment in a denominator became zero";
        EXPECT_NEAR((entry.v.to(torch::kDouble) / 255).pow(4).max().item<double>(), 1, 0.02);
      }
    }
    const Tensor sums = torch::full({first}, NAN, torch::kDouble);
    const SquaresJob squares{entries.data(), count, first, data<double>(sums)};
    run_blocks<kUpdateThreads>(first, [&](auto& block, std::int64_t i) { squares_part(block, squares, i); });
    double want = 0;
    for (const Entry& entry : tensors)
      if (entry.gradient.defined()) want += entry.gradient.to(torch::kDouble).square().sum().item<double>();
    EXPECT_NEAR(sums.sum().item<double>() / want, 1, 1e-6);
  }
}

TEST(DeviceUpdate, GradientsAreAddedInFp32) {
  std::vector<UpdateEntry> entries;
  std::vector<Tensor> sums, fresh;
  std::int64_t first = 0;
  for (const std::int64_t n : {std::int64_t{5}, kUpdatePart + 3}) {
    sums.push_back(torch::randn({n}));
    fresh.push_back(torch::randn({n}).to(torch::kBFloat16));
    UpdateEntry e{};
    e.gradient = data<float>(sums.back());
    e.new_gradient = data<Bf16>(fresh.back());
    e.count = n;
    e.first_part = first;
    e.replaces = n == 5;
    e.aligned = true;
    entries.push_back(e);
    first += parts(n, kUpdatePart);
  }
  const std::vector<Tensor> want{fresh[0].to(torch::kFloat), sums[1] + fresh[1].to(torch::kFloat)};
  const AddJob job{entries.data(), 2, first};
  run_blocks<kUpdateThreads>(first, [&](auto& block, std::int64_t i) { add_part(block, job, i); });
  EXPECT_TRUE(torch::equal(sums[0], want[0]));
  EXPECT_TRUE(torch::equal(sums[1], want[1]));
}

// Attention by a plan, in fp64: queries of a segment see their keys from the end.
TEST(AttentionPlan, KeysOfSegmentsAreThoseOfTheirPrefixAndTheirOwn) {
  const Tensor segments =
      torch::tensor(std::vector<std::int64_t>{0, 7, -1, 7, 5, 0, 12, 3, 0, 15, 4, -1, 19, 1, -1, 20, 6, 4})
          .view({-1, 3});
  const std::int64_t tokens = 26;
  const AttentionPlan plan = attention_plan(segments, false, torch::kCPU);
  EXPECT_EQ(plan.queries_max, 7);
  EXPECT_EQ(plan.keys_max, 12);
  ASSERT_EQ(plan.rows.numel(), 26 + 7 + 7 + 1);
  Tensor sees = torch::zeros({tokens, tokens}, torch::kBool);
  const auto *q = plan.queries_first.data_ptr<std::int32_t>(), *k = plan.keys_first.data_ptr<std::int32_t>();
  const auto* row = plan.rows.data_ptr<std::int32_t>();
  for (int s = 0; s < 6; ++s)
    for (int t = q[s]; t < q[s + 1]; ++t)
      for (int key = k[s]; key < k[s + 1] - (q[s + 1] - 1 - t); ++key) sees[t][row[key]] = true;
  Tensor want = torch::zeros({tokens, tokens}, torch::kBool);
  const auto at = segments.accessor<std::int64_t, 2>();
  for (std::int64_t s = 0; s < 6; ++s) {
    want.narrow(0, at[s][0], at[s][1])
        .narrow(1, at[s][0], at[s][1])
        .copy_(torch::ones({at[s][1], at[s][1]}, torch::kBool).tril());
    if (at[s][2] >= 0) want.narrow(0, at[s][0], at[s][1]).narrow(1, at[at[s][2]][0], at[at[s][2]][1]).fill_(true);
  }
  EXPECT_TRUE(torch::equal(sees, want));
  const auto *first = plan.copies_first.data_ptr<std::int32_t>(), *copies = plan.copies.data_ptr<std::int32_t>();
  for (std::int32_t t = 0; t < tokens; ++t)
    for (int c = first[t]; c < first[t + 1]; ++c) EXPECT_EQ(row[copies[c]], t);
  EXPECT_EQ(first[tokens], plan.rows.numel());
  EXPECT_FALSE(attention_plan(uniform_segments(3, 4), false, torch::kCPU).rows.defined()) << "rows share no prefix";
  EXPECT_EQ(attention_plan(uniform_segments(3, 4), true, torch::kCPU).rows.numel(), 12);
}

// ---- on a device ----

Tensor random_there(torch::IntArrayRef shape, torch::ScalarType type) {
  return torch::randn(shape, torch::TensorOptions().device(torch::kCUDA)).to(type);
}

class OnGpuTraining : public testing::Test {
 protected:
  void SetUp() override {
    if (!have_kernels()) GTEST_SKIP() << "built without CUDA kernels, or with a libtorch without CUDA";
    if (torch::cuda::device_count() == 0) GTEST_SKIP() << "there is no CUDA device";
    torch::manual_seed(11);
  }
  void TearDown() override { use_kernels(true); }
};
constexpr torch::ScalarType kTypes[] = {torch::kFloat, torch::kBFloat16};
double bound_of(torch::ScalarType type) { return type == torch::kFloat ? 5e-6 : 6e-3; }

// Values and gradients of f(inputs) with the kernels, and of f in fp64 with libtorch.
template <class F>
void expect_exact(const char* what, std::vector<Tensor> inputs, torch::ScalarType type, const F& f) {
  std::vector<Tensor> wide;
  for (Tensor& t : inputs) {
    wide.push_back(t.to(torch::kDouble).requires_grad_(true));
    t.requires_grad_(true);
  }
  SCOPED_TRACE(fmt::format("{}, {} bytes a value", what, torch::elementSize(type)));
  use_kernels(true);
  const Tensor y = f(inputs);
  ASSERT_TRUE(y.requires_grad());
  use_kernels(false);
  const Tensor want = f(wide);
  ASSERT_TRUE(want.requires_grad());
  const Tensor slope = random_there(want.sizes(), y.scalar_type());
  use_kernels(true);
  y.backward(slope);
  use_kernels(false);
  want.backward(slope.to(torch::kDouble));
  EXPECT_LT(error(y, want), bound_of(type)) << what;
  for (std::size_t i = 0; i < inputs.size(); ++i)
    EXPECT_LT(error(inputs[i].grad(), wide[i].grad()), 2 * bound_of(type)) << what << ", input " << i;
}

TEST_F(OnGpuTraining, NormsRotationsGatesAndScoresAreThoseOfFp64) {
  for (const torch::ScalarType type : kTypes) {
    for (const std::int64_t width : {8, 1024, 5000})
      expect_exact("norm", {random_there({301, width}, type), random_there({width}, type)}, type, [](const auto& in) {
        if (in[0].scalar_type() != torch::kDouble) return rms_norm(in[0], in[1], 1e-6);
        return in[0] * torch::rsqrt(in[0].square().mean(-1, true) + 1e-6) * in[1];
      });
    expect_exact("gate", {random_there({77, 3072}, type), random_there({77, 3072}, type)}, type,
                 [](const auto& in) { return gated(in[0], in[1]); });
    for (const std::int64_t dim : {64, 128}) {
      const Tensor cos = random_there({150, dim}, torch::kFloat), sin = random_there({150, dim}, torch::kFloat);
      expect_exact(
          "rotation", {random_there({300, 20 * dim}, type), random_there({dim}, type), random_there({dim}, type)}, type,
          [&](const auto& in) {
            if (in[0].scalar_type() != torch::kDouble)
              return model::rotate(in[0], {cos, sin, in[1], in[2], 12, 4, 1e-6}).flatten(1);
            const Tensor rows = in[0].view({300, 20, dim});
            Tensor qk = rows.narrow(1, 0, 16);
            qk = qk * torch::rsqrt(qk.square().mean(-1, true) + 1e-6) *
                 torch::cat({in[1].expand({12, dim}), in[2].expand({4, dim})});
            const auto at = [](const Tensor& t) { return t.to(torch::kDouble).repeat({2, 1}).unsqueeze(1); };
            return torch::cat({qk * at(cos) + qk.roll(dim / 2, -1) * at(sin), rows.narrow(1, 16, 4)}, 1).flatten(1);
          });
    }
    const Tensor targets =
        torch::randint(20011, {900}, torch::TensorOptions().dtype(torch::kLong).device(torch::kCUDA));
    const Tensor hidden = random_there({900, 64}, type), weight = random_there({20011, 64}, type);
    Tensor entropy, entropy64;
    expect_exact("scores", {hidden, weight}, type, [&](const auto& in) {
      if (in[0].scalar_type() != torch::kDouble) {
        const LinearScores scores = linear_scores(in[0], in[1], targets, 5.0);
        entropy = scores.entropy;
        return scores.logprobs;
      }
      const Tensor log_p = (torch::linear(in[0], in[1]) / 5.0).log_softmax(1);
      entropy64 = -(log_p.exp() * log_p).sum(1);
      return log_p.gather(1, targets.unsqueeze(1)).squeeze(1);
    });
    EXPECT_LT(error(entropy, entropy64), bound_of(type));
  }
}

// Vocabularies of several parts.
TEST_F(OnGpuTraining, ScoresOfManyRowsAreThoseOfFewAtATime) {
  const std::int64_t rows = 4000, vocabulary = 151936, hidden = 64;
  const Tensor weight = random_there({vocabulary, hidden}, torch::kBFloat16).requires_grad_(true);
  const Tensor x = random_there({rows, hidden}, torch::kBFloat16).requires_grad_(true);
  const Tensor targets =
      torch::randint(vocabulary, {rows}, torch::TensorOptions().dtype(torch::kLong).device(torch::kCUDA));
  const Tensor slope = random_there({rows}, torch::kFloat);
  const auto of = [&](bool kernels) {
    use_kernels(kernels);
    weight.mutable_grad() = Tensor();
    x.mutable_grad() = Tensor();
    const LinearScores scores = linear_scores(x, weight, targets, 3.0);
    scores.logprobs.backward(slope);
    return std::vector<Tensor>{scores.logprobs.detach(), scores.entropy, weight.grad(), x.grad()};
  };
  const auto with = of(true), without = of(false);
  for (std::size_t i = 0; i < with.size(); ++i) EXPECT_LT(error(with[i], without[i]), i < 2 ? 1e-4 : 8e-3) << i;
}

TEST_F(OnGpuTraining, AttentionWithSharedPrefixesIsThatOfFp64) {
  const Tensor segments = torch::tensor(std::vector<std::int64_t>{0,   70, -1, 70,  5,   0,  75,  130, 0,  205, 64, 0,
                                                                  269, 1,  -1, 270, 300, -1, 570, 3,   -1, 573, 66, 6})
                              .view({-1, 3});
  const std::int64_t tokens = 639;
  const Tensor cos = random_there({tokens, 128}, torch::kFloat), sin = random_there({tokens, 128}, torch::kFloat);
  for (const bool normed : {true, false})
    for (const auto& [heads, kv, dim] : {std::tuple{16, 8, 128}, {8, 1, 64}, {3, 3, 16}}) {
      const Rotation r{
          cos.narrow(1, 0, dim).contiguous() / 4, sin.narrow(1, 0, dim).contiguous() / 4, {}, {}, heads, kv, 1e-6};
      std::vector<Tensor> inputs{random_there({tokens, (heads + 2 * kv) * dim}, torch::kBFloat16)};
      if (normed)
        inputs.push_back(random_there({dim}, torch::kBFloat16)),
            inputs.push_back(random_there({dim}, torch::kBFloat16));
      expect_exact("attention", inputs, torch::kBFloat16, [&, heads = heads, kv = kv, dim = dim](const auto& in) {
        Rotation own = r;
        if (normed) own.q_norm = in[1], own.k_norm = in[2];
        if (in[0].scalar_type() != torch::kDouble) {
          if (!supports_attend_on_device(in[0], own)) ADD_FAILURE() << "there is no flash attention";
          return attend_on_device(in[0], own, attention_plan(segments, heads > kv, torch::kCUDA));
        }
        const Tensor rows = in[0].view({tokens, heads + 2 * kv, dim});
        Tensor qk = rows.narrow(1, 0, heads + kv);
        if (normed)
          qk = qk * torch::rsqrt(qk.square().mean(-1, true) + 1e-6) *
               torch::cat({in[1].expand({heads, dim}), in[2].expand({kv, dim})});
        qk = qk * r.cos.to(torch::kDouble).unsqueeze(1) + qk.roll(dim / 2, -1) * r.sin.to(torch::kDouble).unsqueeze(1);
        Tensor ahead = torch::ones({tokens, tokens}, torch::kBool);
        const auto at = segments.accessor<std::int64_t, 2>();
        for (std::int64_t s = 0; s < segments.size(0); ++s) {
          const std::int64_t begin = at[s][0], count = at[s][1];
          ahead.narrow(0, begin, count)
              .narrow(1, begin, count)
              .copy_(torch::ones({count, count}, torch::kBool).triu(1));
          if (at[s][2] >= 0) ahead.narrow(0, begin, count).narrow(1, at[at[s][2]][0], at[at[s][2]][1]).zero_();
        }
        const auto many = [&](const Tensor& t) { return t.transpose(0, 1).repeat_interleave(heads / kv, 0); };
        const Tensor scores =
            torch::matmul(qk.narrow(1, 0, heads).transpose(0, 1), many(qk.narrow(1, heads, kv)).transpose(1, 2))
                .masked_fill(ahead.to(torch::kCUDA), -INFINITY);
        return torch::matmul(scores.softmax(-1), many(rows.narrow(1, heads + kv, kv))).transpose(0, 1).flatten(1);
      });
    }
}

// A whole pass, in both types, against the same in fp64 with libtorch alone; packed and in rows.
TEST_F(OnGpuTraining, GradientsOfAModelAreThoseOfFp32OnTheCpu) {
  for (const bool tied : {true, false}) {
    ModelConfig config = small_config(tied);
    config.hidden_size = 64, config.intermediate_size = 96, config.heads = 4, config.kv_heads = 2, config.head_dim = 16;
    const auto exact = random_model(config, 5);
    std::vector<std::vector<std::int64_t>> texts(6);
    std::vector<ScoredSequence> sequences;
    for (std::size_t i = 0; i < texts.size(); ++i) {
      for (int t = 0; t < 50; ++t) texts[i].push_back((t < 20 ? t * 7 : t * 3 + static_cast<int>(i) * t) % 19);
      sequences.push_back({texts[i], i < 4 ? std::size_t{20} : std::size_t{3}, {}});
    }
    const auto of = [&](Transformer& model) {
      model.zero_grad();
      model.packed_logprobs(pack(sequences, model.device()), 0.9).logprobs.mean().backward();
    };
    of(*exact);
    for (const torch::ScalarType type : kTypes)
      for (const bool recompute : {false, true}) {
        Transformer there(config, torch::kCUDA, type);
        {
          torch::NoGradGuard no_gradient;
          const auto from = exact->parameters(), to = there.parameters();
          for (std::size_t i = 0; i < to.size(); ++i) to[i].copy_(from[i]);
        }
        there.recompute_layers(recompute);
        of(there);
        const auto want = exact->named_parameters();
        for (const auto& item : there.named_parameters())
          EXPECT_LT(error(item.value().grad(), want[item.key()].grad()), type == torch::kFloat ? 2e-5 : 6e-2)
              << item.key() << (recompute ? " recomputed" : "");
      }
  }
}

}  // namespace
}  // namespace echoline::model::training

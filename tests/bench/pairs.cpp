#include "tests/bench/pairs.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <numbers>
#include <thread>
#include <vector>

#include "base/random.hpp"
#include "delta/checkpoint.hpp"
#include "tests/delta/in_memory.hpp"

namespace echoline::bench {
namespace {

constexpr double kWeightScale = 0.0174;  // with kRowScaleSigma: the percentiles of pairs.hpp
constexpr double kRowScaleSigma = 0.31;
constexpr double kNormSigma = 0.1;  // norms lie around 1
constexpr float kBeta1 = 0.9F, kBeta2 = 0.99F;
constexpr std::size_t kSampleElements = 1u << 20;  // for the search of the learning rate

std::uint16_t to_bf16(float value) {  // to nearest, ties to even
  const auto bits = std::bit_cast<std::uint32_t>(value);
  return static_cast<std::uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
float from_bf16(std::uint16_t bits) { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }

// Two independent normals (Box and Muller).
std::pair<double, double> normals(Random& random) {
  const double radius = std::sqrt(-2.0 * std::log1p(-random.uniform()));
  const double angle = 2.0 * std::numbers::pi * random.uniform();
  return {radius * std::cos(angle), radius * std::sin(angle)};
}

struct RowSpec {
  std::size_t tensor = 0;
  std::size_t row = 0;
  bool is_norm = false;
  bool is_embedding = false;
};

// The weights of one row before the update, as fp32, and m̂/(√v̂+ε) of each, the factor of the learning rate.
struct RowMaker {
  PairOptions options;
  float step_size = 0;    // 1/(1 − β1ⁿ)
  float correction2 = 0;  // 1/(1 − β2ⁿ)

  explicit RowMaker(const PairOptions& o) : options(o) {
    step_size = 1.0F / (1.0F - std::pow(kBeta1, static_cast<float>(o.updates)));
    correction2 = 1.0F / (1.0F - std::pow(kBeta2, static_cast<float>(o.updates)));
  }

  void make(const RowSpec& spec, std::vector<float>& weights, std::vector<float>& updates) const {
    Random random(options.seed, static_cast<std::uint64_t>(spec.tensor) << 40 | spec.row);
    const auto [z_scale, z_spread] = normals(random);
    const bool touched = !spec.is_embedding || random.uniform() >= options.untouched_rows;
    const double scale = spec.is_norm ? kNormSigma : kWeightScale * std::exp(kRowScaleSigma * z_scale);
    const double center = spec.is_norm ? 1.0 : 0.0;
    for (std::size_t i = 0; i < weights.size(); i += 2) {
      const auto [a, b] = normals(random);
      weights[i] = static_cast<float>(center + scale * a);
      if (i + 1 < weights.size()) weights[i + 1] = static_cast<float>(center + scale * b);
    }
    const auto factor = static_cast<float>(std::exp(options.row_spread * z_spread));
    for (float& update : updates) update = touched ? factor * adam(random) : 0.0F;
  }

  // One element's moments over `updates` gradients. A gradient is a sum of four uniform numbers, close enough to
  // normal for moments that average many; its scale cancels.
  float adam(Random& random) const {
    float m = 0, v = 0;
    for (int n = 0; n < options.updates; ++n) {
      const std::uint64_t bits = random.next();
      const auto sum =
          static_cast<std::int32_t>((bits & 0xffff) + (bits >> 16 & 0xffff) + (bits >> 32 & 0xffff) + (bits >> 48));
      const float gradient = (static_cast<float>(sum) - 131070.0F) * (1.0F / 37837.0F);
      m = kBeta1 * m + (1 - kBeta1) * gradient;
      v = kBeta2 * v + (1 - kBeta2) * gradient * gradient;
    }
    return step_size * m / (std::sqrt(correction2 * v) + 1e-8F);
  }

  std::pair<std::uint16_t, std::uint16_t> versions(float weight, float update, float rate) const {
    const std::uint16_t prev = to_bf16(weight);
    const float base = options.regime == Regime::kPureBf16 ? from_bf16(prev) : weight;
    return {prev, to_bf16(base - rate * update)};
  }
};

delta::StateView layout(std::uint64_t elements, std::uint64_t tensor_elements) {
  // 61 h² elements: an embedding of 16 h² and three layers of 15 h².
  const double wanted = std::sqrt(static_cast<double>(elements) / 61.0) / 64.0;
  const std::int64_t h = 64 * std::max<std::int64_t>(1, std::llround(wanted));
  delta::StateView state;
  const auto add = [&](std::string name, std::vector<std::int64_t> shape) {
    state.push_back({std::move(name), delta::DType::kBF16, std::move(shape), {}});
  };
  add("model.embed_tokens.weight", {16 * h, h});
  add("model.norm.weight", {h});
  for (int i = 0; i < 3; ++i) {
    const std::string layer = fmt::format("model.layers.{}.", i);
    add(layer + "self_attn.q_proj.weight", {2 * h, h});
    add(layer + "self_attn.k_proj.weight", {h, h});
    add(layer + "self_attn.v_proj.weight", {h, h});
    add(layer + "self_attn.o_proj.weight", {h, 2 * h});
    add(layer + "mlp.gate_proj.weight", {3 * h, h});
    add(layer + "mlp.up_proj.weight", {3 * h, h});
    add(layer + "mlp.down_proj.weight", {h, 3 * h});
    add(layer + "input_layernorm.weight", {h});
    add(layer + "post_attention_layernorm.weight", {h});
  }
  if (tensor_elements > 0) {
    delta::StateView parts;
    const std::int64_t rows = std::max<std::int64_t>(1, static_cast<std::int64_t>(tensor_elements) / h);
    for (const auto& t : state)
      for (std::int64_t at = 0; at < (t.shape.size() == 1 ? 1 : t.shape[0]); at += rows) {
        std::vector<std::int64_t> shape = t.shape;
        if (shape.size() > 1) shape[0] = std::min(rows, t.shape[0] - at);
        parts.push_back({fmt::format("{}.{:06}", t.name, at), t.dtype, std::move(shape), {}});
      }
    state = std::move(parts);
  }
  std::sort(state.begin(), state.end(), [](const auto& a, const auto& b) { return a.name < b.name; });
  return state;
}

std::vector<RowSpec> rows_of(const delta::StateView& state) {
  std::vector<RowSpec> rows;
  for (std::size_t t = 0; t < state.size(); ++t) {
    const bool is_norm = state[t].shape.size() == 1;
    const std::size_t count = is_norm ? 1 : static_cast<std::size_t>(state[t].shape[0]);
    for (std::size_t r = 0; r < count; ++r)
      rows.push_back({t, r, is_norm, state[t].name.starts_with("model.embed_tokens.weight")});
  }
  return rows;
}

std::size_t row_length(const delta::TensorView& tensor) { return static_cast<std::size_t>(tensor.shape.back()); }

// Calls work(row index, scratch weights, scratch updates) for every row, sized for it.
void for_each_row(const delta::StateView& state, const std::vector<RowSpec>& rows, unsigned threads,
                  const std::function<void(std::size_t, std::vector<float>&, std::vector<float>&)>& work) {
  std::atomic<std::size_t> next{0};
  const auto loop = [&] {
    std::vector<float> weights, updates;
    for (std::size_t i = 0; (i = next.fetch_add(1)) < rows.size();) {
      weights.resize(row_length(state[rows[i].tensor]));
      updates.resize(weights.size());
      work(i, weights, updates);
    }
  };
  std::vector<std::jthread> helpers;
  for (unsigned t = 1; t < threads; ++t) helpers.emplace_back(loop);
  loop();
}

// The learning rate that changes `density` of all elements, estimated from a sample of every row.
Result<float> search_rate(const RowMaker& maker, const delta::StateView& state, const std::vector<RowSpec>& rows) {
  std::size_t elements = 0;
  for (const RowSpec& row : rows) elements += row_length(state[row.tensor]);
  std::vector<float> weights, updates;
  for (const RowSpec& row : rows) {
    const std::size_t length = row_length(state[row.tensor]);
    std::vector<float> w(elements <= kSampleElements ? length : length * kSampleElements / elements + 1), u(w.size());
    maker.make(row, w, u);
    weights.insert(weights.end(), w.begin(), w.end());
    updates.insert(updates.end(), u.begin(), u.end());
  }
  const auto density = [&](float rate) {
    std::size_t changed = 0;
    for (std::size_t i = 0; i < weights.size(); ++i) {
      const auto [prev, cur] = maker.versions(weights[i], updates[i], rate);
      changed += prev != cur;
    }
    return static_cast<double>(changed) / static_cast<double>(weights.size());
  };
  double low = -30, high = 0;  // log of the rate
  if (density(1.0F) < maker.options.density)
    return fail(Code::kInvalid, "make a pair", "a density of {} is out of reach with {} of the embedding untouched",
                maker.options.density, maker.options.untouched_rows);
  for (int i = 0; i < 30; ++i) {
    const double middle = (low + high) / 2;
    (density(static_cast<float>(std::exp(middle))) < maker.options.density ? low : high) = middle;
  }
  return static_cast<float>(std::exp(high));
}

std::span<std::uint16_t> row_of(std::span<std::byte> tensor, const RowSpec& spec, std::size_t length) {
  return {reinterpret_cast<std::uint16_t*>(tensor.data()) + spec.row * length, length};
}

}  // namespace

Result<Pair> make_pair(const PairOptions& options) {
  const delta::StateView state = layout(options.elements, options.tensor_elements);
  const std::vector<RowSpec> rows = rows_of(state);
  const RowMaker maker(options);
  ECHO_ASSIGN(const float rate, search_rate(maker, state, rows));

  Pair pair;
  pair.learning_rate = rate;
  ECHO_ASSIGN(pair.prev, delta::OwnedState::empty_like(state));
  ECHO_ASSIGN(pair.cur, delta::OwnedState::empty_like(state));
  std::vector<std::span<std::byte>> prev, cur;
  for (std::size_t t = 0; t < state.size(); ++t) {
    prev.push_back(pair.prev.mutable_bytes(t));
    cur.push_back(pair.cur.mutable_bytes(t));
  }
  for_each_row(state, rows, options.threads, [&](std::size_t i, std::vector<float>& weights, std::vector<float>& u) {
    maker.make(rows[i], weights, u);
    const auto from = row_of(prev[rows[i].tensor], rows[i], weights.size());
    const auto to = row_of(cur[rows[i].tensor], rows[i], weights.size());
    for (std::size_t j = 0; j < weights.size(); ++j) std::tie(from[j], to[j]) = maker.versions(weights[j], u[j], rate);
  });
  pair.prev.seal();
  pair.cur.seal();
  pair.name = fmt::format("{}, {:.2f} %", options.regime == Regime::kPureBf16 ? "pure bf16" : "fp32 master",
                          100 * options.density);
  if (options.tensor_elements > 0) pair.name += fmt::format(", in {} tensors", state.size());
  if (options.row_spread > 0) pair.name += fmt::format(", row spread {}", options.row_spread);
  if (options.untouched_rows > 0)
    pair.name += fmt::format(", {:.0f} % of embedding untouched", 100 * options.untouched_rows);
  return pair;
}

Result<Pair> read_pair(const std::string& where) {
  std::filesystem::path from = std::filesystem::path(where) / "prev.safetensors";
  std::filesystem::path to = std::filesystem::path(where) / "cur.safetensors";
  if (const auto comma = where.find(','); comma != std::string::npos) {
    from = where.substr(0, comma);
    to = where.substr(comma + 1);
  }
  ECHO_ASSIGN(const auto prev, delta::Checkpoint::open(from));
  ECHO_ASSIGN(const auto cur, delta::Checkpoint::open(to));
  Pair pair;
  pair.name = where;
  ECHO_ASSIGN(pair.prev, delta::copy_of(prev.view()));
  ECHO_ASSIGN(pair.cur, delta::copy_of(cur.view()));
  return pair;
}

std::string describe(const Pair& pair) {
  const delta::StateView prev = pair.prev.view(), cur = pair.cur.view();
  constexpr std::size_t kMagnitudes = 1u << 15;  // bf16 bits without sign
  std::vector<std::uint64_t> histogram(kMagnitudes);
  std::array<std::uint64_t, 256> elements{}, changed{};
  std::uint64_t total = 0, changes = 0, by_one = 0;
  double sum = 0;
  for (std::size_t t = 0; t < prev.size(); ++t) {
    if (prev[t].dtype != delta::DType::kBF16) continue;
    for (std::size_t i = 0; i + 2 <= prev[t].bytes.size(); i += 2) {
      std::uint16_t a = 0, b = 0;
      std::memcpy(&a, prev[t].bytes.data() + i, 2);
      std::memcpy(&b, cur[t].bytes.data() + i, 2);
      const unsigned exponent = a >> 7 & 0xff;
      ++histogram[a & 0x7fff];
      ++elements[exponent];
      ++total;
      sum += std::abs(from_bf16(a));
      if (a == b) continue;
      ++changed[exponent];
      ++changes;
      by_one += std::abs(static_cast<int>(a) - static_cast<int>(b)) == 1;
    }
  }
  if (total == 0) return "  no bf16 tensors\n";
  const auto quantile = [&](double share) {
    std::uint64_t below = 0;
    for (std::size_t m = 0; m < kMagnitudes; ++m)
      if ((below += histogram[m]) > static_cast<std::uint64_t>(share * static_cast<double>(total)))
        return from_bf16(static_cast<std::uint16_t>(m));
    return 0.0F;
  };
  std::string text = fmt::format("  |w|: 5th percentile {:.4f}, median {:.4f}, mean {:.4f}, 95th percentile {:.4f}\n",
                                 quantile(0.05), quantile(0.5), sum / static_cast<double>(total), quantile(0.95));
  text += fmt::format("  changes by one step: {:.1f} %; density by exponent of the old value:",
                      changes ? 100.0 * static_cast<double>(by_one) / static_cast<double>(changes) : 0.0);
  for (unsigned e = 0; e < 256; ++e)
    if (elements[e] * 2000 >= total)
      text += fmt::format(" 2^{}: {:.2g} %", static_cast<int>(e) - 127,
                          100.0 * static_cast<double>(changed[e]) / static_cast<double>(elements[e]));
  return text + "\n";
}

}  // namespace echoline::bench

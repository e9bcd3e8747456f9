// Computes the reference with plain loops in double precision.
#include "reference.hpp"

#include <algorithm>
#include <cmath>

namespace echoline::model::reference {
namespace {

using Vector = std::vector<double>;
using Rows = std::vector<Vector>;

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

Vector product(const Vector& matrix, const Vector& x) {
  Vector y(matrix.size() / x.size());
  for (std::size_t i = 0; i < y.size(); ++i) {
    for (std::size_t j = 0; j < x.size(); ++j) y[i] += matrix[i * x.size() + j] * x[j];
  }
  return y;
}

Vector rms_norm(const Vector& x, const Vector& weight, double eps) {
  double squares = 0;
  for (const double v : x) squares += v * v;
  const double scale = 1 / std::sqrt(squares / double(x.size()) + eps);
  Vector y(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) y[i] = x[i] * scale * weight[i];
  return y;
}

// Gemma's norms multiply by 1 + weight.
Vector norm_factor(const ModelConfig& c, Vector weight) {
  if (c.family == Family::kGemma3)
    for (double& w : weight) w += 1;
  return weight;
}

// Whether token s is hidden from token t of this layer, because it is before the window.
bool is_before_window(const ModelConfig& c, std::int64_t layer, std::size_t t, std::size_t s) {
  if (!c.sliding_window) return false;
  for (const std::int64_t full : c.sliding_window->full_layers)
    if (full == layer) return false;
  return t - s >= size(c.sliding_window->tokens);
}

// Rotation of pair i in radians per position. Llama 3 scales it by wavelength in three ranges, as transformers
// describes. Gemma's layers with a window have a base of their own and no scaling.
double radians_per_position(const ModelConfig& c, std::int64_t layer, std::size_t i, std::size_t dim) {
  const bool is_local = c.family == Family::kGemma3 && is_before_window(c, layer, 1 << 30, 0);
  const double plain = std::pow(is_local ? c.local_rope_theta : c.rope_theta, -2.0 * double(i) / double(dim));
  if (!c.rope_scaling || is_local) return plain;
  const RopeScaling& r = *c.rope_scaling;
  if (r.is_linear) return plain / r.factor;
  const double wavelength = 2 * std::acos(-1.0) / plain, original = double(r.original_positions);
  if (wavelength < original / r.high_freq_factor) return plain;
  if (wavelength > original / r.low_freq_factor) return plain / r.factor;
  const double smooth = (original / wavelength - r.low_freq_factor) / (r.high_freq_factor - r.low_freq_factor);
  return (1 - smooth) * plain / r.factor + smooth * plain;
}

// One head: norm if the family has one, then rotation of the pairs (i, i + dim / 2).
Vector head(const Vector& heads, std::size_t index, std::size_t dim, const Vector* norm, const ModelConfig& c,
            std::int64_t layer, std::size_t position) {
  const auto begin = heads.begin() + std::ptrdiff_t(index * dim);
  Vector x(begin, begin + std::ptrdiff_t(dim));
  if (norm) x = rms_norm(x, norm_factor(c, *norm), c.rms_norm_eps);
  Vector y(dim);
  for (std::size_t i = 0; i < dim / 2; ++i) {
    const double angle = double(position) * radians_per_position(c, layer, i, dim);
    y[i] = x[i] * std::cos(angle) - x[i + dim / 2] * std::sin(angle);
    y[i + dim / 2] = x[i + dim / 2] * std::cos(angle) + x[i] * std::sin(angle);
  }
  return y;
}

// GELU in the approximation by tanh.
double gelu(double x) { return 0.5 * x * (1 + std::tanh(std::sqrt(2 / std::acos(-1.0)) * (x + 0.044715 * x * x * x))); }

// The MLP whose weights begin with `prefix`.
Vector mlp(const ModelConfig& c, const Weights& w, const std::string& prefix, const Vector& x) {
  Vector gate = product(w.at(prefix + "gate_proj.weight"), x);
  const Vector up = product(w.at(prefix + "up_proj.weight"), x);
  for (std::size_t i = 0; i < gate.size(); ++i)
    gate[i] = up[i] * (c.family == Family::kGemma3 ? gelu(gate[i]) : gate[i] / (1 + std::exp(-gate[i])));
  return product(w.at(prefix + "down_proj.weight"), gate);
}

// A mixture of experts: the weighted sum of the given experts, or of those with the highest scores.
Vector mixture(const ModelConfig& c, const Weights& w, const std::string& prefix, const Vector& x,
               const std::vector<std::size_t>& given) {
  Vector scores = log_softmax(product(w.at(prefix + "gate.weight"), x), 1);
  for (double& score : scores) score = std::exp(score);
  std::vector<std::size_t> best(scores.size());
  for (std::size_t e = 0; e < best.size(); ++e) best[e] = e;
  std::sort(best.begin(), best.end(), [&](std::size_t a, std::size_t b) { return scores[a] > scores[b]; });
  best.resize(size(c.experts->per_token));
  if (!given.empty()) best = given;
  double sum = 0;
  for (const std::size_t e : best) sum += scores[e];
  if (!c.experts->weights_sum_to_1) sum = 1;
  Vector y(x.size());
  for (const std::size_t e : best) {
    const Vector part = mlp(c, w, prefix + "experts." + std::to_string(e) + ".", x);
    for (std::size_t i = 0; i < y.size(); ++i) y[i] += scores[e] / sum * part[i];
  }
  return y;
}

}  // namespace

Vector log_softmax(const Vector& logits, double temperature) {
  const double top = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const double l : logits) sum += std::exp((l - top) / temperature);
  Vector out;
  for (const double l : logits) out.push_back((l - top) / temperature - std::log(sum));
  return out;
}

Rows logits(const ModelConfig& c, const Weights& w, const std::vector<Token>& tokens, const GivenExperts& given) {
  const std::size_t hidden = size(c.hidden_size), dim = size(c.head_dim), heads = size(c.heads),
                    kv_heads = size(c.kv_heads), count = tokens.size();
  const Vector& embedding = w.at("model.embed_tokens.weight");
  Rows x;
  for (const Token token : tokens) {
    const auto row = embedding.begin() + std::ptrdiff_t(size(token) * hidden);
    x.emplace_back(row, row + std::ptrdiff_t(hidden));
    if (c.family == Family::kGemma3)  // by the root of the size, with the 8 bits of a bf16 number
      for (double& value : x.back()) {
        int exponent = 0;
        const double fraction = std::frexp(std::sqrt(double(hidden)), &exponent);
        value *= std::ldexp(std::nearbyint(std::ldexp(fraction, 8)), exponent - 8);
      }
  }
  const bool is_gemma = c.family == Family::kGemma3;
  // Adds the output of attention or of the MLP to a token's state.
  const auto add_output = [&](Vector& state, Vector output, const std::string& norm) {
    if (is_gemma) output = rms_norm(output, norm_factor(c, w.at(norm)), c.rms_norm_eps);
    for (std::size_t i = 0; i < hidden; ++i) state[i] += output[i];
  };
  std::size_t mixture_index = 0;
  for (std::int64_t n = 0; n < c.layers; ++n) {
    const auto weight = [&](const char* name) -> const Vector& {
      return w.at("model.layers." + std::to_string(n) + "." + name + ".weight");
    };
    const auto norm = [&](const char* name) { return c.qk_norm() ? &weight(name) : nullptr; };
    const auto biased = [&](const char* name, Vector y) {
      if (c.family != Family::kQwen2) return y;
      const Vector& bias = w.at("model.layers." + std::to_string(n) + "." + name + ".bias");
      for (std::size_t i = 0; i < y.size(); ++i) y[i] += bias.at(i);
      return y;
    };
    Rows q(count), k(count), v(count);
    for (std::size_t t = 0; t < count; ++t) {
      const Vector y = rms_norm(x[t], norm_factor(c, weight("input_layernorm")), c.rms_norm_eps);
      q[t] = biased("self_attn.q_proj", product(weight("self_attn.q_proj"), y));
      k[t] = biased("self_attn.k_proj", product(weight("self_attn.k_proj"), y));
      v[t] = biased("self_attn.v_proj", product(weight("self_attn.v_proj"), y));
    }
    for (std::size_t t = 0; t < count; ++t) {
      Vector attended(heads * dim);
      for (std::size_t h = 0; h < heads; ++h) {
        const std::size_t kv_head = h / (heads / kv_heads);
        const Vector query = head(q[t], h, dim, norm("self_attn.q_norm"), c, n, t);
        Vector scores;
        for (std::size_t s = 0; s <= t; ++s) {
          const Vector key = head(k[s], kv_head, dim, norm("self_attn.k_norm"), c, n, s);
          double dot = 0;
          for (std::size_t i = 0; i < dim; ++i) dot += query[i] * key[i];
          scores.push_back(is_before_window(c, n, t, s)
                               ? -INFINITY
                               : dot / std::sqrt(double(is_gemma ? c.query_scalar : std::int64_t(dim))));
        }
        const Vector log_p = log_softmax(scores, 1);
        for (std::size_t s = 0; s <= t; ++s) {
          for (std::size_t i = 0; i < dim; ++i) attended[h * dim + i] += std::exp(log_p[s]) * v[s][kv_head * dim + i];
        }
      }
      add_output(x[t], product(weight("self_attn.o_proj"), attended),
                 fmt::format("model.layers.{}.post_attention_layernorm.weight", n));
    }
    for (std::size_t t = 0; t < count; ++t) {
      const Vector y =
          rms_norm(x[t], norm_factor(c, weight(is_gemma ? "pre_feedforward_layernorm" : "post_attention_layernorm")),
                   c.rms_norm_eps);
      const std::string prefix = "model.layers." + std::to_string(n) + ".mlp.";
      const bool has_experts = w.contains(prefix + "gate.weight");
      const Vector down =
          !has_experts ? mlp(c, w, prefix, y)
                       : mixture(c, w, prefix, y, given.empty() ? std::vector<std::size_t>() : given[t][mixture_index]);
      add_output(x[t], down, fmt::format("model.layers.{}.post_feedforward_layernorm.weight", n));
    }
    mixture_index += w.contains("model.layers." + std::to_string(n) + ".mlp.gate.weight") ? 1 : 0;
  }
  Rows out;
  for (const Vector& row : x) {
    out.push_back(product(c.tie_embeddings ? embedding : w.at("lm_head.weight"),
                          rms_norm(row, norm_factor(c, w.at("model.norm.weight")), c.rms_norm_eps)));
  }
  return out;
}

}  // namespace echoline::model::reference

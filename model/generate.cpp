#include "model/generate.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <new>
#include <string_view>

namespace echoline::model {
namespace {

using torch::Tensor;

Status check(const ModelConfig& config, const std::vector<std::vector<Token>>& prompts,
             const SamplingOptions& options) {
  const auto bad = []<class... Args>(fmt::format_string<Args...> format, Args&&... args) {
    return fail(Code::kInvalid, "generate", format, std::forward<Args>(args)...);
  };
  if (!(options.temperature >= 0) || !std::isfinite(options.temperature)) {
    return bad("temperature is {}, expected a number >= 0", options.temperature);
  }
  if (!(options.top_p > 0 && options.top_p <= 1)) return bad("top_p is {}, expected 0 < top_p <= 1", options.top_p);
  if (options.tokens_max < 1) return bad("tokens_max is {}, expected at least 1", options.tokens_max);
  for (std::size_t row = 0; row < prompts.size(); ++row) {
    const auto& prompt = prompts[row];
    if (prompt.empty()) return bad("prompt {} is empty, expected at least one token", row);
    if (static_cast<std::int64_t>(prompt.size()) > config.positions_max - options.tokens_max) {
      return bad("prompt {} has {} tokens, which with tokens_max {} exceeds the model's {} positions", row,
                 prompt.size(), options.tokens_max, config.positions_max);
    }
    for (const Token token : prompt) {
      if (token < 0 || token >= config.vocab_size) {
        return bad("prompt {} contains token {}, expected 0 to {}", row, token, config.vocab_size - 1);
      }
    }
  }
  return ok();
}

// What libtorch threw. Its allocators say so in words ("can't allocate memory", "CUDA out of memory"); their types
// differ between releases.
Error failed(std::size_t rows, std::string_view what) {
  const bool memory = what.find("memory") != std::string_view::npos;
  return fail(memory ? Code::kExhausted : Code::kInternal, "generate", "{} rows: {}{}", rows, what,
              memory ? "; use a smaller batch" : "");
}

// A generator of its own for this call, on the model's device.
at::Generator make_generator(const torch::Device& device, std::uint64_t seed) {
  at::Generator generator = at::globalContext().defaultGenerator(device).clone();
  generator.set_current_seed(seed);
  return generator;
}

// -inf outside the nucleus: the fewest most likely tokens that together hold top_p.
Tensor nucleus(const Tensor& log_p, double top_p) {
  const auto [sorted, order] = log_p.sort(-1, /*descending=*/true);
  const Tensor p = sorted.exp();
  const Tensor outside = (p.cumsum(-1) - p) >= top_p;  // what is more likely already holds top_p
  return log_p.masked_fill(torch::zeros_like(outside).scatter_(-1, order, outside), -INFINITY);
}

struct Sampler {
  const SamplingOptions& options;
  at::Generator generator;

  struct Drawn {
    Tensor tokens;    // int64 [rows]
    Tensor logprobs;  // fp32 [rows]
  };
  Drawn draw(const Tensor& logits) {
    if (options.temperature == 0) {
      const Tensor log_p = logits.log_softmax(-1);
      const auto [best, index] = log_p.max(-1);
      return {index, best};
    }
    const Tensor log_p = (options.temperature == 1 ? logits : logits / options.temperature).log_softmax(-1);
    const Tensor allowed = options.top_p < 1 ? nucleus(log_p, options.top_p) : log_p;
    // Gumbel-max: argmax(log p - log E), E ~ Exp(1), is distributed as p.
    const Tensor tokens =
        (allowed - torch::empty_like(allowed).exponential_(1.0, generator).clamp_min_(1e-30).log_()).argmax(-1);
    return {tokens, log_p.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)};
  }
};

// Rows to continue, one per prompt, after reading each distinct prompt once.
struct Prefilled {
  KvCache cache;
  Tensor logits;     // [rows, vocab], of the next token
  Tensor positions;  // int64 [rows, 1], of the next token; undefined when all rows are equally long
  Tensor key_mask;   // bool [rows, capacity]; undefined likewise
};

Prefilled prefill(Transformer& model, const std::vector<std::vector<Token>>& prompts, std::int64_t tokens_max) {
  const auto device = model.device();
  std::map<std::vector<Token>, std::int64_t> index_of;
  std::vector<const std::vector<Token>*> distinct;
  std::vector<std::int64_t> row_of, lengths;
  std::int64_t longest = 0;
  for (const auto& prompt : prompts) {
    const auto [it, fresh] = index_of.emplace(prompt, static_cast<std::int64_t>(distinct.size()));
    if (fresh) {
      distinct.push_back(&prompt);
      lengths.push_back(static_cast<std::int64_t>(prompt.size()));
      longest = std::max(longest, lengths.back());
    }
    row_of.push_back(it->second);
  }
  const auto count = static_cast<std::int64_t>(distinct.size());
  Tensor ids = torch::zeros({count, longest}, torch::kLong);
  for (std::int64_t row = 0; row < count; ++row) {
    const auto& prompt = *distinct[static_cast<std::size_t>(row)];
    std::copy(prompt.begin(), prompt.end(), ids.data_ptr<std::int64_t>() + (row + 1) * longest - std::ssize(prompt));
  }
  const bool padded = std::any_of(lengths.begin(), lengths.end(), [&](auto length) { return length != longest; });
  Layout layout;
  if (padded) layout = left_padded(lengths, device);

  Prefilled out;
  out.cache = KvCache(model.config(), count, longest + tokens_max, device, model.dtype());
  const Tensor hidden = model.hidden_states(ids.to(device), layout, &out.cache);
  out.logits = model.logits(hidden.select(1, longest - 1));
  if (padded) {
    out.positions = layout.positions.narrow(1, longest - 1, 1) + 1;
    out.key_mask = torch::cat({layout.key_mask, torch::ones({count, tokens_max}, layout.key_mask.options())}, 1);
  }
  if (count != static_cast<std::int64_t>(prompts.size())) {
    const Tensor rows = torch::tensor(row_of, torch::kLong).to(device);
    out.cache.select_rows(rows);
    out.logits = out.logits.index_select(0, rows);
    if (padded) {
      out.positions = out.positions.index_select(0, rows);
      out.key_mask = out.key_mask.index_select(0, rows);
    }
  }
  return out;
}

}  // namespace

Result<std::vector<Generation>> generate(Transformer& model, const std::vector<std::vector<Token>>& prompts,
                                         const SamplingOptions& options, const std::function<bool()>& interrupted) {
  ECHO_TRY(check(model.config(), prompts, options));
  std::vector<Generation> out(prompts.size());
  if (prompts.empty()) return out;
  try {
    torch::NoGradGuard no_grad;
    Prefilled state = prefill(model, prompts, options.tokens_max);
    Sampler sampler{options, make_generator(model.device(), options.seed)};
    std::vector<std::size_t> live(prompts.size());  // which prompt each row of the batch continues
    for (std::size_t i = 0; i < live.size(); ++i) live[i] = i;
    std::vector<bool> ended(prompts.size());
    std::size_t unfinished = prompts.size();

    for (std::int64_t step = 0;; ++step) {
      const auto drawn = sampler.draw(state.logits);
      const Tensor tokens = drawn.tokens.cpu(), logprobs = drawn.logprobs.cpu();
      for (std::size_t row = 0; row < live.size(); ++row) {
        if (ended[live[row]]) continue;
        Generation& generation = out[live[row]];
        const auto token = static_cast<Token>(tokens.data_ptr<std::int64_t>()[row]);
        generation.tokens.push_back(token);
        generation.logprobs.push_back(logprobs.data_ptr<float>()[row]);
        if (!std::isfinite(generation.logprobs.back())) {
          return fail(Code::kCorrupt, "generate",
                      "the logits of prompt {} at new token {} are not finite; the weights "
                      "have diverged or are damaged",
                      live[row], step);
        }
        if (std::find(options.eos.begin(), options.eos.end(), token) != options.eos.end()) {
          generation.finish = Finish::kEos;
          ended[live[row]] = true;
          --unfinished;
        }
      }
      if (unfinished == 0 || step + 1 == options.tokens_max) break;
      if (interrupted && interrupted()) {
        for (std::size_t i = 0; i < out.size(); ++i) {
          if (!ended[i]) out[i].finish = Finish::kInterrupted;
        }
        break;
      }
      Tensor next = drawn.tokens;
      // Finished rows are dropped when they are half of the batch: copying the cache then pays for itself.
      if (2 * unfinished <= live.size()) {
        std::vector<std::int64_t> rows;
        std::vector<std::size_t> kept;
        for (std::size_t row = 0; row < live.size(); ++row) {
          if (ended[live[row]]) continue;
          rows.push_back(static_cast<std::int64_t>(row));
          kept.push_back(live[row]);
        }
        const Tensor keep = torch::tensor(rows, torch::kLong).to(model.device());
        state.cache.select_rows(keep);
        next = next.index_select(0, keep);
        if (state.positions.defined()) {
          state.positions = state.positions.index_select(0, keep);
          state.key_mask = state.key_mask.index_select(0, keep);
        }
        live = std::move(kept);
      }
      Layout layout;
      if (state.positions.defined()) {
        layout = {state.positions, state.key_mask.narrow(1, 0, state.cache.length + 1)};
        state.positions = state.positions + 1;
      }
      state.logits = model.forward(next.unsqueeze(1), layout, &state.cache).select(1, 0);
    }
    return out;
  } catch (const c10::Error& e) {
    return failed(prompts.size(), e.what_without_backtrace());
  } catch (const std::bad_alloc&) {
    return failed(prompts.size(), "out of memory");
  } catch (const std::exception& e) {
    return failed(prompts.size(), e.what());
  }
}

Result<std::vector<float>> score(Transformer& model, const std::vector<Token>& prompt,
                                 const std::vector<Token>& continuation, double temperature) {
  std::vector<Token> all = prompt;
  all.insert(all.end(), continuation.begin(), continuation.end());
  if (prompt.empty() || continuation.empty())
    return fail(Code::kInvalid, "score", "the {} is empty, expected at least one token",
                prompt.empty() ? "prompt" : "continuation");
  SamplingOptions options;
  options.temperature = temperature;
  options.tokens_max = 1;
  all.pop_back();  // check() leaves room for one more
  ECHO_TRY(check(model.config(), {all, continuation}, options));
  all.push_back(continuation.back());
  try {
    torch::NoGradGuard no_grad;
    const Tensor ids = torch::tensor(std::vector<std::int64_t>(all.begin(), all.end()), torch::kLong).unsqueeze(0);
    const Tensor scores = model.token_logprobs(ids.to(model.device()), temperature).logprobs.cpu().contiguous();
    const float* first = scores.data_ptr<float>() + (prompt.size() - 1);
    return std::vector<float>(first, first + continuation.size());
  } catch (const std::exception& e) {
    return fail(Code::kExhausted, "score", "{} tokens: {}", all.size(), e.what());
  }
}

}  // namespace echoline::model

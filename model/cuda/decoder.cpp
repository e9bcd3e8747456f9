// Implements Decoder over a DeviceBackend: fills the buffers of a step, records its kernels, and replays them.
#include "model/cuda/decoder.hpp"

#include <algorithm>
#include <cstring>

#include "base/log.hpp"
#include "model/layer.hpp"

namespace echoline::model::cuda {

using torch::Tensor;

namespace {

constexpr std::int64_t kStepsBeforeRetry = 512;  // after a failure
constexpr std::int64_t kInitialPageCapacity = 1 << 14;

// Rounds a number of rows up: to 1, 2, 4 or a multiple of 8; above 64, to a multiple of an eighth of the next power of
// two. So there are few recordings, and none has many surplus rows.
std::int64_t recorded_rows(std::int64_t rows) {
  std::int64_t step = 1;
  while (step < 8 && rows > step) step *= 2;
  while (rows > 8 * step) step *= 2;
  return (rows + step - 1) / step * step;
}

bool restricted(const Sampling& s) { return s.temperature > 0 && (s.top_p < 1 || s.top_k > 0 || s.min_p > 0); }

const Bf16* bf16(const Tensor& tensor) {
  return tensor.defined() ? static_cast<const Bf16*>(tensor.data_ptr()) : nullptr;
}
Bf16* bf16_out(const Tensor& tensor) { return static_cast<Bf16*>(tensor.data_ptr()); }

std::uint32_t u32(std::int64_t value) { return static_cast<std::uint32_t>(value); }

}  // namespace

// Memory whose addresses are in recordings, for up to `rows` rows with `pages` pages in all. The input of a step is
// contiguous in `input_host`; the first kernel copies it to `input`. The last kernel writes to `result_host`.
struct Decoder::Buffers {
  std::int64_t rows, pages;
  Tensor x, residual_update, normed, qkv, attention_out, gate_up, inner, logits;  // bf16 [rows, ...]
  // Results of split attention and of split sampling. The counters *_arrived tell the last block of a row to merge
  // them.
  Tensor partial, attend_arrived, tops, sums, sample_arrived;
  Tensor input, input_host, result_host;  // bytes

  Buffers(const ModelConfig& c, const torch::Device& device, unsigned processors, std::int64_t r, std::int64_t p)
      : rows(r), pages(p) {
    const auto on_device = torch::TensorOptions().device(device);
    const auto values = [&](std::int64_t width) {
      return torch::zeros({rows, width}, on_device.dtype(torch::kBFloat16));
    };
    const auto floats = [&](std::int64_t count) { return torch::zeros({count}, on_device.dtype(torch::kFloat)); };
    const auto words = [&](std::int64_t count) { return torch::zeros({count}, on_device.dtype(torch::kInt)); };
    x = values(c.hidden_size), residual_update = values(c.hidden_size), normed = values(c.hidden_size),
    attention_out = values(c.heads * c.head_dim);
    qkv = values((c.heads + 2 * c.kv_heads) * c.head_dim);
    gate_up = values(2 * c.intermediate_size), inner = values(c.intermediate_size);
    logits = values((c.vocab_size + 7) / 8 * 8);
    std::int64_t parts = 0;  // the greatest number of attention splits, summed over rows, for up to `rows` rows
    for (std::int64_t n = 1; n <= rows; ++n)
      parts = std::max<std::int64_t>(parts, n * attend_splits(processors, u32(n), u32(c.kv_heads)));
    partial = floats(parts * c.kv_heads * attend_heads(u32(c.heads / c.kv_heads)) * (c.head_dim + 2));
    attend_arrived = words(rows * c.kv_heads), sample_arrived = words(rows);
    tops = floats(rows * kSampleWarps * sample_blocks(u32(c.vocab_size))), sums = torch::zeros_like(tops);
    const auto bytes = torch::TensorOptions().dtype(torch::kByte);
    const auto on_host = bytes.pinned_memory(device.is_cuda());
    input = torch::zeros({input_vectors(pages) * 16}, bytes.device(device));
    input_host = torch::zeros({input.numel()}, on_host);
    result_host = torch::zeros({rows * 8}, on_host);
  }

  // The header and the arrays below, in vectors of 16 bytes.
  std::int64_t input_vectors(std::int64_t pages_used) const {
    constexpr std::int64_t kRowBytes = sizeof(double) + sizeof(float) + 3 * sizeof(std::int32_t);
    return 1 + (rows * kRowBytes + pages_used * 4 + 15) / 16;
  }
  // The header in `input` or `input_host`.
  static InputHeader* header(const Tensor& of) { return static_cast<InputHeader*>(of.data_ptr()); }
  double* uniform(const Tensor& of) const { return reinterpret_cast<double*>(header(of) + 1); }
  float* temperature(const Tensor& of) const { return reinterpret_cast<float*>(uniform(of) + rows); }
  std::int32_t* ids(const Tensor& of) const { return reinterpret_cast<std::int32_t*>(temperature(of) + rows); }
  std::int32_t* positions(const Tensor& of) const { return ids(of) + rows; }
  std::int32_t* pages_begin(const Tensor& of) const { return positions(of) + rows; }
  std::int32_t* page_list(const Tensor& of) const { return pages_begin(of) + rows; }
  std::int32_t* tokens() const { return static_cast<std::int32_t*>(result_host.data_ptr()); }
  float* logprobs() const { return reinterpret_cast<float*>(tokens() + rows); }
};

Status Decoder::check(const Transformer& model) {
  const ModelConfig& c = model.config();
  const auto bad = []<class... Args>(fmt::format_string<Args...> format, Args&&... args) -> Status {
    return fail(Code::kInvalid, "open decoder", format, std::forward<Args>(args)...);
  };
  if (model.dtype() != torch::kBFloat16) return bad("the weights are not in bf16");
  if (!attend_supports(u32(c.head_dim), u32(c.heads / c.kv_heads)))
    return bad("heads have {} values (expected 16, 32, 64 or 128), and {} query heads share a key (expected at most 8)",
               c.head_dim, c.heads / c.kv_heads);
  for (const std::int64_t inputs : {c.hidden_size, c.heads * c.head_dim, c.intermediate_size})
    if (inputs % kStepInputs != 0)
      return bad("a product has {} inputs, expected a multiple of {}", inputs, kStepInputs);
  if (kSampleWarps * sample_blocks(u32(c.vocab_size)) > kSampleWarpsMax)
    return bad("the vocabulary has {} tokens, expected at most {}", c.vocab_size,
               kSampleWarpsMax * kTokensPerSampleWarp);
  return ok();
}

std::unique_ptr<Decoder> Decoder::open_if_supported(Transformer& model, PagedCache& cache) {
  if (!model.device().is_cuda()) return nullptr;
  const auto open = [&]() -> Result<std::unique_ptr<Decoder>> {
    ECHO_TRY(check(model));
    ECHO_ASSIGN(auto backend, open_backend(model.device()));
    return std::make_unique<Decoder>(model, cache, std::move(backend));
  };
  Result<std::unique_ptr<Decoder>> decoder = open();
  if (decoder) return std::move(*decoder);
  log::info("the CUDA decoder cannot be used; decoding uses libtorch's operations, which is slower: {}",
            decoder.error().message());
  return nullptr;
}

Decoder::Decoder(Transformer& model, PagedCache& cache, std::unique_ptr<DeviceBackend> backend)
    : model_(model), cache_(cache), backend_(std::move(backend)) {}
Decoder::~Decoder() = default;

std::optional<SampledTokens> Decoder::step(std::span<const DecodeRow> rows) {
  if (steps_until_retry_ > 0 && --steps_until_retry_ > 0) return std::nullopt;
  try {
    return attempt(rows);
  } catch (const c10::Error& e) {
    pause("decoding", rows.size(), e.what_without_backtrace());
  } catch (const std::exception& e) {
    pause("decoding", rows.size(), e.what());
  }
  return std::nullopt;
}

void Decoder::pause(std::string_view what, std::size_t rows, std::string_view why) {
  log::warn("{} {} rows failed, and libtorch's operations are used for {} steps: {}", what, rows, kStepsBeforeRetry,
            why);
  recordings_.clear();
  buffers_.reset();
  steps_until_retry_ = kStepsBeforeRetry;
}

std::optional<Tensor> Decoder::prefill(const Tensor& ids, const std::vector<std::int64_t>& lengths,
                                       const std::vector<const Pages*>& page_lists) {
  if (steps_until_retry_ > 0) return std::nullopt;
  try {
    return attempt_prefill(ids, lengths, page_lists);
  } catch (const c10::Error& e) {
    const std::string why = e.what_without_backtrace();
    if (why.find("memory") != std::string::npos) throw;  // the caller retries with fewer rows
    pause("reading", page_lists.size(), why);
    return std::nullopt;
  }
}

// Like a step with a row per token, but not recorded, because no two calls have the same shape.
Tensor Decoder::attempt_prefill(const Tensor& ids, const std::vector<std::int64_t>& lengths,
                                const std::vector<const Pages*>& page_lists) {
  const ModelConfig& c = model_.config();
  const std::int64_t rows = ids.size(0), longest = ids.size(1), tokens = rows * longest;
  const std::int64_t heads = c.heads, kv = c.kv_heads, dim = c.head_dim, width = c.intermediate_size;
  const Transformer::Parts parts = model_.parts(longest);
  const auto eps = static_cast<float>(c.rms_norm_eps);
  const Tensor cache_slots = torch::full({rows, longest}, -1, torch::kInt);  // by token; -1: padding
  std::vector<std::int64_t> last_tokens;
  for (std::int64_t row = 0; row < rows; ++row) {
    const Pages& text = *page_lists[static_cast<std::size_t>(row)];
    const std::int64_t count = lengths[static_cast<std::size_t>(row)];
    std::int32_t* const slots = cache_slots.data_ptr<std::int32_t>() + row * longest;
    for (std::int64_t position = 0; position < count; ++position)
      slots[position] = static_cast<std::int32_t>(
          text.list[static_cast<std::size_t>(position / kPageTokens)] * kPageTokens + position % kPageTokens);
    last_tokens.push_back(row * longest + count - 1);
  }
  const Tensor input = torch::stack({ids.to(torch::kInt), cache_slots}).to(model_.device());
  const auto values = [&](std::int64_t count) { return torch::empty({tokens, count}, parts.embedding.options()); };
  const Tensor x = values(c.hidden_size), residual_update = values(c.hidden_size), normed = values(c.hidden_size);
  const Tensor qkv = values((heads + 2 * kv) * dim), gate_up = values(2 * width), inner = values(width);
  const auto norm = [&](const Tensor& to, const Tensor& added, const Tensor& weight, const Tensor& out) {
    backend_->run(
        NormJob{bf16_out(to), bf16(added), bf16(weight), bf16_out(out), u32(to.size(0)), u32(c.hidden_size), eps});
  };
  const auto *const token_ids = input.data_ptr<std::int32_t>(), *const token_slots = token_ids + tokens;
  backend_->run(EmbedJob{bf16(parts.embedding), token_ids, bf16_out(x), u32(tokens), u32(c.hidden_size)});
  for (std::size_t i = 0; i < parts.layers->size(); ++i) {
    const Transformer::Layer& l = (*parts.layers)[i];
    norm(x, i == 0 ? Tensor() : residual_update, l.input_norm, normed);
    backend_->multiply(normed, l.qkv, l.qkv_bias, qkv);
    backend_->run(RotateJob{bf16_out(qkv), bf16(l.q_norm), bf16(l.k_norm), parts.cos.data_ptr<float>(),
                            parts.sin.data_ptr<float>(), token_slots, bf16_out(cache_.keys()[i]),
                            bf16_out(cache_.values()[i]), u32(tokens), u32(longest), u32(heads), u32(kv), eps},
                  u32(dim));
    const Tensor by_head = qkv.view({rows, longest, heads + 2 * kv, dim});
    const Tensor attention_out =
        backend_->attend(by_head.narrow(2, 0, heads), by_head.narrow(2, heads, kv), by_head.narrow(2, heads + kv, kv));
    backend_->multiply(attention_out, l.o, {}, residual_update);
    norm(x, residual_update, l.post_norm, normed);
    multiply_gate_up(l, normed, gate_up);
    backend_->run(
        GateJob{bf16(gate_up), bf16(gate_up) + width, bf16_out(inner), u32(tokens), u32(width), u32(2 * width)});
    backend_->multiply(inner, l.down, {}, residual_update);
  }
  const Tensor last_index = torch::tensor(last_tokens, torch::kLong).to(model_.device());
  const Tensor last_hidden = x.index_select(0, last_index), out = torch::empty_like(last_hidden);
  norm(last_hidden, residual_update.index_select(0, last_index), parts.norm, out);
  return out;
}

void Decoder::allocate_buffers(std::int64_t rows, std::int64_t pages) {
  if (buffers_ && buffers_->rows >= rows && buffers_->pages >= pages) return;
  const std::int64_t rows_before = buffers_ ? buffers_->rows : 0,
                     pages_before = buffers_ ? buffers_->pages : kInitialPageCapacity;
  recordings_.clear();
  buffers_.reset();
  buffers_ =
      std::make_unique<Buffers>(model_.config(), model_.device(), backend_->processors(), std::max(rows, rows_before),
                                pages > pages_before ? std::max(pages, 2 * pages_before) : pages_before);
}

std::vector<const void*> Decoder::addresses(std::int64_t positions) {
  const Transformer::Parts parts = model_.parts(positions);
  std::vector<const void*> out;
  const auto add = [&](const Tensor& tensor) { out.push_back(tensor.defined() ? tensor.data_ptr() : nullptr); };
  for (const Tensor* tensor : {&parts.embedding, &parts.norm, &parts.lm_head, &parts.cos, &parts.sin}) add(*tensor);
  for (const Transformer::Layer& l : *parts.layers)
    for (const Tensor* tensor :
         {&l.qkv, &l.qkv_bias, &l.q_norm, &l.k_norm, &l.o, &l.input_norm, &l.post_norm, &l.gate, &l.up, &l.down})
      add(*tensor);
  for (const Tensor& keys : cache_.keys()) add(keys);
  for (const Tensor& values : cache_.values()) add(values);
  return out;
}

SampledTokens Decoder::attempt(std::span<const DecodeRow> rows) {
  const std::int64_t recorded = recorded_rows(std::ssize(rows));
  std::int64_t pages = 0, positions = 0;
  for (const DecodeRow& row : rows) {
    pages += PagedCache::pages_for(row.text->tokens + 1);
    positions = std::max(positions, row.text->tokens + 1);
  }
  allocate_buffers(recorded, pages);
  if (std::vector<const void*> addresses_now = addresses(positions); addresses_now != addresses_) {
    recordings_.clear();
    addresses_ = std::move(addresses_now);
  }
  const Buffers& b = *buffers_;
  std::int64_t pages_written = 0;
  bool any_restricted = false;
  for (std::int64_t i = 0; i < recorded; ++i) {
    const bool is_request = i < std::ssize(rows);
    const DecodeRow* const row = is_request ? &rows[static_cast<std::size_t>(i)] : nullptr;
    b.uniform(b.input_host)[i] = is_request ? row->request.uniform : 0;
    b.temperature(b.input_host)[i] = is_request ? static_cast<float>(row->request.sampling->temperature) : 1;
    b.ids(b.input_host)[i] = is_request ? row->id : 0;
    b.positions(b.input_host)[i] = is_request ? static_cast<std::int32_t>(row->text->tokens) : -1;
    b.pages_begin(b.input_host)[i] = static_cast<std::int32_t>(pages_written);
    if (!is_request) continue;
    const std::int64_t count = PagedCache::pages_for(row->text->tokens + 1);
    std::transform(row->text->list.begin(), row->text->list.begin() + count, b.page_list(b.input_host) + pages_written,
                   [](Page page) { return static_cast<std::int32_t>(page); });
    pages_written += count;
    any_restricted |= restricted(*row->request.sampling);
  }
  b.header(b.input_host)->vectors = u32(b.input_vectors(pages));
  auto& recording = recordings_[recorded];
  if (!recording) recording = backend_->record([&] { queue_step(recorded); });
  kernels_ = recording->kernels();
  recording->replay();
  backend_->wait();
  SampledTokens out;
  out.tokens.assign(b.tokens(), b.tokens() + rows.size());
  out.logprobs.assign(b.logprobs(), b.logprobs() + rows.size());
  if (!any_restricted) return out;
  std::vector<SampleRequest> requests;
  std::vector<std::int64_t> resampled_rows;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (!restricted(*rows[i].request.sampling)) continue;
    requests.push_back(rows[i].request);
    resampled_rows.push_back(static_cast<std::int64_t>(i));
  }
  const Tensor logits = b.logits.index_select(0, torch::tensor(resampled_rows, torch::kLong).to(model_.device()))
                            .narrow(1, 0, model_.config().vocab_size)
                            .to(torch::kFloat);
  const SampledTokens resampled = sample_tokens(logits, requests, /*batched=*/true);
  for (std::size_t i = 0; i < resampled_rows.size(); ++i) {
    out.tokens[static_cast<std::size_t>(resampled_rows[i])] = resampled.tokens[i];
    out.logprobs[static_cast<std::size_t>(resampled_rows[i])] = resampled.logprobs[i];
  }
  return out;
}

// to = norm(from) weight^T + bias (+ to); an undefined `norm` leaves `from` unchanged.
void Decoder::project(std::int64_t rows, const Tensor& from, const Tensor& norm, const Tensor& weight,
                      const Tensor& bias, const Tensor& to, bool adding) {
  const auto eps = static_cast<float>(model_.config().rms_norm_eps);
  const std::uint32_t in = u32(weight.size(1)), outputs = u32(weight.size(0));
  const bool norms = norm.defined() && product_norms(u32(rows), in, false);
  const Bf16* x = bf16(from);
  if (norm.defined() && !norms) {
    backend_->run(NormJob{bf16_out(from), nullptr, bf16(norm), bf16_out(buffers_->normed), u32(rows), in, eps});
    x = bf16(buffers_->normed);
  }
  backend_->run(ProductJob{x, norms ? bf16(norm) : nullptr, bf16(weight), nullptr, bf16(bias),
                           adding ? bf16(to) : nullptr, bf16_out(to), u32(rows), in, outputs, u32(to.size(1)),
                           product_parts(backend_->processors(), in, outputs, false), eps});
}

void Decoder::multiply_gate_up(const Transformer::Layer& layer, const Tensor& x, const Tensor& out) {
  const std::int64_t width = layer.gate.size(0);
  if (layer.gate_up.defined()) {
    backend_->multiply(x, layer.gate_up, {}, out);
  } else {
    backend_->multiply(x, layer.gate, {}, out.narrow(1, 0, width));
    backend_->multiply(x, layer.up, {}, out.narrow(1, width, width));
  }
}

// Queues the kernels of a step.
void Decoder::queue_step(std::int64_t rows) {
  const ModelConfig& c = model_.config();
  const Transformer::Parts parts = model_.parts(0);
  const std::vector<Transformer::Layer>& layers = *parts.layers;
  const Buffers& b = *buffers_;
  const auto eps = static_cast<float>(c.rms_norm_eps);
  const std::uint32_t r = u32(rows), hidden = u32(c.hidden_size), width = u32(c.intermediate_size);
  const unsigned splits = attend_splits(backend_->processors(), r, u32(c.kv_heads));
  const unsigned tokens_min = attend_tokens_min(backend_->processors(), r, u32(c.kv_heads));
  const bool few = rows <= kProductRowsMax;
  const auto first = [&](const Tensor& tensor) { return tensor.narrow(0, 0, rows); };
  const auto norm = [&](const Tensor& added, const Tensor& weight) {
    backend_->run(NormJob{bf16_out(b.x), bf16(added), bf16(weight), bf16_out(b.normed), r, hidden, eps});
  };
  backend_->run(ReceiveJob{static_cast<const Vector*>(b.input_host.data_ptr()),
                           static_cast<Vector*>(b.input.data_ptr()), few ? 1u : 8u});
  backend_->run(EmbedJob{bf16(parts.embedding), b.ids(b.input), bf16_out(b.x), r, hidden});
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const Transformer::Layer& l = layers[i];
    if (few) {
      project(rows, b.x, l.input_norm, l.qkv, l.qkv_bias, b.qkv, false);
    } else {
      norm(i == 0 ? Tensor() : b.residual_update, l.input_norm);
      backend_->multiply(first(b.normed), l.qkv, l.qkv_bias, first(b.qkv));
    }
    backend_->run(
        AttendJob{bf16(b.qkv), bf16(l.q_norm), bf16(l.k_norm), parts.cos.data_ptr<float>(), parts.sin.data_ptr<float>(),
                  b.positions(b.input), b.page_list(b.input), b.pages_begin(b.input), bf16_out(cache_.keys()[i]),
                  bf16_out(cache_.values()[i]), bf16_out(b.attention_out), b.partial.data_ptr<float>(),
                  reinterpret_cast<unsigned*>(b.attend_arrived.data_ptr<std::int32_t>()), r, u32(c.heads),
                  u32(c.kv_heads), splits, tokens_min, eps},
        u32(c.head_dim));
    if (few) {
      project(rows, b.attention_out, {}, l.o, {}, b.x, true);
      const bool norms = product_norms(r, hidden, true);
      if (!norms) norm({}, l.post_norm);
      backend_->run(ProductJob{norms ? bf16(b.x) : bf16(b.normed), norms ? bf16(l.post_norm) : nullptr, bf16(l.gate),
                               bf16(l.up), nullptr, nullptr, bf16_out(b.inner), r, hidden, width, width,
                               product_parts(backend_->processors(), hidden, width, true), eps});
      project(rows, b.inner, {}, l.down, {}, b.x, true);
    } else {
      backend_->multiply(first(b.attention_out), l.o, {}, first(b.residual_update));
      norm(b.residual_update, l.post_norm);
      multiply_gate_up(l, first(b.normed), first(b.gate_up));
      backend_->run(GateJob{bf16(b.gate_up), bf16(b.gate_up) + width, bf16_out(b.inner), r, width, 2 * width});
      backend_->multiply(first(b.inner), l.down, {}, first(b.residual_update));
    }
  }
  if (few) {
    project(rows, b.x, parts.norm, parts.lm_head, {}, b.logits, false);
  } else {
    norm(b.residual_update, parts.norm);
    backend_->multiply(first(b.normed), parts.lm_head, {}, first(b.logits).narrow(1, 0, c.vocab_size));
  }
  backend_->run(SampleJob{bf16(b.logits), b.temperature(b.input), b.uniform(b.input), b.tops.data_ptr<float>(),
                          b.sums.data_ptr<float>(),
                          reinterpret_cast<unsigned*>(b.sample_arrived.data_ptr<std::int32_t>()), b.tokens(),
                          b.logprobs(), r, u32(c.vocab_size), u32(b.logits.size(1))});
}

}  // namespace echoline::model::cuda

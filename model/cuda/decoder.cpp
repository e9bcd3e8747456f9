// Implements Decoder over a DeviceBackend: fills the buffers of a step, records its kernels, and replays them.
#include "model/cuda/decoder.hpp"

#include <algorithm>
#include <cstring>

#include "base/log.hpp"
#include "model/layer.hpp"

namespace echoline::model::cuda {

using torch::Tensor;

namespace {

constexpr std::int64_t kStepsBeforeRetry = 512;         // after a failure: the last of these steps tries the kernels
constexpr std::int64_t kInitialPageCapacity = 1 << 14;  // page numbers that fit in the input of a step at first

// The number of rows of the recording for `rows` rows: rounded up to 1, 2, 4 or a multiple of 8; above 64, to a
// multiple of an eighth of the next power of two. So there are few recordings, and none has many surplus rows (rows
// that no request uses).
std::int64_t recorded_rows(std::int64_t rows) {
  std::int64_t step = 1;
  while (step < 8 && rows > step) step *= 2;
  while (rows > 8 * step) step *= 2;
  return (rows + step - 1) / step * step;
}

// Whether top_p, top_k or min_p can exclude tokens. The sampling kernel does not implement them.
bool excludes_tokens(const Sampling& s) { return s.temperature > 0 && (s.top_p < 1 || s.top_k > 0 || s.min_p > 0); }

const Bf16* bf16(const Tensor& tensor) {
  return tensor.defined() ? static_cast<const Bf16*>(tensor.data_ptr()) : nullptr;
}
Bf16* bf16_out(const Tensor& tensor) { return static_cast<Bf16*>(tensor.data_ptr()); }

constexpr std::int64_t kVectorBytes = sizeof(Vector);

std::uint32_t u32(std::int64_t value) { return static_cast<std::uint32_t>(value); }

}  // namespace

// The memory of a step, whose addresses are in recordings, for up to `rows` rows that have up to `pages` pages
// together. The host writes the input of a step to `input_host`; the first kernel copies it to `input`. The last kernel
// writes to `result_host`.
struct Decoder::Buffers {
  std::int64_t rows, pages;
  Tensor x, residual_update, normed, qkv, attention_out, gate_up, inner, logits;  // bf16 [rows, ...]
  // For AttendJob (its members `partial` and `arrived`) and for SampleJob (max_logits, `sums` and `arrived`).
  Tensor partial, attend_arrived, max_logits, sums, sample_arrived;
  Tensor input, input_host, result_host;  // bytes

  Buffers(const ModelConfig& config, const torch::Device& device, unsigned processors, std::int64_t rows_max,
          std::int64_t pages_max)
      : rows(rows_max), pages(pages_max) {
    const auto on_device = torch::TensorOptions().device(device);
    const auto values = [&](std::int64_t width) {
      return torch::zeros({rows, width}, on_device.dtype(torch::kBFloat16));
    };
    const auto floats = [&](std::int64_t count) { return torch::zeros({count}, on_device.dtype(torch::kFloat)); };
    const auto words = [&](std::int64_t count) { return torch::zeros({count}, on_device.dtype(torch::kInt)); };
    x = values(config.hidden_size);
    residual_update = values(config.hidden_size);
    normed = values(config.hidden_size);
    attention_out = values(config.heads * config.head_dim);
    qkv = values((config.heads + 2 * config.kv_heads) * config.head_dim);
    gate_up = values(2 * config.intermediate_size);
    inner = values(config.intermediate_size);
    logits = values((config.vocab_size + kVectorCount - 1) / kVectorCount * kVectorCount);
    std::int64_t splits_max = 0;  // the most splits of all rows together, over all numbers of rows
    for (std::int64_t rows_used = 1; rows_used <= rows; ++rows_used)
      splits_max = std::max<std::int64_t>(splits_max,
                                          rows_used * attend_splits(processors, u32(rows_used), u32(config.kv_heads)));
    // + 2: the maximum score and the sum of the weights (AttendJob).
    partial = floats(splits_max * config.kv_heads * attend_heads(u32(config.heads / config.kv_heads)) *
                     (config.head_dim + 2));
    attend_arrived = words(rows * config.kv_heads);
    sample_arrived = words(rows);
    max_logits = floats(rows * kSampleWarps * sample_blocks(u32(config.vocab_size)));
    sums = torch::zeros_like(max_logits);
    const auto bytes = torch::TensorOptions().dtype(torch::kByte);
    const auto on_host = bytes.pinned_memory(device.is_cuda());
    input = torch::zeros({input_vectors(pages) * kVectorBytes}, bytes.device(device));
    input_host = torch::zeros({input.numel()}, on_host);
    constexpr std::int64_t kResultBytes = sizeof(std::int32_t) + sizeof(float);  // token and log-probability of a row
    result_host = torch::zeros({rows * kResultBytes}, on_host);
  }

  // Size of a step's input (header and arrays) in vectors of 16 bytes.
  std::int64_t input_vectors(std::int64_t pages_used) const {
    constexpr std::int64_t kRowBytes = sizeof(double) + sizeof(float) + 3 * sizeof(std::int32_t);
    constexpr std::int64_t kPageBytes = sizeof(std::int32_t);  // a page's number
    return 1 + (rows * kRowBytes + pages_used * kPageBytes + kVectorBytes - 1) / kVectorBytes;
  }
  // Addresses of the header and the arrays of a step's input. `buffer` is `input` or `input_host`.
  static InputHeader* header(const Tensor& buffer) { return static_cast<InputHeader*>(buffer.data_ptr()); }
  double* uniform(const Tensor& buffer) const { return reinterpret_cast<double*>(header(buffer) + 1); }
  float* temperature(const Tensor& buffer) const { return reinterpret_cast<float*>(uniform(buffer) + rows); }
  std::int32_t* ids(const Tensor& buffer) const { return reinterpret_cast<std::int32_t*>(temperature(buffer) + rows); }
  std::int32_t* positions(const Tensor& buffer) const { return ids(buffer) + rows; }
  std::int32_t* pages_begin(const Tensor& buffer) const { return positions(buffer) + rows; }
  std::int32_t* page_list(const Tensor& buffer) const { return pages_begin(buffer) + rows; }
  std::int32_t* tokens() const { return static_cast<std::int32_t*>(result_host.data_ptr()); }
  float* logprobs() const { return reinterpret_cast<float*>(tokens() + rows); }
};

Status Decoder::check(const Transformer& model) {
  const ModelConfig& config = model.config();
  const auto invalid = []<class... Args>(fmt::format_string<Args...> format, Args&&... args) -> Status {
    return fail(Code::kInvalid, "open decoder", format, std::forward<Args>(args)...);
  };
  if (model.dtype() != torch::kBFloat16) return invalid("the weights are not in bf16");
  if (config.adapter) return invalid("the model has an adapter, which its kernels do not compute");
  if (config.experts) return invalid("the model is a mixture of experts, which its kernels do not compute");
  if (config.family == Family::kGemma3) return invalid("the model is a Gemma 3, which its kernels do not compute");
  if (config.sliding_window) return invalid("the model has sliding windows, which its kernels do not compute");
  if (!attend_supports(u32(config.head_dim), u32(config.heads / config.kv_heads)))
    return invalid(
        "heads have {} values (expected 16, 32, 64 or 128), and {} query heads share a key (expected at most 8)",
        config.head_dim, config.heads / config.kv_heads);
  for (const std::int64_t inputs : {config.hidden_size, config.heads * config.head_dim, config.intermediate_size})
    if (inputs % kStepInputs != 0)
      return invalid("a product has {} inputs, expected a multiple of {}", inputs, kStepInputs);
  if (kSampleWarps * sample_blocks(u32(config.vocab_size)) > kSampleWarpsMax)
    return invalid("the vocabulary has {} tokens, expected at most {}", config.vocab_size,
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
  if (steps_until_retry_ > 0 && --steps_until_retry_ > 0) return std::nullopt;  // the step that reaches 0 tries again
  try {
    return attempt_step(rows);
  } catch (const c10::Error& e) {
    switch_to_libtorch("decoding", rows.size(), e.what_without_backtrace());
  } catch (const std::exception& e) {
    switch_to_libtorch("decoding", rows.size(), e.what());
  }
  return std::nullopt;
}

void Decoder::switch_to_libtorch(std::string_view what, std::size_t rows, std::string_view why) {
  log::warn("{} {} rows failed, and libtorch's operations are used for {} steps: {}", what, rows, kStepsBeforeRetry,
            why);
  recordings_.clear();
  buffers_.reset();
  steps_until_retry_ = kStepsBeforeRetry;
}

std::optional<Tensor> Decoder::prefill(const Tensor& ids, const std::vector<std::int64_t>& lengths,
                                       const std::vector<const Pages*>& page_lists) {
  if (steps_until_retry_ > 0) return std::nullopt;  // only steps count it down
  try {
    return attempt_prefill(ids, lengths, page_lists);
  } catch (const c10::Error& e) {
    const std::string why = e.what_without_backtrace();
    if (why.find("memory") != std::string::npos) throw;  // the caller retries with fewer rows
    switch_to_libtorch("reading", page_lists.size(), why);
    return std::nullopt;
  }
}

// Computes the same as steps for all tokens, but without a recording, because calls differ in shape.
Tensor Decoder::attempt_prefill(const Tensor& ids, const std::vector<std::int64_t>& lengths,
                                const std::vector<const Pages*>& page_lists) {
  const ModelConfig& config = model_.config();
  const std::int64_t rows = ids.size(0), longest = ids.size(1), tokens = rows * longest;
  const std::int64_t heads = config.heads, kv = config.kv_heads, dim = config.head_dim,
                     width = config.intermediate_size;
  const Transformer::Parts parts = model_.parts(longest);
  const auto eps = static_cast<float>(config.rms_norm_eps);
  const Tensor cache_slots = torch::full({rows, longest}, -1, torch::kInt);  // of each token; -1: padding, not stored
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
  const Tensor input = torch::stack({ids.to(torch::kInt), cache_slots}).to(model_.device());  // in a single copy
  const auto values = [&](std::int64_t count) { return torch::empty({tokens, count}, parts.embedding.options()); };
  const Tensor x = values(config.hidden_size), residual_update = values(config.hidden_size),
               normed = values(config.hidden_size);
  const Tensor qkv = values((heads + 2 * kv) * dim), gate_up = values(2 * width), inner = values(width);
  const auto norm = [&](const Tensor& sum, const Tensor& added, const Tensor& weight, const Tensor& out) {
    backend_->run(NormJob{.x = bf16_out(sum),
                          .added = bf16(added),
                          .weight = bf16(weight),
                          .out = bf16_out(out),
                          .rows = u32(sum.size(0)),
                          .width = u32(config.hidden_size),
                          .eps = eps});
  };
  const auto *const token_ids = input.data_ptr<std::int32_t>(), *const token_slots = token_ids + tokens;
  backend_->run(EmbedJob{.embedding = bf16(parts.embedding),
                         .ids = token_ids,
                         .out = bf16_out(x),
                         .rows = u32(tokens),
                         .width = u32(config.hidden_size)});
  for (std::size_t i = 0; i < parts.layers->size(); ++i) {
    const Transformer::Layer& layer = (*parts.layers)[i];
    // The norm first adds the previous layer's update to x.
    norm(x, i == 0 ? Tensor() : residual_update, layer.input_norm, normed);
    backend_->multiply(normed, layer.qkv, layer.qkv_bias, qkv);
    backend_->run(RotateJob{.qkv = bf16_out(qkv),
                            .q_norm = bf16(layer.q_norm),
                            .k_norm = bf16(layer.k_norm),
                            .cos = parts.cos.data_ptr<float>(),
                            .sin = parts.sin.data_ptr<float>(),
                            .slots = token_slots,
                            .keys = bf16_out(cache_.keys()[i]),
                            .values = bf16_out(cache_.values()[i]),
                            .tokens = u32(tokens),
                            .positions = u32(longest),
                            .heads = u32(heads),
                            .kv_heads = u32(kv),
                            .eps = eps},
                  u32(dim));
    const Tensor by_head = qkv.view({rows, longest, heads + 2 * kv, dim});
    const Tensor attention_out =
        backend_->attend(by_head.narrow(2, 0, heads), by_head.narrow(2, heads, kv), by_head.narrow(2, heads + kv, kv));
    backend_->multiply(attention_out, layer.o, /*bias=*/{}, residual_update);
    norm(x, residual_update, layer.post_norm, normed);
    multiply_gate_up(layer, normed, gate_up);
    backend_->run(GateJob{.gate = bf16(gate_up),
                          .up = bf16(gate_up) + width,
                          .out = bf16_out(inner),
                          .rows = u32(tokens),
                          .width = u32(width),
                          .stride = u32(2 * width)});
    backend_->multiply(inner, layer.down, /*bias=*/{}, residual_update);
  }
  // Only the last tokens are needed to predict the next ones.
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
  buffers_.reset();  // first, so that memory never holds both
  buffers_ =
      std::make_unique<Buffers>(model_.config(), model_.device(), backend_->processors(), std::max(rows, rows_before),
                                pages > pages_before ? std::max(pages, 2 * pages_before) : pages_before);
}

std::vector<const void*> Decoder::addresses(std::int64_t positions) {
  const Transformer::Parts parts = model_.parts(positions);
  std::vector<const void*> out;
  const auto add = [&](const Tensor& tensor) { out.push_back(tensor.defined() ? tensor.data_ptr() : nullptr); };
  for (const Tensor* tensor : {&parts.embedding, &parts.norm, &parts.lm_head, &parts.cos, &parts.sin}) add(*tensor);
  for (const Transformer::Layer& layer : *parts.layers)
    for (const Tensor* tensor : {&layer.qkv, &layer.qkv_bias, &layer.q_norm, &layer.k_norm, &layer.o, &layer.input_norm,
                                 &layer.post_norm, &layer.gate, &layer.up, &layer.down})
      add(*tensor);
  for (const Tensor& keys : cache_.keys()) add(keys);
  for (const Tensor& values : cache_.values()) add(values);
  return out;
}

SampledTokens Decoder::attempt_step(std::span<const DecodeRow> rows) {
  const std::int64_t recorded = recorded_rows(std::ssize(rows));
  std::int64_t pages = 0, positions = 0;
  for (const DecodeRow& row : rows) {
    pages += PagedCache::pages_for(row.text->tokens + 1);  // + 1: the token that this step stores
    positions = std::max(positions, row.text->tokens + 1);
  }
  allocate_buffers(recorded, pages);
  if (std::vector<const void*> addresses_now = addresses(positions); addresses_now != addresses_) {
    recordings_.clear();  // they would read the old addresses
    addresses_ = std::move(addresses_now);
  }
  const Buffers& buffers = *buffers_;
  std::int64_t pages_written = 0;
  bool any_excludes_tokens = false;
  for (std::int64_t i = 0; i < recorded; ++i) {
    const bool is_request = i < std::ssize(rows);
    const DecodeRow* const row = is_request ? &rows[static_cast<std::size_t>(i)] : nullptr;
    buffers.uniform(buffers.input_host)[i] = is_request ? row->request.uniform : 0;
    buffers.temperature(buffers.input_host)[i] =
        is_request ? static_cast<float>(row->request.sampling->temperature) : 1;
    buffers.ids(buffers.input_host)[i] = is_request ? row->id : 0;
    // Position -1: the row has no text, so it stores no key.
    buffers.positions(buffers.input_host)[i] = is_request ? static_cast<std::int32_t>(row->text->tokens) : -1;
    buffers.pages_begin(buffers.input_host)[i] = static_cast<std::int32_t>(pages_written);
    if (!is_request) continue;  // a surplus row
    const std::int64_t count = PagedCache::pages_for(row->text->tokens + 1);
    std::transform(row->text->list.begin(), row->text->list.begin() + count,
                   buffers.page_list(buffers.input_host) + pages_written,
                   [](Page page) { return static_cast<std::int32_t>(page); });
    pages_written += count;
    any_excludes_tokens |= excludes_tokens(*row->request.sampling);
  }
  buffers.header(buffers.input_host)->vectors = u32(buffers.input_vectors(pages));
  auto& recording = recordings_[recorded];
  if (!recording) recording = backend_->record([&] { queue_step(recorded); });
  kernels_ = recording->kernels();
  recording->replay();
  backend_->wait();
  SampledTokens out;
  out.tokens.assign(buffers.tokens(), buffers.tokens() + rows.size());
  out.logprobs.assign(buffers.logprobs(), buffers.logprobs() + rows.size());
  if (!any_excludes_tokens) return out;
  // Samples again, by libtorch, the rows with top_p, top_k or min_p.
  std::vector<SampleRequest> requests;
  std::vector<std::int64_t> resampled_rows;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (!excludes_tokens(*rows[i].request.sampling)) continue;
    requests.push_back(rows[i].request);
    resampled_rows.push_back(static_cast<std::int64_t>(i));
  }
  const Tensor logits = buffers.logits.index_select(0, torch::tensor(resampled_rows, torch::kLong).to(model_.device()))
                            .narrow(1, 0, model_.config().vocab_size)
                            .to(torch::kFloat);
  // `logits` has only those rows, in the order of `requests`.
  const SampledTokens resampled = sample_tokens(logits, requests, /*batched=*/true);
  for (std::size_t i = 0; i < resampled_rows.size(); ++i) {
    out.tokens[static_cast<std::size_t>(resampled_rows[i])] = resampled.tokens[i];
    out.logprobs[static_cast<std::size_t>(resampled_rows[i])] = resampled.logprobs[i];
  }
  return out;
}

// Queues a product by our kernels: output = norm(input) weight^T + bias; with `adding`, this is added to the output. If
// `norm` is undefined, `input` is not normalised. The product kernel does the norm too where it can (`fuses_norm`).
void Decoder::project(std::int64_t rows, const Tensor& input, const Tensor& norm, const Tensor& weight,
                      const Tensor& bias, const Tensor& output, bool adding) {
  const auto eps = static_cast<float>(model_.config().rms_norm_eps);
  const std::uint32_t in = u32(weight.size(1)), outputs = u32(weight.size(0));
  const bool fuses_norm = norm.defined() && product_can_norm(u32(rows), in, /*gated=*/false);
  const Bf16* x = bf16(input);
  if (norm.defined() && !fuses_norm) {
    backend_->run(NormJob{.x = bf16_out(input),
                          .added = nullptr,
                          .weight = bf16(norm),
                          .out = bf16_out(buffers_->normed),
                          .rows = u32(rows),
                          .width = in,
                          .eps = eps});
    x = bf16(buffers_->normed);
  }
  backend_->run(ProductJob{.x = x,
                           .norm = fuses_norm ? bf16(norm) : nullptr,
                           .weight = bf16(weight),
                           .second = nullptr,
                           .bias = bf16(bias),
                           .residual = adding ? bf16(output) : nullptr,
                           .out = bf16_out(output),
                           .rows = u32(rows),
                           .in = in,
                           .outputs = outputs,
                           .out_stride = u32(output.size(1)),
                           .parts = product_parts(backend_->processors(), in, outputs, /*gated=*/false),
                           .eps = eps});
}

void Decoder::multiply_gate_up(const Transformer::Layer& layer, const Tensor& x, const Tensor& out) {
  const std::int64_t width = layer.gate.size(0);
  if (layer.gate_up.defined()) {
    backend_->multiply(x, layer.gate_up, /*bias=*/{}, out);
  } else {
    backend_->multiply(x, layer.gate, /*bias=*/{}, out.narrow(1, 0, width));
    backend_->multiply(x, layer.up, /*bias=*/{}, out.narrow(1, width, width));
  }
}

// Queues the kernels of a step. With few rows, products are computed by our kernels, which also do norms and additions;
// with more rows, by libtorch.
void Decoder::queue_step(std::int64_t rows) {
  const ModelConfig& config = model_.config();
  const Transformer::Parts parts = model_.parts(0);  // addresses() has made cos and sin long enough
  const std::vector<Transformer::Layer>& layers = *parts.layers;
  const Buffers& buffers = *buffers_;
  const auto eps = static_cast<float>(config.rms_norm_eps);
  const std::uint32_t row_count = u32(rows), hidden = u32(config.hidden_size), width = u32(config.intermediate_size);
  const unsigned splits = attend_splits(backend_->processors(), row_count, u32(config.kv_heads));
  const unsigned tokens_min = attend_tokens_min(backend_->processors(), row_count, u32(config.kv_heads));
  const bool uses_own_products = rows <= kProductRowsMax;
  const auto first_rows = [&](const Tensor& tensor) { return tensor.narrow(0, 0, rows); };
  const auto norm = [&](const Tensor& added, const Tensor& weight) {
    backend_->run(NormJob{.x = bf16_out(buffers.x),
                          .added = bf16(added),
                          .weight = bf16(weight),
                          .out = bf16_out(buffers.normed),
                          .rows = row_count,
                          .width = hidden,
                          .eps = eps});
  };
  backend_->run(ReceiveJob{.source = static_cast<const Vector*>(buffers.input_host.data_ptr()),
                           .destination = static_cast<Vector*>(buffers.input.data_ptr()),
                           .blocks = uses_own_products ? 1u : 8u});  // with many rows, the input is larger
  backend_->run(EmbedJob{.embedding = bf16(parts.embedding),
                         .ids = buffers.ids(buffers.input),
                         .out = bf16_out(buffers.x),
                         .rows = row_count,
                         .width = hidden});
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const Transformer::Layer& layer = layers[i];
    if (uses_own_products) {
      project(rows, buffers.x, layer.input_norm, layer.qkv, layer.qkv_bias, buffers.qkv, /*adding=*/false);
    } else {
      norm(i == 0 ? Tensor() : buffers.residual_update, layer.input_norm);
      backend_->multiply(first_rows(buffers.normed), layer.qkv, layer.qkv_bias, first_rows(buffers.qkv));
    }
    backend_->run(AttendJob{.qkv = bf16(buffers.qkv),
                            .q_norm = bf16(layer.q_norm),
                            .k_norm = bf16(layer.k_norm),
                            .cos = parts.cos.data_ptr<float>(),
                            .sin = parts.sin.data_ptr<float>(),
                            .positions = buffers.positions(buffers.input),
                            .pages = buffers.page_list(buffers.input),
                            .pages_begin = buffers.pages_begin(buffers.input),
                            .keys = bf16_out(cache_.keys()[i]),
                            .values = bf16_out(cache_.values()[i]),
                            .out = bf16_out(buffers.attention_out),
                            .partial = buffers.partial.data_ptr<float>(),
                            .arrived = reinterpret_cast<unsigned*>(buffers.attend_arrived.data_ptr<std::int32_t>()),
                            .rows = row_count,
                            .heads = u32(config.heads),
                            .kv_heads = u32(config.kv_heads),
                            .splits = splits,
                            .tokens_min = tokens_min,
                            .eps = eps},
                  u32(config.head_dim));
    if (uses_own_products) {
      project(rows, buffers.attention_out, /*norm=*/{}, layer.o, /*bias=*/{}, buffers.x, /*adding=*/true);
      const bool fuses_norm = product_can_norm(row_count, hidden, /*gated=*/true);
      if (!fuses_norm) norm(/*added=*/{}, layer.post_norm);
      backend_->run(ProductJob{.x = fuses_norm ? bf16(buffers.x) : bf16(buffers.normed),
                               .norm = fuses_norm ? bf16(layer.post_norm) : nullptr,
                               .weight = bf16(layer.gate),
                               .second = bf16(layer.up),
                               .bias = nullptr,
                               .residual = nullptr,
                               .out = bf16_out(buffers.inner),
                               .rows = row_count,
                               .in = hidden,
                               .outputs = width,
                               .out_stride = width,
                               .parts = product_parts(backend_->processors(), hidden, width, /*gated=*/true),
                               .eps = eps});
      project(rows, buffers.inner, /*norm=*/{}, layer.down, /*bias=*/{}, buffers.x, /*adding=*/true);
    } else {
      backend_->multiply(first_rows(buffers.attention_out), layer.o, /*bias=*/{}, first_rows(buffers.residual_update));
      norm(buffers.residual_update, layer.post_norm);
      multiply_gate_up(layer, first_rows(buffers.normed), first_rows(buffers.gate_up));
      backend_->run(GateJob{.gate = bf16(buffers.gate_up),
                            .up = bf16(buffers.gate_up) + width,
                            .out = bf16_out(buffers.inner),
                            .rows = row_count,
                            .width = width,
                            .stride = 2 * width});
      backend_->multiply(first_rows(buffers.inner), layer.down, /*bias=*/{}, first_rows(buffers.residual_update));
    }
  }
  if (uses_own_products) {
    project(rows, buffers.x, parts.norm, parts.lm_head, /*bias=*/{}, buffers.logits, /*adding=*/false);
  } else {
    norm(buffers.residual_update, parts.norm);
    backend_->multiply(first_rows(buffers.normed), parts.lm_head, /*bias=*/{},
                       first_rows(buffers.logits).narrow(1, 0, config.vocab_size));
  }
  backend_->run(SampleJob{.logits = bf16(buffers.logits),
                          .temperature = buffers.temperature(buffers.input),
                          .uniform = buffers.uniform(buffers.input),
                          .max_logits = buffers.max_logits.data_ptr<float>(),
                          .sums = buffers.sums.data_ptr<float>(),
                          .arrived = reinterpret_cast<unsigned*>(buffers.sample_arrived.data_ptr<std::int32_t>()),
                          .tokens = buffers.tokens(),
                          .logprobs = buffers.logprobs(),
                          .rows = row_count,
                          .vocab = u32(config.vocab_size),
                          .stride = u32(buffers.logits.size(1))});
}

}  // namespace echoline::model::cuda

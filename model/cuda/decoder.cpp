#include "model/cuda/decoder.hpp"

#include <algorithm>
#include <cstring>

#include "base/log.hpp"
#include "model/layer.hpp"

namespace echoline::model::cuda {

using torch::Tensor;

namespace {

constexpr std::int64_t kStepsBeforeMore = 512;  // after a failure
constexpr std::int64_t kPagesFirst = 1 << 14;

// The recorded number of rows for this many: few different ones, and none much larger.
std::int64_t recorded_rows(std::int64_t rows) {
  std::int64_t step = 1;
  while (step < 8 && rows > step) step *= 2;  // 1, 2, 4, 8
  while (rows > 8 * step) step *= 2;          // then eighths
  return (rows + step - 1) / step * step;
}

bool restricted(const Sampling& s) { return s.temperature > 0 && (s.top_p < 1 || s.top_k > 0 || s.min_p > 0); }

const Bf16* bf16(const Tensor& tensor) {
  return tensor.defined() ? static_cast<const Bf16*>(tensor.data_ptr()) : nullptr;
}
Bf16* bf16_out(const Tensor& tensor) { return static_cast<Bf16*>(tensor.data_ptr()); }

std::uint32_t u32(std::int64_t value) { return static_cast<std::uint32_t>(value); }

}  // namespace

// Memory whose addresses are in recordings. Input is contiguous: `sent_host`, which the first kernel copies to `sent`,
// for this many rows and pages. The last kernel writes `got` to host memory.
struct Decoder::Buffers {
  std::int64_t rows, pages;
  Tensor x, change, normed, qkv, mixed, gate_up, inner, logits;  // bf16 [rows, ...]
  Tensor partial, attend_arrived, tops, sums, sample_arrived;
  Tensor sent, sent_host, got;  // bytes

  Buffers(const ModelConfig& c, const torch::Device& device, unsigned processors, std::int64_t r, std::int64_t p)
      : rows(r), pages(p) {
    const auto on_device = torch::TensorOptions().device(device);
    const auto values = [&](std::int64_t width) {
      return torch::zeros({rows, width}, on_device.dtype(torch::kBFloat16));
    };
    const auto floats = [&](std::int64_t count) { return torch::zeros({count}, on_device.dtype(torch::kFloat)); };
    const auto words = [&](std::int64_t count) { return torch::zeros({count}, on_device.dtype(torch::kInt)); };
    x = values(c.hidden_size), change = values(c.hidden_size), normed = values(c.hidden_size),
    mixed = values(c.heads * c.head_dim);
    qkv = values((c.heads + 2 * c.kv_heads) * c.head_dim);
    gate_up = values(2 * c.intermediate_size), inner = values(c.intermediate_size);
    logits = values((c.vocab_size + 7) / 8 * 8);
    std::int64_t parts = 0;  // most parts of attention
    for (std::int64_t n = 1; n <= rows; ++n)
      parts = std::max<std::int64_t>(parts, n * attend_splits(processors, u32(n), u32(c.kv_heads)));
    partial = floats(parts * c.kv_heads * attend_heads(u32(c.heads / c.kv_heads)) * (c.head_dim + 2));
    attend_arrived = words(rows * c.kv_heads), sample_arrived = words(rows);
    tops = floats(rows * kSampleWarps * sample_blocks(u32(c.vocab_size))), sums = torch::zeros_like(tops);
    const auto bytes = torch::TensorOptions().dtype(torch::kByte);
    const auto on_host = bytes.pinned_memory(device.is_cuda());
    sent = torch::zeros({sent_vectors(pages) * 16}, bytes.device(device));
    sent_host = torch::zeros({sent.numel()}, on_host);
    got = torch::zeros({rows * 8}, on_host);
  }

  std::int64_t sent_vectors(std::int64_t pages_used) const { return 1 + (rows * 24 + pages_used * 4 + 15) / 16; }
  // The header in `sent` or `sent_host`.
  static SentHeader* header(const Tensor& of) { return static_cast<SentHeader*>(of.data_ptr()); }
  double* uniform(const Tensor& of) const { return reinterpret_cast<double*>(header(of) + 1); }
  float* temperature(const Tensor& of) const { return reinterpret_cast<float*>(uniform(of) + rows); }
  std::int32_t* ids(const Tensor& of) const { return reinterpret_cast<std::int32_t*>(temperature(of) + rows); }
  std::int32_t* positions(const Tensor& of) const { return ids(of) + rows; }
  std::int32_t* pages_begin(const Tensor& of) const { return positions(of) + rows; }
  std::int32_t* page_list(const Tensor& of) const { return pages_begin(of) + rows; }
  std::int32_t* tokens() const { return static_cast<std::int32_t*>(got.data_ptr()); }
  float* logprobs() const { return reinterpret_cast<float*>(tokens() + rows); }
};

Status Decoder::check(const Transformer& model) {
  const ModelConfig& c = model.config();
  const auto bad = []<class... Args>(fmt::format_string<Args...> format, Args&&... args) -> Status {
    return fail(Code::kInvalid, "open decoder", format, std::forward<Args>(args)...);
  };
  if (model.dtype() != torch::kBFloat16) return bad("the weights are not in bf16");
  if (!attend_knows(u32(c.head_dim), u32(c.heads / c.kv_heads)))
    return bad("heads have {} values and {} query heads share a key, expected 16, 32, 64 or 128 and at most 8",
               c.head_dim, c.heads / c.kv_heads);
  for (const std::int64_t inputs : {c.hidden_size, c.heads * c.head_dim, c.intermediate_size})
    if (inputs % kStepInputs != 0)
      return bad("a product has {} inputs, expected a multiple of {}", inputs, kStepInputs);
  if (kSampleWarps * sample_blocks(u32(c.vocab_size)) > kSampleSharesMax)
    return bad("the vocabulary has {} tokens, expected at most {}", c.vocab_size, kSampleSharesMax * kSampleShare);
  return ok();
}

std::unique_ptr<Decoder> Decoder::of(Transformer& model, PagedCache& cache) {
  if (!model.device().is_cuda()) return nullptr;
  const auto open = [&]() -> Result<std::unique_ptr<Decoder>> {
    ECHO_TRY(check(model));
    ECHO_ASSIGN(auto machine, open_machine(model.device()));
    return std::make_unique<Decoder>(model, cache, std::move(machine));
  };
  Result<std::unique_ptr<Decoder>> decoder = open();
  if (decoder) return std::move(*decoder);
  log::info("libtorch's operations sample the tokens, one after another, which is slow: {}", decoder.error().message());
  return nullptr;
}

Decoder::Decoder(Transformer& model, PagedCache& cache, std::unique_ptr<Machine> machine)
    : model_(model), cache_(cache), machine_(std::move(machine)) {}
Decoder::~Decoder() = default;

std::optional<Drawn> Decoder::step(std::span<const DecodeRow> rows) {
  if (pause_ > 0 && --pause_ > 0) return std::nullopt;
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
  log::warn("{} {} rows failed, and libtorch's operations are used for {} steps: {}", what, rows, kStepsBeforeMore,
            why);
  recordings_.clear();
  buffers_.reset();
  pause_ = kStepsBeforeMore;
}

std::optional<Tensor> Decoder::read(const Tensor& ids, const std::vector<std::int64_t>& lengths,
                                    const std::vector<const Pages*>& texts) {
  if (pause_ > 0) return std::nullopt;
  try {
    return attempt_to_read(ids, lengths, texts);
  } catch (const c10::Error& e) {
    const std::string why = e.what_without_backtrace();
    if (why.find("memory") != std::string::npos) throw;
    pause("reading", texts.size(), why);
    return std::nullopt;
  }
}

// Like a step for many rows, with a row per token, but not recorded, because no two calls are alike.
Tensor Decoder::attempt_to_read(const Tensor& ids, const std::vector<std::int64_t>& lengths,
                                const std::vector<const Pages*>& texts) {
  const ModelConfig& c = model_.config();
  const std::int64_t rows = ids.size(0), longest = ids.size(1), tokens = rows * longest;
  const std::int64_t heads = c.heads, kv = c.kv_heads, dim = c.head_dim, width = c.intermediate_size;
  const Transformer::Parts parts = model_.parts(longest);
  const auto eps = static_cast<float>(c.rms_norm_eps);
  const Tensor places = torch::full({rows, longest}, -1, torch::kInt);
  std::vector<std::int64_t> last;
  for (std::int64_t row = 0; row < rows; ++row) {
    const Pages& text = *texts[static_cast<std::size_t>(row)];
    const std::int64_t count = lengths[static_cast<std::size_t>(row)];
    std::int32_t* const to = places.data_ptr<std::int32_t>() + row * longest;
    for (std::int64_t t = 0; t < count; ++t)
      to[t] = static_cast<std::int32_t>(text.list[static_cast<std::size_t>(t / kPageTokens)] * kPageTokens +
                                        t % kPageTokens);
    last.push_back(row * longest + count - 1);
  }
  const Tensor sent = torch::stack({ids.to(torch::kInt), places}).to(model_.device());
  const auto values = [&](std::int64_t count) { return torch::empty({tokens, count}, parts.embedding.options()); };
  const Tensor x = values(c.hidden_size), change = values(c.hidden_size), normed = values(c.hidden_size);
  const Tensor qkv = values((heads + 2 * kv) * dim), gate_up = values(2 * width), inner = values(width);
  const auto norm = [&](const Tensor& to, const Tensor& added, const Tensor& weight, const Tensor& out) {
    machine_->run(
        NormJob{bf16_out(to), bf16(added), bf16(weight), bf16_out(out), u32(to.size(0)), u32(c.hidden_size), eps});
  };
  const auto* const numbers = sent.data_ptr<std::int32_t>();
  machine_->run(EmbedJob{bf16(parts.embedding), numbers, bf16_out(x), u32(tokens), u32(c.hidden_size)});
  for (std::size_t i = 0; i < parts.layers->size(); ++i) {
    const Transformer::Layer& l = (*parts.layers)[i];
    norm(x, i == 0 ? Tensor() : change, l.input_norm, normed);
    machine_->multiply(normed, l.qkv, l.qkv_bias, qkv);
    machine_->run(TurnJob{bf16_out(qkv), bf16(l.q_norm), bf16(l.k_norm), parts.cos.data_ptr<float>(),
                          parts.sin.data_ptr<float>(), numbers + tokens, bf16_out(cache_.keys()[i]),
                          bf16_out(cache_.values()[i]), u32(tokens), u32(longest), u32(heads), u32(kv), eps},
                  u32(dim));
    const Tensor by_head = qkv.view({rows, longest, heads + 2 * kv, dim});
    const Tensor mixed =
        machine_->attend(by_head.narrow(2, 0, heads), by_head.narrow(2, heads, kv), by_head.narrow(2, heads + kv, kv));
    machine_->multiply(mixed, l.o, {}, change);
    norm(x, change, l.post_norm, normed);
    multiply_gate_up(l, normed, gate_up);
    machine_->run(
        GateJob{bf16(gate_up), bf16(gate_up) + width, bf16_out(inner), u32(tokens), u32(width), u32(2 * width)});
    machine_->multiply(inner, l.down, {}, change);
  }
  const Tensor at = torch::tensor(last, torch::kLong).to(model_.device());
  const Tensor ends = x.index_select(0, at), out = torch::empty_like(ends);
  norm(ends, change.index_select(0, at), parts.norm, out);
  return out;
}

// Allocates memory for this many rows and pages.
void Decoder::provide(std::int64_t rows, std::int64_t pages) {
  if (buffers_ && buffers_->rows >= rows && buffers_->pages >= pages) return;
  const std::int64_t rows_before = buffers_ ? buffers_->rows : 0,
                     pages_before = buffers_ ? buffers_->pages : kPagesFirst;
  recordings_.clear();
  buffers_.reset();
  buffers_ =
      std::make_unique<Buffers>(model_.config(), model_.device(), machine_->processors(), std::max(rows, rows_before),
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

Drawn Decoder::attempt(std::span<const DecodeRow> rows) {
  const std::int64_t recorded = recorded_rows(std::ssize(rows));
  std::int64_t pages = 0, positions = 0;
  for (const DecodeRow& row : rows) {
    pages += PagedCache::pages_of(row.text->tokens + 1);
    positions = std::max(positions, row.text->tokens + 1);
  }
  provide(recorded, pages);
  if (std::vector<const void*> now = addresses(positions); now != addresses_) {
    recordings_.clear();
    addresses_ = std::move(now);
  }
  const Buffers& b = *buffers_;
  std::int64_t at = 0;
  bool sorting = false;
  for (std::int64_t i = 0; i < recorded; ++i) {
    const bool there = i < std::ssize(rows);
    const DecodeRow* const row = there ? &rows[static_cast<std::size_t>(i)] : nullptr;
    b.uniform(b.sent_host)[i] = there ? row->draw.uniform : 0;
    b.temperature(b.sent_host)[i] = there ? static_cast<float>(row->draw.sampling->temperature) : 1;
    b.ids(b.sent_host)[i] = there ? row->id : 0;
    b.positions(b.sent_host)[i] = there ? static_cast<std::int32_t>(row->text->tokens) : -1;
    b.pages_begin(b.sent_host)[i] = static_cast<std::int32_t>(at);
    if (!there) continue;
    const std::int64_t count = PagedCache::pages_of(row->text->tokens + 1);
    std::transform(row->text->list.begin(), row->text->list.begin() + count, b.page_list(b.sent_host) + at,
                   [](Page page) { return static_cast<std::int32_t>(page); });
    at += count;
    sorting |= restricted(*row->draw.sampling);
  }
  b.header(b.sent_host)->vectors = u32(b.sent_vectors(pages));
  auto& recording = recordings_[recorded];
  if (!recording) recording = machine_->record([&] { queue(recorded); });
  kernels_ = recording->kernels();
  recording->replay();
  machine_->wait();
  Drawn out;
  out.tokens.assign(b.tokens(), b.tokens() + rows.size());
  out.logprobs.assign(b.logprobs(), b.logprobs() + rows.size());
  if (!sorting) return out;
  std::vector<Draw> draws;
  std::vector<std::int64_t> of;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (!restricted(*rows[i].draw.sampling)) continue;
    draws.push_back(rows[i].draw);
    of.push_back(static_cast<std::int64_t>(i));
  }
  const Tensor logits = b.logits.index_select(0, torch::tensor(of, torch::kLong).to(model_.device()))
                            .narrow(1, 0, model_.config().vocab_size)
                            .to(torch::kFloat);
  const Drawn some = draw(logits, draws, /*batched=*/true);
  for (std::size_t i = 0; i < of.size(); ++i) {
    out.tokens[static_cast<std::size_t>(of[i])] = some.tokens[i];
    out.logprobs[static_cast<std::size_t>(of[i])] = some.logprobs[i];
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
    machine_->run(NormJob{bf16_out(from), nullptr, bf16(norm), bf16_out(buffers_->normed), u32(rows), in, eps});
    x = bf16(buffers_->normed);
  }
  machine_->run(ProductJob{x, norms ? bf16(norm) : nullptr, bf16(weight), nullptr, bf16(bias),
                           adding ? bf16(to) : nullptr, bf16_out(to), u32(rows), in, outputs, u32(to.size(1)),
                           product_parts(machine_->processors(), in, outputs, false), eps});
}

void Decoder::multiply_gate_up(const Transformer::Layer& layer, const Tensor& x, const Tensor& out) {
  const std::int64_t width = layer.gate.size(0);
  if (layer.gate_up.defined()) {
    machine_->multiply(x, layer.gate_up, {}, out);
  } else {
    machine_->multiply(x, layer.gate, {}, out.narrow(1, 0, width));
    machine_->multiply(x, layer.up, {}, out.narrow(1, width, width));
  }
}

// Queues the kernels of a step.
void Decoder::queue(std::int64_t rows) {
  const ModelConfig& c = model_.config();
  const Transformer::Parts parts = model_.parts(0);
  const std::vector<Transformer::Layer>& layers = *parts.layers;
  const Buffers& b = *buffers_;
  const auto eps = static_cast<float>(c.rms_norm_eps);
  const std::uint32_t r = u32(rows), hidden = u32(c.hidden_size), width = u32(c.intermediate_size);
  const unsigned splits = attend_splits(machine_->processors(), r, u32(c.kv_heads));
  const unsigned tokens_min = attend_tokens_min(machine_->processors(), r, u32(c.kv_heads));
  const bool few = rows <= kProductRowsMax;
  const auto first = [&](const Tensor& tensor) { return tensor.narrow(0, 0, rows); };
  const auto norm = [&](const Tensor& added, const Tensor& weight) {
    machine_->run(NormJob{bf16_out(b.x), bf16(added), bf16(weight), bf16_out(b.normed), r, hidden, eps});
  };
  machine_->run(ReceiveJob{static_cast<const Vector*>(b.sent_host.data_ptr()), static_cast<Vector*>(b.sent.data_ptr()),
                           few ? 1u : 8u});
  machine_->run(EmbedJob{bf16(parts.embedding), b.ids(b.sent), bf16_out(b.x), r, hidden});
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const Transformer::Layer& l = layers[i];
    if (few) {
      project(rows, b.x, l.input_norm, l.qkv, l.qkv_bias, b.qkv, false);
    } else {
      norm(i == 0 ? Tensor() : b.change, l.input_norm);
      machine_->multiply(first(b.normed), l.qkv, l.qkv_bias, first(b.qkv));
    }
    machine_->run(
        AttendJob{bf16(b.qkv), bf16(l.q_norm), bf16(l.k_norm), parts.cos.data_ptr<float>(), parts.sin.data_ptr<float>(),
                  b.positions(b.sent), b.page_list(b.sent), b.pages_begin(b.sent), bf16_out(cache_.keys()[i]),
                  bf16_out(cache_.values()[i]), bf16_out(b.mixed), b.partial.data_ptr<float>(),
                  reinterpret_cast<unsigned*>(b.attend_arrived.data_ptr<std::int32_t>()), r, u32(c.heads),
                  u32(c.kv_heads), splits, tokens_min, eps},
        u32(c.head_dim));
    if (few) {
      project(rows, b.mixed, {}, l.o, {}, b.x, true);
      const bool norms = product_norms(r, hidden, true);
      if (!norms) norm({}, l.post_norm);
      machine_->run(ProductJob{norms ? bf16(b.x) : bf16(b.normed), norms ? bf16(l.post_norm) : nullptr, bf16(l.gate),
                               bf16(l.up), nullptr, nullptr, bf16_out(b.inner), r, hidden, width, width,
                               product_parts(machine_->processors(), hidden, width, true), eps});
      project(rows, b.inner, {}, l.down, {}, b.x, true);
    } else {
      machine_->multiply(first(b.mixed), l.o, {}, first(b.change));
      norm(b.change, l.post_norm);
      multiply_gate_up(l, first(b.normed), first(b.gate_up));
      machine_->run(GateJob{bf16(b.gate_up), bf16(b.gate_up) + width, bf16_out(b.inner), r, width, 2 * width});
      machine_->multiply(first(b.inner), l.down, {}, first(b.change));
    }
  }
  if (few) {
    project(rows, b.x, parts.norm, parts.lm_head, {}, b.logits, false);
  } else {
    norm(b.change, parts.norm);
    machine_->multiply(first(b.normed), parts.lm_head, {}, first(b.logits).narrow(1, 0, c.vocab_size));
  }
  machine_->run(SampleJob{bf16(b.logits), b.temperature(b.sent), b.uniform(b.sent), b.tops.data_ptr<float>(),
                          b.sums.data_ptr<float>(),
                          reinterpret_cast<unsigned*>(b.sample_arrived.data_ptr<std::int32_t>()), b.tokens(),
                          b.logprobs(), r, u32(c.vocab_size), u32(b.logits.size(1))});
}

}  // namespace echoline::model::cuda

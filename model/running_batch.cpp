// Implements RunningBatch: admission, prefill and decoding of sequences, and retries with less memory. A text is
// prefilled by one pass that stores the keys and values of all its tokens in the cache.
#include "model/running_batch.hpp"

#include <algorithm>
#include <cmath>
#include <deque>
#include <map>
#include <new>
#include <optional>
#include <set>
#include <string_view>

#include "base/random.hpp"
#include "model/cuda/decoder.hpp"
#include "model/paged_cache.hpp"
#include "model/sampler.hpp"

namespace echoline::model {

using torch::Tensor;

namespace {

constexpr std::int64_t kPassesBeforeRaisingLimits = 512;    // since the last shortage of memory
constexpr std::int64_t kLogitsMax = std::int64_t{1} << 26;  // logits in memory at a time: 256 MiB in fp32

// A prompt, which several sequences may share.
struct Prompt {
  std::int64_t members = 0;           // sequences of the batch with this prompt, waiting ones included
  std::int64_t users = 0;             // running rows that were given `pages`
  std::uint64_t weights_changes = 0;  // State::weights_changes when `pages` were filled

  Pages pages;                        // the prompt's keys and values; released with the last user; empty: none
  Tensor hidden;                      // [hidden], hidden state of the prompt's last token; set while there are pages
  std::vector<std::int16_t> experts;  // of the prompt's tokens, if they are recorded; set while there are pages
};
using Prompts = std::map<std::vector<Token>, Prompt>;

// A sequence of the batch, running or waiting.
struct Row {
  Sequence sequence;
  Prompts::iterator prompt;
  bool uses_prompt_pages = false;  // counted in Prompt::users
  bool ended = false;              // to be erased from State::running
  Generation generation;
  std::vector<Span> spans;
  Pages pages;  // keys and values of the prompt and of all sampled tokens but the last

  std::int64_t text_tokens() const { return std::ssize(sequence.prompt) + std::ssize(generation.tokens); }
};

// A text (a prompt and the tokens sampled so far) that waiting rows need in the cache.
struct PrefillText {
  std::vector<Row*> rows;                  // several only if the text is their common prompt
  bool is_cached = false;                  // the prompt's pages exist, so nothing is prefilled
  Pages pages = {};                        // receives the text's keys and values; empty if cached
  std::vector<std::int16_t> experts = {};  // of the text's tokens, if they are recorded; empty if cached
};

// The waiting rows that run next: the first `rows` of them, and what they need.
struct Admission {
  std::int64_t rows = 0, pages = 0, texts_to_prefill = 0, longest_text_tokens = 0;
  std::vector<PrefillText> texts = {};
};

// The error for an exception of libtorch with the text `what`. A lack of memory is found by the text ("can't allocate
// memory", "CUDA out of memory"), because the exception's type differs between releases.
Error libtorch_error(std::size_t rows, std::string_view what) {
  const bool is_out_of_memory = what.find("memory") != std::string_view::npos;
  return fail(is_out_of_memory ? Code::kExhausted : Code::kInternal, "generate", "{} row{}: {}", rows,
              rows == 1 ? "" : "s", what);
}

// Calls pass(), which runs `rows` rows through the model, and returns its exceptions as errors.
template <class Pass>
Status run_catching_errors(std::size_t rows, const Pass& pass) {
  try {
    pass();
    return ok();
  } catch (const c10::Error& e) {
    return libtorch_error(rows, e.what_without_backtrace());
  } catch (const std::bad_alloc&) {
    return libtorch_error(rows, "out of memory");
  } catch (const std::exception& e) {
    return libtorch_error(rows, e.what());
  }
}

}  // namespace

struct RunningBatch::State {
  std::shared_ptr<Transformer> model;
  BatchLimits limits;
  PagedCache cache;
  std::unique_ptr<cuda::Decoder> decoder;  // null: passes use libtorch's operations
  Prompts prompts;
  std::set<std::uint64_t> ids;
  std::deque<std::unique_ptr<Row>> waiting;   // oldest first; all were added after the running ones
  std::vector<std::unique_ptr<Row>> running;  // oldest first
  std::vector<Ended> ended;                   // not yet returned by step() or interrupt()

  std::uint64_t version = 0;          // of the policy, recorded in spans
  std::uint64_t weights_changes = 0;  // number of changes of the weights; prompt pages from before are stale

  std::int64_t rows_max, prefill_tokens_max;  // the limits of `limits`, lowered while memory is short
  std::int64_t passes = 0;                    // since the last shortage of memory
  bool admit_only_when_empty = false;         // after memory was too short to prefill a single text

  std::size_t recorded_choices;  // experts recorded for each token; 0: none

  State(std::shared_ptr<Transformer> shared_model, BatchLimits batch_limits)
      : model(std::move(shared_model)),
        limits(batch_limits),
        // On a CPU, the kernels read keys and values in fp32, whatever the weights' type.
        cache(model->config(), model->device(), model->device().is_cpu() ? torch::kFloat : model->dtype(),
              limits.cache_max),
        decoder(limits.use_cuda_decoder ? cuda::Decoder::open_if_supported(*model, cache) : nullptr),
        rows_max(std::max<std::int64_t>(1, limits.rows_max)),
        prefill_tokens_max(limits.prefill_tokens_max),
        recorded_choices(limits.records_experts ? static_cast<std::size_t>(model->config().expert_choices()) : 0) {}

  void release_pages(Row& row) {
    cache.release(row.pages);
    Prompt& prompt = row.prompt->second;
    if (std::exchange(row.uses_prompt_pages, false) && --prompt.users == 0) release_prompt(prompt);
  }
  void release_prompt(Prompt& prompt) {
    cache.release(prompt.pages);
    prompt.hidden = Tensor();
    prompt.experts.clear();
  }
  // Removes the row from all members but `waiting` and `running`; the caller erases it there.
  void unregister_row(Row& row) {
    release_pages(row);
    ids.erase(row.sequence.id);
    if (--row.prompt->second.members == 0) prompts.erase(row.prompt);
  }
  // Unregisters the row and appends its generation, or `error`, to `ended`.
  void end(Row& row, std::optional<Error> error = {}) {
    unregister_row(row);
    // The last token has no experts, nor has any token of a row that was never prefilled.
    row.generation.experts.resize(static_cast<std::size_t>(row.text_tokens()) * recorded_choices, -1);
    if (error) {
      ended.push_back({.id = row.sequence.id, .generation = *std::move(error), .spans = std::move(row.spans)});
    } else {
      ended.push_back({.id = row.sequence.id, .generation = std::move(row.generation), .spans = std::move(row.spans)});
    }
  }
  // Returns the youngest running row to the queue.
  void preempt_youngest() {
    release_pages(*running.back());
    waiting.push_front(std::move(running.back()));
    running.pop_back();
  }

  // Appends the experts of the text's tokens that the row has no experts of yet.
  void append_experts(Row& row, std::span<const std::int16_t> text_experts) const {
    std::vector<std::int16_t>& experts = row.generation.experts;
    if (text_experts.size() > experts.size())
      experts.insert(experts.end(), text_experts.begin() + std::ssize(experts), text_experts.end());
  }

  SampledTokens sample_next(const std::vector<Row*>& rows, const Tensor& hidden);
  std::optional<SampledTokens> decode(const std::vector<Row*>& rows);
  void append_tokens(const std::vector<Row*>& rows, const SampledTokens& sampled);
  bool make_room();
  void run_decode_pass();
  Admission admissible();
  Status prefill(Admission& admission);
  void admit_waiting();
  void raise_limits_if_due();
};

// How to sample the row's next token. The uniform number depends only on the seed and the token's index, so that
// batching and preemption do not change it.
SampleRequest sample_request(const Row& row) {
  const Sampling& sampling = row.sequence.sampling;
  return {.sampling = &sampling, .uniform = Random(sampling.seed, row.generation.tokens.size()).uniform()};
}

// Samples the next token of each row from `hidden` [rows, hidden], the hidden states of the rows' last tokens.
SampledTokens RunningBatch::State::sample_next(const std::vector<Row*>& rows, const Tensor& hidden) {
  const std::int64_t count_max = std::max<std::int64_t>(1, kLogitsMax / model->config().vocab_size);
  SampledTokens sampled;
  for (std::int64_t begin = 0; begin < std::ssize(rows); begin += count_max) {
    const std::int64_t count = std::min(count_max, std::ssize(rows) - begin);
    std::vector<SampleRequest> requests;
    for (std::int64_t i = begin; i < begin + count; ++i)
      requests.push_back(sample_request(*rows[static_cast<std::size_t>(i)]));
    const SampledTokens part = sample_tokens(model->logits(hidden.narrow(0, begin, count)), requests);
    sampled.tokens.insert(sampled.tokens.end(), part.tokens.begin(), part.tokens.end());
    sampled.logprobs.insert(sampled.logprobs.end(), part.logprobs.begin(), part.logprobs.end());
  }
  return sampled;
}

// Runs the rows' last tokens through the CUDA decoder and samples the next ones. Each row's pages must have a slot for
// its last token. Absent if there is no decoder or it has failed.
std::optional<SampledTokens> RunningBatch::State::decode(const std::vector<Row*>& rows) {
  if (!decoder) return std::nullopt;
  std::vector<cuda::DecodeRow> decode_rows;
  for (const Row* row : rows)
    decode_rows.push_back({.id = row->generation.tokens.back(), .text = &row->pages, .request = sample_request(*row)});
  return decoder->step(decode_rows);
}

// Appends a token to each of these running rows, and ends rows that are complete.
void RunningBatch::State::append_tokens(const std::vector<Row*>& rows, const SampledTokens& sampled) {
  for (std::size_t i = 0; i < rows.size(); ++i) {
    Row& row = *rows[i];
    const Sampling& sampling = row.sequence.sampling;
    std::optional<Error> error;
    std::optional<Finish> finish;
    if (!std::isfinite(sampled.logprobs[i])) {
      error = fail(Code::kCorrupt, "generate",
                   "the logits of sequence {} at new token {} are not finite; the weights have diverged or are damaged",
                   row.sequence.id, row.generation.tokens.size());
    } else {
      row.generation.tokens.push_back(sampled.tokens[i]);
      row.generation.logprobs.push_back(sampled.logprobs[i]);
      if (row.spans.empty() || row.spans.back().version != version) row.spans.push_back({.version = version, .end = 0});
      row.spans.back().end = row.generation.tokens.size();
      if (std::find(sampling.eos.begin(), sampling.eos.end(), sampled.tokens[i]) != sampling.eos.end()) {
        finish = Finish::kEos;
      } else if (std::ssize(row.generation.tokens) == sampling.tokens_max) {
        finish = Finish::kLength;
      } else if (row.sequence.ends) {
        try {
          if (row.sequence.ends(row.generation.tokens)) finish = Finish::kStopped;
        } catch (const std::exception& e) {
          error = fail(Code::kInternal, "generate", "asking whether sequence {} ends: {}", row.sequence.id, e.what());
        }
      }
    }
    if (!error && !finish) continue;
    row.generation.finish = finish.value_or(Finish::kLength);  // not read if there is an error
    end(row, std::move(error));
    row.ended = true;
  }
  std::erase_if(running, [](const auto& row) { return row->ended; });
}

// Gives every running row a page slot for its last token, in a page that no other row shares. Preempts the youngest
// rows if pages are short. False if even the only remaining row gets none.
bool RunningBatch::State::make_room() {
  const auto next_page_index = [](const Row& row) {
    return static_cast<std::size_t>(row.pages.tokens / PagedCache::kPageTokens);
  };
  const auto has_slot = [&](const auto& row) {
    return next_page_index(*row) < row->pages.list.size() && !cache.is_shared(row->pages.list[next_page_index(*row)]);
  };
  const auto pages_needed = [&] {
    return std::ssize(running) - std::count_if(running.begin(), running.end(), has_slot);
  };
  // free_pages() checks the limit of the cache; reserve() then fails if the memory itself is short.
  while (pages_needed() > cache.free_pages() || !cache.reserve(pages_needed())) {
    if (running.size() == 1) return false;
    preempt_youngest();
  }
  // Copy on write: a row whose next token would go into a shared page gets a copy of that page.
  std::vector<Row*> copying_rows;
  std::vector<Page> shared_pages, copied_pages;
  for (const auto& row : running) {
    if (has_slot(row)) continue;
    if (next_page_index(*row) == row->pages.list.size()) {
      row->pages.list.push_back(cache.take_reserved());
    } else {
      copying_rows.push_back(row.get());
      shared_pages.push_back(row->pages.list[next_page_index(*row)]);
      copied_pages.push_back(cache.take_reserved());
    }
  }
  if (copying_rows.empty()) return true;
  try {
    cache.copy(shared_pages, copied_pages);
  } catch (...) {
    for (const Page page : copied_pages) cache.release(page);
    throw;
  }
  for (std::size_t i = 0; i < copying_rows.size(); ++i) {
    copying_rows[i]->pages.list[next_page_index(*copying_rows[i])] = copied_pages[i];
    cache.release(shared_pages[i]);
  }
  return true;
}

// Samples one more token for every running row. While memory is too short, preempts half of the rows and tries again.
void RunningBatch::State::run_decode_pass() {
  while (!running.empty()) {
    bool has_room = true;
    std::vector<Row*> rows;
    SampledTokens sampled;
    Routing routing;
    routing.records = recorded_choices > 0;
    const Status passed = run_catching_errors(running.size(), [&] {
      has_room = make_room();
      if (!has_room) return;
      for (const auto& row : running) rows.push_back(row.get());
      if (std::optional<SampledTokens> decoded = decode(rows)) {
        sampled = *std::move(decoded);
        return;
      }
      std::vector<const Pages*> texts;
      const Tensor ids = torch::empty({std::ssize(running), 1}, torch::kLong), positions = torch::empty_like(ids);
      for (std::size_t i = 0; i < running.size(); ++i) {
        texts.push_back(&running[i]->pages);
        ids.data_ptr<std::int64_t>()[i] = running[i]->generation.tokens.back();
        positions.data_ptr<std::int64_t>()[i] = running[i]->pages.tokens;
      }
      const auto attention = cache.decode_attention(std::move(texts));
      const Tensor hidden = model->hidden_states(ids.to(model->device()), positions, attention.get(), &routing);
      sampled = sample_next(rows, hidden.select(1, 0));
    });
    if (passed && has_room) {
      for (Row* row : rows) ++row->pages.tokens;  // the pass has stored each last token's keys and values
      if (recorded_choices > 0) {
        const auto* next = routing.used.data_ptr<std::int16_t>();
        for (Row* row : rows) {
          row->generation.experts.insert(row->generation.experts.end(), next, next + recorded_choices);
          next += recorded_choices;
        }
      }
      append_tokens(rows, sampled);
      return raise_limits_if_due();
    }
    passes = 0;
    const bool is_memory_short = !has_room || (!passed && passed.error().code == Code::kExhausted);
    if (is_memory_short && running.size() > 1) {
      rows_max = std::ssize(running) / 2;
      while (std::ssize(running) > rows_max) preempt_youngest();
      continue;
    }
    // If the pass succeeded, there was no slot even for the only row.
    for (const auto& row : running) {
      end(*row, passed ? fail(Code::kExhausted, "generate", "{} tokens, expected no more than {} pages of {} hold",
                              row->text_tokens(), cache.pages_max(), PagedCache::kPageTokens)
                       : passed.error());
    }
    running.clear();
  }
}

// Called after every decoding pass. Doubles the limits, up to those given, after enough passes without a shortage of
// memory, because memory may be available again.
void RunningBatch::State::raise_limits_if_due() {
  if (++passes < kPassesBeforeRaisingLimits) return;
  passes = 0;
  rows_max = std::min(std::max<std::int64_t>(1, limits.rows_max), 2 * rows_max);
  prefill_tokens_max = std::min(limits.prefill_tokens_max, 2 * prefill_tokens_max);
  cache.reset_pages_max();
}

// The oldest waiting rows: as many as the limits of rows and prefill allow, and as the cache has pages for. Each row
// needs the pages of its text, and every row, also a running one, one more page for its next tokens.
Admission RunningBatch::State::admissible() {
  Admission admission;
  while (admission.rows < std::ssize(waiting) &&
         std::ssize(running) + admission.rows < (admit_only_when_empty ? 1 : rows_max)) {
    Row& row = *waiting[static_cast<std::size_t>(admission.rows)];
    const Prompt& prompt = row.prompt->second;
    const bool is_new = row.generation.tokens.empty();  // otherwise a preempted row, whose text it does not share
    const auto shared_text = std::find_if(admission.texts.begin(), admission.texts.end(), [&](const PrefillText& text) {
      return is_new && text.rows[0]->prompt == row.prompt && text.rows[0]->generation.tokens.empty();
    });
    const bool shares_text = shared_text != admission.texts.end();
    const bool is_cached = is_new && !prompt.pages.list.empty() && prompt.weights_changes == weights_changes;
    const std::int64_t tokens = row.text_tokens(), longest = std::max(admission.longest_text_tokens, tokens);
    // The first text may be longer than prefill_tokens_max, because it would never run otherwise.
    if (!shares_text && !is_cached && admission.texts_to_prefill > 0 &&
        longest * (admission.texts_to_prefill + 1) > prefill_tokens_max)
      break;
    const std::int64_t pages = shares_text || is_cached ? 0 : PagedCache::pages_for(tokens);
    const std::int64_t next_token_pages = std::ssize(running) + admission.rows + 1;
    if (admission.pages + pages + next_token_pages > cache.free_pages()) break;
    admission.pages += pages;
    ++admission.rows;
    if (shares_text) {
      shared_text->rows.push_back(&row);
      continue;
    }
    admission.texts.push_back({.rows = {&row}, .is_cached = is_cached});
    if (is_cached) continue;
    ++admission.texts_to_prefill;
    admission.longest_text_tokens = longest;
  }
  return admission;
}

// Prefills the texts that are not cached, samples the next token of every admitted row, and moves these rows from
// `waiting` to `running`. After an error, the rows still wait.
Status RunningBatch::State::prefill(Admission& admission) {
  std::vector<Row*> rows;
  Tensor hidden;  // [texts to prefill, hidden]: hidden states of the texts' last tokens
  SampledTokens sampled;
  for (std::int64_t i = 0; i < admission.rows; ++i) rows.push_back(waiting[static_cast<std::size_t>(i)].get());
  const auto passed = run_catching_errors(rows.size(), [&] {
    const Tensor ids = torch::zeros({admission.texts_to_prefill, admission.longest_text_tokens}, torch::kLong);
    std::vector<const Pages*> pages;
    std::vector<std::int64_t> lengths, last_tokens;  // by text; index of its last token in the flattened `ids`
    for (PrefillText& text : admission.texts) {
      if (text.is_cached) continue;
      const Row& row = *text.rows[0];
      auto* next_id = ids.data_ptr<std::int64_t>() + std::ssize(pages) * admission.longest_text_tokens;
      next_id = std::copy(row.sequence.prompt.begin(), row.sequence.prompt.end(), next_id);
      std::copy(row.generation.tokens.begin(), row.generation.tokens.end(), next_id);
      text.pages.tokens = row.text_tokens();
      while (std::ssize(text.pages.list) < PagedCache::pages_for(text.pages.tokens))
        text.pages.list.push_back(cache.take_reserved());
      last_tokens.push_back(std::ssize(pages) * admission.longest_text_tokens + text.pages.tokens - 1);
      lengths.push_back(text.pages.tokens);
      pages.push_back(&text.pages);
    }
    if (!pages.empty()) {
      if (decoder) {
        if (const std::optional<Tensor> prefilled = decoder->prefill(ids, lengths, pages)) hidden = *prefilled;
      }
      if (!hidden.defined()) {
        const auto attention = cache.prefill_attention(std::move(pages), lengths);
        Routing routing;
        routing.records = recorded_choices > 0;
        hidden = model->hidden_states(ids.to(model->device()), /*positions=*/{}, attention.get(), &routing)
                     .flatten(0, 1)
                     .index_select(0, torch::tensor(last_tokens, torch::kLong).to(model->device()));
        const auto row_choices = static_cast<std::size_t>(admission.longest_text_tokens) * recorded_choices;
        const auto* next = recorded_choices > 0 ? routing.used.data_ptr<std::int16_t>() : nullptr;
        for (PrefillText& text : admission.texts) {
          if (text.is_cached || next == nullptr) continue;
          text.experts.assign(next, next + static_cast<std::size_t>(text.pages.tokens) * recorded_choices);
          next += row_choices;
        }
      }
    }
    std::map<const Row*, Tensor> hidden_of_row;
    std::int64_t index = 0;
    for (const PrefillText& text : admission.texts) {
      const Tensor text_hidden = text.is_cached ? text.rows[0]->prompt->second.hidden : hidden[index++];
      for (const Row* row : text.rows) hidden_of_row[row] = text_hidden;
    }
    std::vector<Tensor> row_hidden;
    for (const Row* row : rows) row_hidden.push_back(hidden_of_row.at(row));
    sampled = sample_next(rows, torch::stack(row_hidden));
  });
  if (!passed) {
    for (PrefillText& text : admission.texts) cache.release(text.pages);
    return passed;
  }
  std::int64_t index = 0;
  for (PrefillText& text : admission.texts) {
    Prompt& prompt = text.rows[0]->prompt->second;
    const bool is_new = text.rows[0]->generation.tokens.empty();
    const Tensor text_hidden = text.is_cached ? Tensor() : hidden[index++];
    if (!is_new || (!text.is_cached && prompt.members == 1)) {  // no other row shares the text
      text.rows[0]->pages = std::move(text.pages);
      append_experts(*text.rows[0], text.experts);
      continue;
    }
    if (!text.is_cached) {
      release_prompt(prompt);
      prompt.pages = std::move(text.pages);
      prompt.hidden = text_hidden.clone();
      prompt.experts = std::move(text.experts);
      prompt.weights_changes = weights_changes;
    }
    for (Row* row : text.rows) {
      row->pages = prompt.pages;
      for (const Page page : row->pages.list) cache.add_owner(page);
      row->uses_prompt_pages = true;
      append_experts(*row, prompt.experts);
      ++prompt.users;
    }
  }
  for (std::int64_t i = 0; i < admission.rows; ++i) {
    running.push_back(std::move(waiting.front()));
    waiting.pop_front();
  }
  append_tokens(rows, sampled);
  return ok();
}

// Prefills waiting rows until no more are admissible. After a shortage of memory, halves prefill_tokens_max; if only
// one text was prefilled, that text waits until no row is running.
void RunningBatch::State::admit_waiting() {
  while (!waiting.empty() && !(admit_only_when_empty && !running.empty())) {
    Admission admission = admissible();
    // A failed reserve() lowers the cache's limit, so the next admission is smaller.
    if (admission.rows > 0 && !cache.reserve(admission.pages)) continue;
    if (admission.rows == 0) {
      if (!running.empty()) return;
      end(*waiting.front(), fail(Code::kExhausted, "generate", "{} tokens, expected no more than {} pages of {} hold",
                                 waiting.front()->text_tokens(), cache.pages_max(), PagedCache::kPageTokens));
      waiting.pop_front();
      continue;
    }
    const Status passed = prefill(admission);
    if (passed) {
      admit_only_when_empty = false;
      continue;
    }
    passes = 0;
    if (passed.error().code != Code::kExhausted || (admission.rows == 1 && running.empty())) {
      for (std::int64_t i = 0; i < admission.rows; ++i) {
        end(*waiting.front(), passed.error());
        waiting.pop_front();
      }
      admit_only_when_empty = false;
    } else if (admission.texts_to_prefill > 1) {
      prefill_tokens_max = admission.longest_text_tokens * admission.texts_to_prefill / 2;
    } else {
      admit_only_when_empty = true;
    }
  }
}

RunningBatch::RunningBatch(std::shared_ptr<Transformer> model, BatchLimits limits)
    : state_(std::make_unique<State>(std::move(model), limits)) {}
RunningBatch::RunningBatch(RunningBatch&&) noexcept = default;
RunningBatch& RunningBatch::operator=(RunningBatch&&) noexcept = default;
RunningBatch::~RunningBatch() = default;

Status RunningBatch::add(Sequence sequence) {
  if (const Status valid = check_request(state_->model->config(), sequence.prompt, sequence.sampling); !valid)
    return fail(valid.error().code, valid.error().operation, "sequence {}: {}", sequence.id, valid.error().detail);
  if (!state_->ids.insert(sequence.id).second)
    return fail(Code::kInvalid, "generate", "sequence {} is in the batch already, expected another id", sequence.id);
  auto row = std::make_unique<Row>();
  row->prompt = state_->prompts.try_emplace(sequence.prompt).first;
  ++row->prompt->second.members;
  row->sequence = std::move(sequence);
  state_->waiting.push_back(std::move(row));
  return ok();
}

std::vector<Ended> RunningBatch::step() {
  torch::NoGradGuard no_grad;
  state_->run_decode_pass();
  state_->admit_waiting();
  return std::exchange(state_->ended, {});
}

bool RunningBatch::abort(std::uint64_t id) {
  if (!state_->ids.contains(id)) return false;
  const auto remove_from = [&](auto& list) {
    const auto row =
        std::find_if(list.begin(), list.end(), [&](const auto& entry) { return entry->sequence.id == id; });
    if (row == list.end()) return;
    state_->unregister_row(**row);
    list.erase(row);
  };
  remove_from(state_->running);
  remove_from(state_->waiting);
  return true;
}

std::vector<Ended> RunningBatch::interrupt() {
  const auto end_all = [&](auto& list) {
    for (const auto& row : list) {
      row->generation.finish = Finish::kInterrupted;
      state_->end(*row);
    }
    list.clear();
  };
  end_all(state_->running);
  end_all(state_->waiting);
  return std::exchange(state_->ended, {});
}

void RunningBatch::set_weights_version(std::uint64_t version) {
  state_->version = version;
  ++state_->weights_changes;
}

std::size_t RunningBatch::running() const { return state_->running.size(); }
std::size_t RunningBatch::waiting() const { return state_->waiting.size(); }
std::size_t RunningBatch::rows_max() const { return static_cast<std::size_t>(state_->rows_max); }
std::size_t RunningBatch::kernels() const { return state_->decoder ? state_->decoder->kernels() : 0; }
Bytes RunningBatch::cache_used() const {
  return {static_cast<std::uint64_t>(state_->cache.used_pages()) * state_->cache.page_bytes().count};
}

}  // namespace echoline::model

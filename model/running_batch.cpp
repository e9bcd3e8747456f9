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

constexpr std::int64_t kPassesBeforeMore = 512;  // after a shortage of memory, before a larger limit is tried
constexpr std::int64_t kLogitsMax = std::int64_t{1} << 26;  // in memory at a time: 256 MiB

// The sequences with the same prompt.
struct Prompt {
  std::int64_t members = 0;   // in the batch, waiting ones included
  std::int64_t users = 0;     // running ones that use these pages
  std::uint64_t weights = 0;  // version of the weights that read them
  Pages pages;                // held while there are users; empty: not read
  Tensor hidden;              // [hidden], of the prompt's last token
};
using Prompts = std::map<std::vector<Token>, Prompt>;

struct Row {
  Sequence sequence;
  Prompts::iterator prompt;
  bool shares = false;  // counted among the users
  bool ended = false;
  Generation generation;
  std::vector<Span> spans;
  Pages pages;  // of the prompt and all tokens but the last

  std::int64_t text_tokens() const { return std::ssize(sequence.prompt) + std::ssize(generation.tokens); }
};

// A text to read, or one that is known already, and its rows.
struct Text {
  std::vector<Row*> rows;  // several rows share a prompt
  bool known = false;
  Pages pages = {};  // where its keys and values go
};

// The first `rows` waiting rows, and their needs.
struct Admission {
  std::int64_t rows = 0, pages = 0, texts_read = 0, longest = 0;
  std::vector<Text> texts = {};
};

// Converts an exception of libtorch. Its allocators report a lack of memory in words ("can't allocate memory", "CUDA
// out of memory"); the types of their exceptions differ between releases.
Error failed(std::size_t rows, std::string_view what) {
  const bool memory = what.find("memory") != std::string_view::npos;
  return fail(memory ? Code::kExhausted : Code::kInternal, "generate", "{} row{}: {}", rows, rows == 1 ? "" : "s",
              what);
}

template <class Pass>
Status attempt(std::size_t rows, const Pass& pass) {
  try {
    pass();
    return ok();
  } catch (const c10::Error& e) {
    return failed(rows, e.what_without_backtrace());
  } catch (const std::bad_alloc&) {
    return failed(rows, "out of memory");
  } catch (const std::exception& e) {
    return failed(rows, e.what());
  }
}

}  // namespace

struct RunningBatch::State {
  std::shared_ptr<Transformer> model;
  BatchLimits limits;
  PagedCache cache;
  std::unique_ptr<cuda::Decoder> decoder;  // null: libtorch's operations sample
  Prompts prompts;
  std::set<std::uint64_t> ids;
  std::deque<std::unique_ptr<Row>> waiting;   // oldest first; all are younger than the running ones
  std::vector<std::unique_ptr<Row>> running;  // oldest first
  std::vector<Ended> ended;                   // since the last step
  std::uint64_t version = 0, weights = 0;
  std::int64_t rows_max, prefill_tokens_max;  // current limits due to memory
  std::int64_t passes = 0;                    // since the last shortage of memory
  bool alone = false;                         // read the next one only without other running rows

  State(std::shared_ptr<Transformer> m, BatchLimits l)
      : model(std::move(m)),
        limits(l),
        cache(model->config(), model->device(), model->device().is_cpu() ? torch::kFloat : model->dtype(), l.cache_max),
        decoder(l.recorded ? cuda::Decoder::of(*model, cache) : nullptr),
        rows_max(std::max<std::int64_t>(1, l.rows_max)),
        prefill_tokens_max(l.prefill_tokens_max) {}

  // Releases a row's part of the cache.
  void let_go(Row& row) {
    cache.release(row.pages);
    Prompt& prompt = row.prompt->second;
    if (std::exchange(row.shares, false) && --prompt.users == 0) forget(prompt);
  }
  void forget(Prompt& prompt) {
    cache.release(prompt.pages);
    prompt.hidden = Tensor();
  }
  // Removes the row; the caller erases it from its list.
  void leave(Row& row) {
    let_go(row);
    ids.erase(row.sequence.id);
    if (--row.prompt->second.members == 0) prompts.erase(row.prompt);
  }
  void end(Row& row, std::optional<Error> error = {}) {
    leave(row);
    if (error) {
      ended.push_back({row.sequence.id, *std::move(error), std::move(row.spans)});
    } else {
      ended.push_back({row.sequence.id, std::move(row.generation), std::move(row.spans)});
    }
  }
  // Returns the youngest running row to the queue.
  void step_back() {
    let_go(*running.back());
    waiting.push_front(std::move(running.back()));
    running.pop_back();
  }

  Drawn next(const std::vector<Row*>& rows, const Tensor& hidden);
  std::optional<Drawn> decode(const std::vector<Row*>& rows);
  void append(const std::vector<Row*>& rows, const Drawn& drawn);
  bool make_room();
  void go_on();
  Admission admissible();
  Status read(Admission& admission);
  void let_in();
  void more_memory();
};

Draw draw_of(const Row& row) {
  const Sampling& sampling = row.sequence.sampling;
  return {&sampling, Random(sampling.seed, row.generation.tokens.size()).uniform()};
}

// Samples the tokens after the rows' last ones, from their hidden states [rows, hidden].
Drawn RunningBatch::State::next(const std::vector<Row*>& rows, const Tensor& hidden) {
  const std::int64_t count_max = std::max<std::int64_t>(1, kLogitsMax / model->config().vocab_size);
  Drawn drawn;
  for (std::int64_t begin = 0; begin < std::ssize(rows); begin += count_max) {
    const std::int64_t count = std::min(count_max, std::ssize(rows) - begin);
    std::vector<Draw> draws;
    for (std::int64_t i = begin; i < begin + count; ++i) draws.push_back(draw_of(*rows[static_cast<std::size_t>(i)]));
    const Drawn some = draw(model->logits(hidden.narrow(0, begin, count)), draws);
    drawn.tokens.insert(drawn.tokens.end(), some.tokens.begin(), some.tokens.end());
    drawn.logprobs.insert(drawn.logprobs.end(), some.logprobs.begin(), some.logprobs.end());
  }
  return drawn;
}

// As next(), for running rows with a place for their last token, if there is a decoder.
std::optional<Drawn> RunningBatch::State::decode(const std::vector<Row*>& rows) {
  if (!decoder) return std::nullopt;
  std::vector<cuda::DecodeRow> all;
  for (const Row* row : rows) all.push_back({row->generation.tokens.back(), &row->pages, draw_of(*row)});
  return decoder->step(all);
}

// Appends tokens to running rows, each of which may end.
void RunningBatch::State::append(const std::vector<Row*>& rows, const Drawn& drawn) {
  for (std::size_t i = 0; i < rows.size(); ++i) {
    Row& row = *rows[i];
    const Sampling& sampling = row.sequence.sampling;
    std::optional<Error> error;
    std::optional<Finish> finish;
    if (!std::isfinite(drawn.logprobs[i])) {
      error = fail(Code::kCorrupt, "generate",
                   "the logits of sequence {} at new token {} are not finite; the weights have diverged or are damaged",
                   row.sequence.id, row.generation.tokens.size());
    } else {
      row.generation.tokens.push_back(drawn.tokens[i]);
      row.generation.logprobs.push_back(drawn.logprobs[i]);
      if (row.spans.empty() || row.spans.back().version != version) row.spans.push_back({version, 0});
      row.spans.back().end = row.generation.tokens.size();
      if (std::find(sampling.eos.begin(), sampling.eos.end(), drawn.tokens[i]) != sampling.eos.end()) {
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
    row.generation.finish = finish.value_or(Finish::kLength);
    end(row, std::move(error));
    row.ended = true;
  }
  std::erase_if(running, [](const auto& row) { return row->ended; });
}

// Gives every running row its own place for the next token. Rows without one return to the queue. False if the only
// remaining row has none.
bool RunningBatch::State::make_room() {
  const auto at = [](const Row& row) { return static_cast<std::size_t>(row.pages.tokens / PagedCache::kPageTokens); };
  const auto has_place = [&](const auto& row) {
    return at(*row) < row->pages.list.size() && !cache.shared(row->pages.list[at(*row)]);
  };
  const auto needed = [&] { return std::ssize(running) - std::count_if(running.begin(), running.end(), has_place); };
  while (needed() > cache.free() || !cache.reserve(needed())) {
    if (running.size() == 1) return false;
    step_back();
  }
  std::vector<Row*> copying;
  std::vector<Page> from, to;
  for (const auto& row : running) {
    if (has_place(row)) continue;
    if (at(*row) == row->pages.list.size()) {
      row->pages.list.push_back(cache.take());
    } else {
      copying.push_back(row.get());
      from.push_back(row->pages.list[at(*row)]);
      to.push_back(cache.take());
    }
  }
  if (copying.empty()) return true;
  try {
    cache.copy(from, to);
  } catch (...) {
    for (const Page page : to) cache.release(page);
    throw;
  }
  for (std::size_t i = 0; i < copying.size(); ++i) {
    copying[i]->pages.list[at(*copying[i])] = to[i];
    cache.release(from[i]);
  }
  return true;
}

// Samples one more token for every running row.
void RunningBatch::State::go_on() {
  while (!running.empty()) {
    bool room = true;
    std::vector<Row*> rows;
    Drawn drawn;
    const Status passed = attempt(running.size(), [&] {
      room = make_room();
      if (!room) return;
      for (const auto& row : running) rows.push_back(row.get());
      if (std::optional<Drawn> decoded = decode(rows)) {
        drawn = *std::move(decoded);
        return;
      }
      std::vector<const Pages*> texts;
      const Tensor ids = torch::empty({std::ssize(running), 1}, torch::kLong), positions = torch::empty_like(ids);
      for (std::size_t i = 0; i < running.size(); ++i) {
        texts.push_back(&running[i]->pages);
        ids.data_ptr<std::int64_t>()[i] = running[i]->generation.tokens.back();
        positions.data_ptr<std::int64_t>()[i] = running[i]->pages.tokens;
      }
      const auto attention = cache.continuing(std::move(texts));
      drawn = next(rows, model->hidden_states(ids.to(model->device()), positions, attention.get()).select(1, 0));
    });
    if (passed && room) {
      for (Row* row : rows) ++row->pages.tokens;
      append(rows, drawn);
      return more_memory();
    }
    passes = 0;
    const bool memory = passed ? true : passed.error().code == Code::kExhausted;
    if (memory && running.size() > 1) {
      rows_max = std::ssize(running) / 2;
      while (std::ssize(running) > rows_max) step_back();
      continue;
    }
    for (const auto& row : running) {
      end(*row, passed ? fail(Code::kExhausted, "generate", "{} tokens, expected no more than {} pages of {} hold",
                              row->text_tokens(), cache.pages_max(), PagedCache::kPageTokens)
                       : passed.error());
    }
    running.clear();
  }
}

// Raises the limits again, in case memory is available again.
void RunningBatch::State::more_memory() {
  if (++passes < kPassesBeforeMore) return;
  passes = 0;
  rows_max = std::min(std::max<std::int64_t>(1, limits.rows_max), 2 * rows_max);
  prefill_tokens_max = std::min(limits.prefill_tokens_max, 2 * prefill_tokens_max);
  cache.try_again();
}

// The first waiting rows for which there is room, beside the next tokens of the running ones.
Admission RunningBatch::State::admissible() {
  Admission out;
  while (out.rows < std::ssize(waiting) && std::ssize(running) + out.rows < (alone ? 1 : rows_max)) {
    Row& row = *waiting[static_cast<std::size_t>(out.rows)];
    const Prompt& prompt = row.prompt->second;
    const bool fresh = row.generation.tokens.empty();
    const auto with = std::find_if(out.texts.begin(), out.texts.end(), [&](const Text& text) {
      return fresh && text.rows[0]->prompt == row.prompt && text.rows[0]->generation.tokens.empty();
    });
    const bool joins = with != out.texts.end();
    const bool known = fresh && !prompt.pages.list.empty() && prompt.weights == weights;
    const std::int64_t tokens = row.text_tokens(), longest = std::max(out.longest, tokens);
    if (!joins && !known && out.texts_read > 0 && longest * (out.texts_read + 1) > prefill_tokens_max) break;
    const std::int64_t pages = joins || known ? 0 : PagedCache::pages_of(tokens);
    if (out.pages + pages + std::ssize(running) + out.rows + 1 > cache.free()) break;
    out.pages += pages;
    ++out.rows;
    if (joins) {
      with->rows.push_back(&row);
      continue;
    }
    out.texts.push_back({{&row}, known});
    if (known) continue;
    ++out.texts_read;
    out.longest = longest;
  }
  return out;
}

// Reads the unknown texts and samples the first token of every row.
Status RunningBatch::State::read(Admission& admission) {
  std::vector<Row*> rows;
  Tensor hidden;  // [texts read, hidden], of their last tokens
  Drawn drawn;
  for (std::int64_t i = 0; i < admission.rows; ++i) rows.push_back(waiting[static_cast<std::size_t>(i)].get());
  const auto passed = attempt(rows.size(), [&] {
    const Tensor ids = torch::zeros({admission.texts_read, admission.longest}, torch::kLong);
    std::vector<const Pages*> pages;
    std::vector<std::int64_t> lengths, last;
    for (Text& text : admission.texts) {
      if (text.known) continue;
      const Row& row = *text.rows[0];
      auto* to = ids.data_ptr<std::int64_t>() + std::ssize(pages) * admission.longest;
      to = std::copy(row.sequence.prompt.begin(), row.sequence.prompt.end(), to);
      std::copy(row.generation.tokens.begin(), row.generation.tokens.end(), to);
      text.pages.tokens = row.text_tokens();
      while (std::ssize(text.pages.list) < PagedCache::pages_of(text.pages.tokens))
        text.pages.list.push_back(cache.take());
      last.push_back(std::ssize(pages) * admission.longest + text.pages.tokens - 1);
      lengths.push_back(text.pages.tokens);
      pages.push_back(&text.pages);
    }
    if (!pages.empty()) {
      if (decoder) {
        if (const std::optional<Tensor> read = decoder->read(ids, lengths, pages)) hidden = *read;
      }
      if (!hidden.defined()) {
        const auto attention = cache.reading(std::move(pages), lengths);
        hidden = model->hidden_states(ids.to(model->device()), {}, attention.get())
                     .flatten(0, 1)
                     .index_select(0, torch::tensor(last, torch::kLong).to(model->device()));
      }
    }
    std::map<const Row*, Tensor> of;
    std::int64_t index = 0;
    for (const Text& text : admission.texts) {
      const Tensor one = text.known ? text.rows[0]->prompt->second.hidden : hidden[index++];
      for (const Row* row : text.rows) of[row] = one;
    }
    std::vector<Tensor> each;
    for (const Row* row : rows) each.push_back(of.at(row));
    drawn = next(rows, torch::stack(each));
  });
  if (!passed) {
    for (Text& text : admission.texts) cache.release(text.pages);
    return passed;
  }
  std::int64_t index = 0;
  for (Text& text : admission.texts) {
    Prompt& prompt = text.rows[0]->prompt->second;
    const bool fresh = text.rows[0]->generation.tokens.empty();
    const Tensor last = text.known ? Tensor() : hidden[index++];
    if (!fresh || (!text.known && prompt.members == 1)) {  // no other row shares it
      text.rows[0]->pages = std::move(text.pages);
      continue;
    }
    if (!text.known) {
      forget(prompt);
      prompt.pages = std::move(text.pages);
      prompt.hidden = last.clone();
      prompt.weights = weights;
    }
    for (Row* row : text.rows) {
      row->pages = prompt.pages;
      for (const Page page : row->pages.list) cache.share(page);
      row->shares = true;
      ++prompt.users;
    }
  }
  for (std::int64_t i = 0; i < admission.rows; ++i) {
    running.push_back(std::move(waiting.front()));
    waiting.pop_front();
  }
  append(rows, drawn);
  return ok();
}

void RunningBatch::State::let_in() {
  while (!waiting.empty() && !(alone && !running.empty())) {
    Admission admission = admissible();
    if (admission.rows > 0 && !cache.reserve(admission.pages)) continue;
    if (admission.rows == 0) {
      if (!running.empty()) return;
      end(*waiting.front(), fail(Code::kExhausted, "generate", "{} tokens, expected no more than {} pages of {} hold",
                                 waiting.front()->text_tokens(), cache.pages_max(), PagedCache::kPageTokens));
      waiting.pop_front();
      continue;
    }
    const Status passed = read(admission);
    if (passed) {
      alone = false;
      continue;
    }
    passes = 0;
    if (passed.error().code != Code::kExhausted || (admission.rows == 1 && running.empty())) {
      for (std::int64_t i = 0; i < admission.rows; ++i) {
        end(*waiting.front(), passed.error());
        waiting.pop_front();
      }
      alone = false;
    } else if (admission.texts_read > 1) {
      prefill_tokens_max = admission.longest * admission.texts_read / 2;
    } else {
      alone = true;
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
  state_->go_on();
  state_->let_in();
  return std::exchange(state_->ended, {});
}

bool RunningBatch::abort(std::uint64_t id) {
  if (!state_->ids.contains(id)) return false;
  const auto drop = [&](auto& list) {
    const auto row = std::find_if(list.begin(), list.end(), [&](const auto& r) { return r->sequence.id == id; });
    if (row == list.end()) return;
    state_->leave(**row);
    list.erase(row);
  };
  drop(state_->running);
  drop(state_->waiting);
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

void RunningBatch::weights_are(std::uint64_t version) {
  state_->version = version;
  ++state_->weights;
}

std::size_t RunningBatch::running() const { return state_->running.size(); }
std::size_t RunningBatch::waiting() const { return state_->waiting.size(); }
std::size_t RunningBatch::rows_max() const { return static_cast<std::size_t>(state_->rows_max); }
std::size_t RunningBatch::kernels() const { return state_->decoder ? state_->decoder->kernels() : 0; }
Bytes RunningBatch::cache_used() const {
  return {static_cast<std::uint64_t>(state_->cache.used()) * state_->cache.page_bytes().count};
}

}  // namespace echoline::model

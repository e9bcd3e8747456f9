#include "worker/production.hpp"

#include <algorithm>
#include <deque>

#include "base/log.hpp"
#include "base/random.hpp"

namespace echoline::worker {
namespace {

constexpr std::uint32_t kFullBatchesBeforeMore = 32;
constexpr std::size_t kDetailBytesMax = 1024;

schema::WorkFailed failure(const schema::Lease& lease, schema::WorkFailure kind, std::string detail) {
  log::warn("lease {}, problem '{}': {}", lease.id(), lease.problem().id(), detail);
  detail.resize(std::min(detail.size(), kDetailBytesMax));
  schema::WorkFailed failed;
  failed.set_lease(lease.id());
  failed.set_failure(kind);
  failed.set_detail(std::move(detail));
  return failed;
}

}  // namespace

Result<Task> make_task(schema::RunSpec spec) {
  Task task;
  ECHO_ASSIGN(const model::ModelConfig config, model::ModelConfig::from_json(spec.model_config_json()));
  ECHO_ASSIGN(model::Tokenizer tokenizer, model::Tokenizer::from_json(spec.tokenizer_json()));
  ECHO_ASSIGN(task.phrasing, model::Phrasing::from_parts(std::move(tokenizer), {spec.eos().begin(), spec.eos().end()},
                                                         spec.prompt_json()));
  ECHO_ASSIGN(task.adapter, data_plane::make_adapter(spec.adapter_name(), spec.adapter_config_json(), spec.seed(),
                                                     data_plane::AdapterUse::kScoring));
  ECHO_ASSIGN(task.model, model::create(config, torch::kCPU, torch::kBFloat16));  // the policy comes from the learner, in bf16
  task.sampling.temperature = spec.temperature();
  task.sampling.top_p = spec.top_p();
  task.sampling.tokens_max = spec.response_tokens_max();
  task.sampling.eos = task.phrasing->eos();
  task.spec = std::move(spec);
  return task;
}

// The rollouts of all leases in a row, and what has become of each lease.
struct Producer::Batch {
  struct Row {
    std::size_t lease = 0;
    std::uint32_t member = 0;
    std::optional<model::Generation> generation;
  };
  const std::vector<schema::Lease>& leases;
  const std::function<bool()>& tick;
  std::optional<std::size_t> rows_max_before;                // when the batch began
  std::vector<std::vector<model::Token>> prompts = {};        // by lease
  std::vector<Row> rows = {};                                 // those of a lease stand together
  std::vector<bool> failed = {};                              // by lease
  std::deque<std::pair<std::size_t, std::size_t>> todo = {};  // ranges of rows
  Produced produced = {};

  void fail(std::size_t lease, schema::WorkFailure kind, std::string detail) {
    if (!failed[lease]) produced.failures.push_back(failure(leases[lease], kind, std::move(detail)));
    failed[lease] = true;
  }
};

Producer::Producer(const Task& task, Generate generate) : task_(task), generate_(std::move(generate)) {
  if (!generate_)
    generate_ = [this](const auto& prompts, const auto& options, const auto& interrupted) {
      return model::generate(*task_.model, prompts, options, interrupted);
    };
}

Produced Producer::produce(const std::vector<schema::Lease>& leases, WorkerId worker,
                           const std::function<bool()>& tick) {
  Batch batch{leases, tick, rows_max_};
  batch.prompts.resize(leases.size());
  batch.failed.resize(leases.size());
  for (std::size_t i = 0; i < leases.size(); ++i) {
    auto prompt = task_.phrasing->prompt(leases[i].problem().prompt());
    if (!prompt) {
      batch.fail(i, schema::WORK_FAILURE_PROMPT, prompt.error().message());
      continue;
    }
    batch.prompts[i] = std::move(*prompt);
    for (std::uint32_t member = 0; member < leases[i].rollouts(); ++member) batch.rows.push_back({i, member, {}});
  }
  if (!batch.rows.empty()) batch.todo.emplace_back(0, batch.rows.size());
  while (!batch.todo.empty() && !batch.produced.interrupted) {
    const auto [begin, end] = batch.todo.front();
    batch.todo.pop_front();
    generate_rows(batch, begin, end);
  }
  for (std::size_t i = 0; i < leases.size() && !batch.produced.interrupted; ++i) {
    if (batch.failed[i]) continue;
    try {
      batch.produced.submissions.push_back(scored(batch, i, worker));
      batch.produced.rollouts += leases[i].rollouts();
    } catch (const std::exception& error) {
      batch.fail(i, schema::WORK_FAILURE_SCORING, error.what());
    }
    batch.produced.interrupted = tick();
  }
  return std::move(batch.produced);
}

void Producer::generate_rows(Batch& batch, std::size_t begin, std::size_t end) {
  while (begin < end && batch.failed[batch.rows[begin].lease]) ++begin;
  if (begin == end) return;
  if (rows_max_ && end - begin > *rows_max_) {
    batch.todo.emplace_front(begin + *rows_max_, end);
    end = begin + *rows_max_;
  }
  std::vector<std::vector<model::Token>> prompts;
  for (std::size_t row = begin; row < end; ++row) prompts.push_back(batch.prompts[batch.rows[row].lease]);
  const Batch::Row& first = batch.rows[begin];
  model::SamplingOptions sampling = task_.sampling;
  sampling.seed = mix64(task_.spec.seed() ^ (mix64(batch.leases[first.lease].id()) + first.member));
  const auto interrupted = [&] { return batch.produced.interrupted = batch.produced.interrupted || batch.tick(); };
  auto generations = generate_(prompts, sampling, interrupted);
  if (interrupted()) return;
  if (generations) {
    for (std::size_t row = begin; row < end; ++row)
      batch.rows[row].generation = std::move((*generations)[row - begin]);
    if (rows_max_ && end - begin >= *rows_max_ && ++full_batches_ >= kFullBatchesBeforeMore) {
      full_batches_ = 0;
      rows_max_ = 2 * *rows_max_;
    }
    return;
  }
  const Error& error = generations.error();
  if (error.code == Code::kExhausted) return out_of_memory(batch, begin, end, error);
  if (batch.rows[begin].lease == batch.rows[end - 1].lease)
    return batch.fail(batch.rows[begin].lease,
                      error.code == Code::kInvalid ? schema::WORK_FAILURE_PROMPT : schema::WORK_FAILURE_GENERATION,
                      error.message());
  // Somebody among them is bad, the others must not suffer: one lease at a time, in order.
  for (std::size_t last = end; last > begin;) {
    std::size_t head = last - 1;
    while (head > begin && batch.rows[head - 1].lease == batch.rows[last - 1].lease) --head;
    batch.todo.emplace_front(head, last);
    last = head;
  }
}

void Producer::out_of_memory(Batch& batch, std::size_t begin, std::size_t end, const Error& error) {
  full_batches_ = 0;
  if (end - begin == 1) {
    rows_max_ = batch.rows_max_before;  // this group is too large, not the batches
    return batch.fail(batch.rows[begin].lease, schema::WORK_FAILURE_MEMORY, error.message());
  }
  std::size_t half = (end - begin) / 2;
  // Rollouts of one group share the reading of their prompt: cut between groups while there are several.
  const std::size_t group = batch.leases[batch.rows[begin].lease].rollouts();
  if (half > group) half -= half % group;
  log::warn("{} rollouts at once do not fit into memory, going on with {}: {}", end - begin, half, error.message());
  rows_max_ = half;
  batch.todo.emplace_front(begin, end);
}

schema::Submission Producer::scored(const Batch& batch, std::size_t lease_index, WorkerId worker) const {
  const schema::Lease& lease = batch.leases[lease_index];
  const std::vector<model::Token>& prompt = batch.prompts[lease_index];
  schema::Submission submission;
  submission.set_lease(lease.id());
  const auto of_lease = [&](const Batch::Row& row) { return row.lease == lease_index; };
  for (auto row = std::find_if(batch.rows.begin(), batch.rows.end(), of_lease);
       row != batch.rows.end() && of_lease(*row); ++row) {
    const model::Generation& generation = *row->generation;
    const std::string text = task_.phrasing->answer(generation.tokens);
    const data_plane::Score score = task_.adapter->score(lease.problem(), text);
    schema::Trajectory& t = *submission.add_trajectories();
    t.set_id(fmt::format("{}/{}", lease.id(), row->member));
    t.set_problem_id(lease.problem().id());
    t.set_group(lease.group());
    t.set_member(row->member);
    for (const model::Token token : prompt) t.add_prompt_tokens(static_cast<std::uint32_t>(token));
    for (const model::Token token : generation.tokens) t.add_response_tokens(static_cast<std::uint32_t>(token));
    for (const float logprob : generation.logprobs) t.add_logprobs(std::min(logprob, 0.0f));
    schema::VersionSpan& span = *t.add_spans();
    span.set_end(static_cast<std::uint32_t>(generation.tokens.size()));
    span.set_version(lease.version());
    t.set_reward(score.reward);
    for (const auto& [name, value] : score.components) (*t.mutable_components())[name] = value;
    t.set_policy_digest(lease.policy_digest());
    t.set_lease(lease.id());
    t.set_worker(worker.value);
    t.set_finished(generation.finish == model::Finish::kEos);
    t.set_text(text);
    t.set_correct(score.correct);
  }
  return submission;
}

}  // namespace echoline::worker

// Learner steps and evaluations of the built-in trainer. PolicyToTrain calls it.
#include "learner/training/trainer.hpp"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <exception>
#include <map>
#include <mutex>
#include <numeric>
#include <set>
#include <utility>

#include "base/random.hpp"
#include "data_plane/policy_input.hpp"
#include "data_plane/routed_experts.hpp"
#include "learner/batch.hpp"
#include "model/generate.hpp"
#include "model/weights.hpp"

namespace echoline::learner {

struct TrainingRow {
  std::vector<std::int64_t> tokens;  // prompt and response
  std::size_t prompt_tokens = 0;
  // Per response token: log-probabilities under the behaviour and the proximal policy (loss.hpp), and the loss mask.
  std::vector<float> behaviour;
  std::vector<float> proximal;  // empty until recorded
  std::vector<float> mask;
  double advantage = 0;
  WorkerId worker;
  bool is_scrutinised = false;        // chosen to test its worker's log-probabilities (credibility.hpp)
  std::vector<std::int16_t> experts;  // for model::ScoredSequence::experts; empty: not known, or not replayed
};

namespace {

using Groups = std::vector<std::vector<TrainingRow>>;

// A step scrutinises one in 32 of its responses, and at least 16 in all: few enough to cost about a hundredth of its
// time, but enough to judge each worker of a small fleet.
constexpr std::size_t kScrutinisedDivisor = 32, kScrutinisedMin = 16;

// Pairs of prompt tokens in all rows of an evaluation batch; bounds the memory of attention.
constexpr std::size_t kAttentionPairsMax = 1 << 24;

model::ScoredSequence sequence_of(const TrainingRow& row) {
  return {row.tokens, row.prompt_tokens, row.mask, row.experts};
}

// Rows in the layout of the model and the loss. Tensors of the loss are [rows, width]: each row's response tokens,
// right-padded.
struct PackedRows {
  model::PackedTokens tokens;
  std::int64_t width = 0;
  torch::Tensor score_index;  // int64 [scores]: the index in [rows, width] of each score of `tokens`
  torch::Tensor behaviour, proximal, mask;
  torch::Tensor advantages;  // [rows]

  // Puts the scores of `tokens` into their places in [rows, width]; the other places are 0.
  torch::Tensor scatter(const torch::Tensor& scores) const {
    return torch::zeros({mask.numel()}, scores.options().requires_grad(false))
        .index_copy(0, score_index, scores)
        .view(mask.sizes());
  }
};

PackedRows pack(const std::vector<TrainingRow*>& rows, const model::Transformer& model) {
  const torch::Device device = model.device();
  PackedRows packed;
  std::vector<model::ScoredSequence> sequences;
  for (const TrainingRow* row : rows) {
    sequences.push_back(sequence_of(*row));
    packed.width = std::max(packed.width, std::ssize(row->mask));
  }
  packed.tokens = model::pack(sequences, device, model.config().expert_choices());
  const auto row_count = std::ssize(rows);
  packed.behaviour = torch::zeros({row_count, packed.width});
  packed.proximal = torch::zeros({row_count, packed.width});
  packed.mask = torch::zeros({row_count, packed.width});
  packed.advantages = torch::zeros({row_count});
  std::vector<std::int64_t> score_index;
  for (std::int64_t i = 0; i < row_count; ++i) {
    const TrainingRow& row = *rows[static_cast<std::size_t>(i)];
    const std::int64_t row_begin = i * packed.width;
    const auto copy_row = [row_begin](const std::vector<float>& values, torch::Tensor& target) {
      std::copy(values.begin(), values.end(), target.data_ptr<float>() + row_begin);
    };
    copy_row(row.behaviour, packed.behaviour);
    copy_row(row.proximal, packed.proximal);
    copy_row(row.mask, packed.mask);
    packed.advantages.data_ptr<float>()[i] = static_cast<float>(row.advantage);
    for (std::int64_t token = 0; token < std::ssize(row.mask); ++token)
      if (row.mask[static_cast<std::size_t>(token)] > 0) score_index.push_back(row_begin + token);
  }
  packed.score_index = torch::tensor(score_index, torch::kLong);
  for (torch::Tensor* tensor :
       {&packed.score_index, &packed.behaviour, &packed.proximal, &packed.mask, &packed.advantages})
    *tensor = model::upload(*tensor, device);
  if (rows.front()->proximal.empty()) packed.proximal = torch::Tensor();  // the loss then takes the current scores
  return packed;
}

// Cuts rows, in order, into parts of at most `tokens_max` tokens; a longer row is a part of its own. Neighbours with
// equal prompts share the prompt, whose tokens then count once.
std::vector<std::vector<TrainingRow*>> microbatches(const std::vector<TrainingRow*>& rows, std::int64_t tokens_max) {
  std::vector<std::vector<TrainingRow*>> parts;
  std::int64_t part_tokens = 0;  // of the last part
  for (TrainingRow* row : rows) {
    const model::PackedSize size = model::packed_size(sequence_of(*row));
    const bool shares_prompt =
        !parts.empty() && model::same_prompt(sequence_of(*parts.back().back()), sequence_of(*row));
    const std::int64_t added_tokens = shares_prompt ? size.without_prompt : size.with_prompt;
    if (parts.empty() || part_tokens + added_tokens > tokens_max) {
      parts.emplace_back();
      part_tokens = size.with_prompt;
    } else {
      part_tokens += added_tokens;
    }
    parts.back().push_back(row);
  }
  return parts;
}

// One trajectory's row; its advantage depends on the group, and is set later.
Result<TrainingRow> lay_out(const schema::Trajectory& trajectory, bool router_replay) {
  TrainingRow row;
  row.prompt_tokens = static_cast<std::size_t>(trajectory.prompt_tokens_size());
  row.tokens.assign(trajectory.prompt_tokens().begin(), trajectory.prompt_tokens().end());
  row.tokens.insert(row.tokens.end(), trajectory.response_tokens().begin(), trajectory.response_tokens().end());
  row.behaviour.assign(trajectory.logprobs().begin(), trajectory.logprobs().end());
  row.worker = WorkerId{trajectory.worker()};
  row.mask.assign(row.behaviour.size(), 1.0f);
  if (trajectory.loss_mask_size() != 0) row.mask.assign(trajectory.loss_mask().begin(), trajectory.loss_mask().end());
  if (router_replay) {
    ECHO_ASSIGN(auto experts, data_plane::unpack_experts(trajectory.routed_experts(), row.tokens.size()));
    row.experts = std::move(experts.values);
  }
  return row;
}

std::int64_t counted_tokens(const TrainingRow& row) {
  return static_cast<std::int64_t>(
      std::count_if(row.mask.begin(), row.mask.end(), [](float weight) { return weight > 0; }));
}

// Returns the rows by group, in order of group id, with their advantages. Fills in the figures of `report` that are
// known before training.
Result<Groups> lay_out(const std::vector<schema::Trajectory>& batch, const model::ModelConfig& shape,
                       const TrainerConfig& config, StepReport& report) {
  if (batch.empty()) return fail(Code::kInvalid, "learner step", "the batch is empty, expected whole groups");
  std::map<std::uint64_t, std::vector<const schema::Trajectory*>> members;
  for (const schema::Trajectory& trajectory : batch) members[trajectory.group()].push_back(&trajectory);
  Groups groups;
  double reward_sum = 0, correct = 0, truncated = 0;
  for (const auto& [id, group] : members) {
    std::vector<double> rewards, lengths;
    groups.emplace_back();
    for (const schema::Trajectory* trajectory : group) {
      ECHO_TRY(check_trainable(*trajectory, shape));
      ECHO_ASSIGN(TrainingRow laid_out, lay_out(*trajectory, config.router_replay));
      TrainingRow& row = groups.back().emplace_back(std::move(laid_out));
      if (config.truncated == Truncated::kMask && !trajectory->finished()) row.mask.assign(row.mask.size(), 0.0f);
      lengths.push_back(static_cast<double>(counted_tokens(row)));
      const bool is_penalised = config.truncated == Truncated::kPenalty && !trajectory->finished();
      rewards.push_back(trajectory->reward() - (is_penalised ? config.truncated_penalty : 0));
    }
    auto advantages = group_advantages(rewards, rewards.size(), config.loss, lengths);
    if (!advantages) return fail(Code::kInvalid, "learner step", "group {}: {}", id, advantages.error().detail);
    for (std::size_t i = 0; i < group.size(); ++i) {
      groups.back()[i].advantage = (*advantages)[i];
      truncated += group[i]->finished() ? 0 : 1;
      reward_sum += group[i]->reward();
      correct += group[i]->correct() ? 1 : 0;
    }
  }
  const auto trajectories = static_cast<double>(batch.size());
  report.trajectories = static_cast<std::int64_t>(batch.size());
  report.groups = static_cast<std::int64_t>(groups.size());
  report.reward_mean = reward_sum / trajectories;
  report.accuracy = correct / trajectories;
  report.truncated_fraction = truncated / trajectories;
  return groups;
}

bool is_informative(const TrainingRow& row) { return row.advantage != 0; }

// Scrutiny figures of some rows, left on their device so that the CPU need not wait.
struct ScrutinyFigures {
  std::vector<TrainingRow*> rows;
  torch::Tensor figures;  // [2, rows]: surprise and dispute (credibility.hpp), means over a row's tokens
};

ScrutinyFigures compute_scrutiny(const std::vector<TrainingRow*>& part, const PackedRows& packed,
                                 const model::TokenScores& scores) {
  torch::NoGradGuard no_gradient;
  const torch::Tensor counted = (packed.mask > 0).to(torch::kFloat), tokens = counted.sum(1);
  const torch::Tensor logprobs = packed.scatter(scores.logprobs), entropy = packed.scatter(scores.entropy);
  const auto mean = [&](const torch::Tensor& values) { return (values * counted).sum(1) / tokens; };
  return {part, torch::stack({mean(-logprobs - entropy), mean((logprobs - packed.behaviour).abs())})};
}

// Adds the figures of scrutinised rows to those of their workers.
void add_scrutiny(const std::vector<ScrutinyFigures>& scrutinies, std::map<WorkerId, Scrutiny>& by_worker) {
  for (const ScrutinyFigures& part_scrutiny : scrutinies) {
    const torch::Tensor figures = part_scrutiny.figures.to(torch::kCPU, torch::kDouble).contiguous();
    const auto* const surprise = figures.data_ptr<double>();
    const auto* const dispute = surprise + part_scrutiny.rows.size();
    for (std::size_t i = 0; i < part_scrutiny.rows.size(); ++i) {
      if (!part_scrutiny.rows[i]->is_scrutinised) continue;
      Scrutiny& worker_scrutiny = by_worker[part_scrutiny.rows[i]->worker];
      ++worker_scrutiny.responses;
      worker_scrutiny.surprise += surprise[i];
      worker_scrutiny.dispute += dispute[i];
    }
  }
}

// A Fisher-Yates shuffle. Unlike std::shuffle, it gives the same order with every standard library.
void shuffle(std::vector<std::size_t>& order, Random& random) {
  for (std::size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random.below(i)]);
}

}  // namespace

Status validate(const TrainerConfig& config) {
  ECHO_TRY(validate(config.loss));
  ECHO_TRY(validate(config.optimizer));
  const auto out_of_range = [](const char* name, const char* expected, auto value) {
    return fail(Code::kInvalid, "trainer settings", "{} must be {}, found {}", name, expected, value);
  };
  if (!(config.temperature > 0)) return out_of_range("temperature", "above 0", config.temperature);
  if (config.minibatches < 1) return out_of_range("minibatches", "at least 1", config.minibatches);
  if (config.passes < 1) return out_of_range("passes", "at least 1", config.passes);
  if (!(config.truncated_penalty >= 0))
    return out_of_range("truncated_penalty", "at least 0", config.truncated_penalty);
  if (config.microbatch_tokens < 1) return out_of_range("microbatch_tokens", "at least 1", config.microbatch_tokens);
  return ok();
}

NamedParameters named_parameters(model::Transformer& model) {
  NamedParameters parameters;
  for (const auto& item : model.named_parameters())
    if (item.value().requires_grad()) parameters.emplace_back(item.key(), item.value());
  return parameters;
}

Result<std::unique_ptr<Trainer>> Trainer::create(std::shared_ptr<model::Transformer> model, const TrainerConfig& config,
                                                 std::shared_ptr<model::Transformer> reference) {
  ECHO_TRY(validate(config));
  ECHO_CHECK(model != nullptr, "a trainer needs a model");
  if (config.loss.kl_coefficient > 0 && reference == nullptr)
    return fail(Code::kInvalid, "trainer settings", "kl_coefficient is {} but there is no reference policy",
                config.loss.kl_coefficient);
  return std::unique_ptr<Trainer>(new Trainer(std::move(model), config, std::move(reference)));
}

Trainer::Trainer(std::shared_ptr<model::Transformer> model, const TrainerConfig& config,
                 std::shared_ptr<model::Transformer> reference)
    : config_(config),
      model_(std::move(model)),
      reference_(config.loss.kl_coefficient > 0 ? std::move(reference) : nullptr),
      optimizer_(named_parameters(*model_), config.optimizer) {}

Result<delta::OwnedState> Trainer::policy() const { return model::export_policy(*model_); }

// Chooses the same number of rows of each worker, newly at every step and including rows without a gradient, and scores
// them. Rows in `trained` are skipped: the first update scores them anyway, with the same arithmetic.
std::map<WorkerId, Scrutiny> Trainer::scrutinise(Groups& groups, std::int64_t step,
                                                 const std::vector<TrainingRow*>& trained) {
  std::map<WorkerId, std::vector<TrainingRow*>> rows_by_worker;
  std::size_t row_count = 0;
  for (auto& group : groups)
    for (TrainingRow& row : group)
      if (counted_tokens(row) > 0) {
        rows_by_worker[row.worker].push_back(&row);
        ++row_count;
      }
  Random random(config_.scrutiny_seed, static_cast<std::uint64_t>(step));
  for (auto& [worker, rows] : rows_by_worker) {
    const std::size_t rows_per_worker =
        std::max(kScrutinisedMin, row_count / kScrutinisedDivisor) / rows_by_worker.size();
    // Draws at least one row, without replacement.
    for (std::size_t k = 0; k < std::min(rows.size(), std::max<std::size_t>(1, rows_per_worker)); ++k) {
      std::swap(rows[k], rows[k + random.below(rows.size() - k)]);
      rows[k]->is_scrutinised = true;
    }
  }
  const std::set<const TrainingRow*> scored_by_update(trained.begin(), trained.end());
  std::vector<TrainingRow*> rows_to_score;
  for (auto& group : groups)
    for (TrainingRow& row : group)
      if (row.is_scrutinised && !scored_by_update.contains(&row)) rows_to_score.push_back(&row);
  torch::NoGradGuard no_gradient;
  std::vector<ScrutinyFigures> scrutinies;
  for (const auto& part : microbatches(rows_to_score, config_.microbatch_tokens)) {
    PackedRows packed = pack(part, *model_);
    // The model chooses its own experts here. Otherwise a worker could choose experts that make its tokens likely.
    packed.tokens.experts = torch::Tensor();
    scrutinies.push_back(compute_scrutiny(part, packed, model_->packed_logprobs(packed.tokens, config_.temperature)));
  }
  std::map<WorkerId, Scrutiny> by_worker;
  add_scrutiny(scrutinies, by_worker);
  return by_worker;
}

void Trainer::record_proximal(const std::vector<TrainingRow*>& rows) {
  torch::NoGradGuard no_gradient;
  for (const auto& part : microbatches(rows, config_.microbatch_tokens)) {
    const PackedRows packed = pack(part, *model_);
    const torch::Tensor scores =
        packed.scatter(model_->packed_logprobs(packed.tokens, config_.temperature, /*as_trained=*/true).logprobs)
            .to(torch::kCPU)
            .contiguous();
    for (std::size_t i = 0; i < part.size(); ++i) {
      TrainingRow& row = *part[i];
      const float* first = scores.data_ptr<float>() + static_cast<std::int64_t>(i) * packed.width;
      row.proximal.assign(first, first + row.mask.size());
    }
  }
}

UpdateReport Trainer::update(const std::vector<TrainingRow*>& rows, MinibatchSize minibatch, LossStatistics& statistics,
                             double& loss, std::map<WorkerId, Scrutiny>* scrutiny) {
  // Figures are read after the whole update is queued, because a read waits for the device.
  std::vector<ScrutinyFigures> scrutinies;
  std::vector<torch::Tensor> figures;
  for (const auto& part : microbatches(rows, config_.microbatch_tokens)) {
    const PackedRows packed = pack(part, *model_);
    const model::TokenScores scores = model_->packed_logprobs(packed.tokens, config_.temperature);
    if (scrutiny != nullptr) scrutinies.push_back(compute_scrutiny(part, packed, scores));
    LossInputs inputs{.log_probs = packed.scatter(scores.logprobs),
                      .proximal_log_probs = packed.proximal,
                      .behaviour_log_probs = packed.behaviour,
                      .reference_log_probs = {},
                      .advantages = packed.advantages,
                      .mask = packed.mask};
    if (reference_ != nullptr) {
      torch::NoGradGuard no_gradient;
      model::PackedTokens tokens = packed.tokens;
      tokens.experts = torch::Tensor();  // the reference policy chooses its own
      inputs.reference_log_probs =
          packed.scatter(reference_->packed_logprobs(tokens, config_.temperature, /*as_trained=*/true).logprobs);
    }
    const LossResult result = policy_loss(inputs, minibatch, config_.loss);
    result.loss.backward();
    optimizer_.gather_gradients();
    // The sums of the loss, then that of the entropy, then the loss itself.
    figures.push_back(torch::cat({result.sums, torch::stack({scores.entropy.sum(), result.loss.detach()})}));
  }
  const UpdateReport report = optimizer_.step();
  for (const torch::Tensor& part_figures : figures) {
    const torch::Tensor on_cpu = part_figures.to(torch::kCPU, torch::kDouble);
    const auto* const sums = on_cpu.data_ptr<double>();
    LossStatistics part = statistics_of(sums);
    part.entropy_sum = sums[kLossSums];
    statistics += part;
    loss += sums[kLossSums + 1];
  }
  if (scrutiny != nullptr) add_scrutiny(scrutinies, *scrutiny);
  return report;
}

Result<StepReport> Trainer::step(const std::vector<schema::Trajectory>& batch) try {
  StepReport report;
  ECHO_ASSIGN(Groups groups, lay_out(batch, model_->config(), config_, report));
  report.step = steps_ + 1;

  // A group with equal rewards has no gradient, unless a reference policy adds one. It counts in the denominators of
  // the loss, but is not computed.
  const auto needs_gradient = [&](const TrainingRow& row) {
    return counted_tokens(row) > 0 && (is_informative(row) || reference_ != nullptr);
  };
  std::vector<TrainingRow*> trained;
  for (auto& group : groups) {
    report.informative_groups += std::any_of(group.begin(), group.end(), is_informative) ? 1 : 0;
    for (TrainingRow& row : group) {
      report.response_tokens += counted_tokens(row);
      if (needs_gradient(row)) trained.push_back(&row);
    }
  }
  // The first update's scores serve for scrutiny as well, unless their arithmetic differs: without gradients, a CPU
  // scores bf16 parameters in fp32, and scrutiny replays no experts.
  const bool same_arithmetic = model_->dtype() == torch::kFloat || !model_->device().is_cpu();
  const bool replays =
      std::any_of(trained.begin(), trained.end(), [](const auto* row) { return !row->experts.empty(); });
  const bool update_scores_rows = config_.minibatches == 1 && same_arithmetic && !replays;
  report.scrutiny = scrutinise(groups, report.step, update_scores_rows ? trained : std::vector<TrainingRow*>());
  const bool several_updates = config_.minibatches > 1 || config_.passes > 1;
  if (several_updates && needs_proximal(config_.loss) && !trained.empty()) record_proximal(trained);

  // Every pass cuts a new random order of the groups into minibatches.
  LossStatistics statistics;
  const auto minibatches = static_cast<std::size_t>(config_.minibatches);
  Random random(config_.seed, static_cast<std::uint64_t>(report.step));
  std::vector<std::size_t> order(groups.size());
  std::iota(order.begin(), order.end(), 0);
  for (std::int64_t pass = 0; pass < config_.passes; ++pass) {
    shuffle(order, random);
    for (std::size_t minibatch = 0; minibatch < minibatches; ++minibatch) {
      MinibatchSize size;
      std::vector<TrainingRow*> rows;
      const std::size_t groups_begin = minibatch * order.size() / minibatches;
      const std::size_t groups_end = (minibatch + 1) * order.size() / minibatches;
      for (std::size_t k = groups_begin; k < groups_end; ++k) {
        for (TrainingRow& row : groups[order[k]]) {
          ++size.sequences;
          size.tokens += counted_tokens(row);
          if (needs_gradient(row)) rows.push_back(&row);
        }
      }
      if (rows.empty()) continue;
      const bool scores_rows = update_scores_rows && pass == 0;
      const UpdateReport update_report =
          update(rows, size, statistics, report.loss, scores_rows ? &report.scrutiny : nullptr);
      std::int64_t& update_count = update_report.applied ? report.updates : report.updates_skipped;
      ++update_count;
      report.gradient_norm += update_report.gradient_norm;
      report.learning_rate = update_report.learning_rate;
    }
  }
  const double updates = static_cast<double>(std::max<std::int64_t>(1, report.updates + report.updates_skipped));
  const double tokens = std::max(1.0, statistics.tokens);
  report.loss /= updates;
  report.gradient_norm /= updates;
  report.ratio_mean = statistics.ratio_sum / tokens;
  if (statistics.ratio_square_sum > 0)
    report.effective_sample_fraction =
        statistics.ratio_sum * statistics.ratio_sum / (tokens * statistics.ratio_square_sum);
  report.clip_fraction = statistics.clipped / tokens;
  report.capped_fraction = statistics.capped / tokens;
  report.behaviour_kl = statistics.behaviour_kl_sum / tokens;
  report.reference_kl = statistics.reference_kl_sum / tokens;
  report.entropy = statistics.entropy_sum / tokens;
  steps_ = report.step;
  return report;
} catch (const std::exception& error) {
  optimizer_.clear_gradients();
  return fail(Code::kInternal, "learner step", "{}", error.what());
}

namespace {

// The response to a problem of an evaluation, so far.
struct Attempt {
  std::unique_ptr<data_plane::Episode> episode;
  std::vector<model::Token> tokens;  // prompt, turns, and the task's texts between them
  std::size_t prompt_tokens = 0;
  std::size_t turns = 0;          // so far
  std::size_t problem_index = 0;  // in the evaluation's problems
  data_plane::Score score;
};

// Passes each attempt's turn, a text, to its task. The tasks work in parallel; returns their answers in order.
std::vector<Result<data_plane::Step>> step_all(std::span<Attempt* const> attempts, std::vector<std::string> texts) {
  std::mutex mutex;
  std::condition_variable done_signal;
  std::vector<std::optional<Result<data_plane::Step>>> steps(attempts.size());
  std::size_t unanswered = attempts.size();
  for (std::size_t i = 0; i < attempts.size(); ++i)
    attempts[i]->episode->step(std::move(texts[i]), [&, i](Result<data_plane::Step> step) {
      const std::lock_guard lock(mutex);
      steps[i] = std::move(step);
      if (--unanswered == 0) done_signal.notify_one();
    });
  std::unique_lock lock(mutex);
  done_signal.wait(lock, [&] { return unanswered == 0; });
  std::vector<Result<data_plane::Step>> answers;
  for (auto& step : steps) answers.push_back(*std::move(step));
  return answers;
}

}  // namespace

Result<Evaluation> evaluate(model::Transformer& model, const model::Phrasing& phrasing,
                            const data_plane::Adapter& adapter, const std::vector<schema::Problem>& problems,
                            const EvaluationOptions& options) {
  if (problems.empty()) return fail(Code::kInvalid, "evaluate", "there are no problems to evaluate on");
  if (options.batch_rows < 1)
    return fail(Code::kInvalid, "evaluate", "batch_rows must be at least 1, found {}", options.batch_rows);
  Evaluation evaluation;
  std::deque<Attempt> attempts;  // a problem without an attempt counts as wrong
  const std::int64_t prompt_tokens_max = model.config().positions_max - options.response_tokens_max;
  const bool has_several_tasks = adapter.name() == data_plane::kSeveralTasksAdapter;
  for (std::size_t i = 0; i < problems.size(); ++i) {
    auto prompt = phrasing.prompt(data_plane::prompt_of(problems[i]));
    if (!prompt || prompt->empty() || std::ssize(*prompt) > prompt_tokens_max) {
      if (has_several_tasks) evaluation.by_task.add(problems[i].id(), /*correct=*/false, /*reward=*/0);
      continue;
    }
    ECHO_ASSIGN(auto episode, adapter.begin(problems[i], data_plane::episode_seed(options.seed, i, 0)));
    const std::size_t prompt_tokens = prompt->size();
    attempts.push_back({.episode = std::move(episode),
                        .tokens = *std::move(prompt),
                        .prompt_tokens = prompt_tokens,
                        .turns = 0,
                        .problem_index = i,
                        .score = {}});
  }
  if (attempts.empty())
    return fail(Code::kInvalid, "evaluate",
                "none of the {} problems can be put to the model and leaves room for {} tokens", problems.size(),
                options.response_tokens_max);
  evaluation.problems = std::ssize(problems);
  std::deque<Attempt*> waiting;  // wait for the model
  for (Attempt& attempt : attempts) waiting.push_back(&attempt);
  for (std::uint64_t turns_generated = 0; !waiting.empty();) {
    std::vector<Attempt*> batch;
    std::vector<std::vector<model::Token>> prompts;
    std::size_t longest_tokens = 0;
    std::int64_t batch_tokens_max = options.response_tokens_max;
    const auto tokens_left_for = [&](const Attempt& attempt) {
      const std::int64_t tokens_left =
          options.response_tokens_max - std::ssize(attempt.tokens) + static_cast<std::int64_t>(attempt.prompt_tokens);
      return options.turn_tokens_max > 0 ? std::min(tokens_left, options.turn_tokens_max) : tokens_left;
    };
    // Fills a batch with one or more attempts that have the same number of tokens left, because generate() has one
    // limit for all.
    while (!waiting.empty()) {
      Attempt* attempt = waiting.front();
      longest_tokens = std::max(longest_tokens, attempt->tokens.size());
      const std::size_t rows = prompts.size() + 1;
      if (rows > 1 && (rows > static_cast<std::size_t>(options.batch_rows) ||
                       rows * longest_tokens * longest_tokens > kAttentionPairsMax ||
                       tokens_left_for(*attempt) != batch_tokens_max))
        break;
      batch_tokens_max = tokens_left_for(*attempt);
      waiting.pop_front();
      batch.push_back(attempt);
      prompts.push_back(attempt->tokens);
    }
    model::Sampling sampling;
    sampling.temperature = options.temperature;
    sampling.tokens_max = batch_tokens_max;
    sampling.eos = phrasing.eos();
    sampling.seed = mix64(options.seed) + turns_generated;  // another seed for every batch
    ECHO_ASSIGN(const auto generations, model::generate(model, prompts, sampling, options.interrupted));
    if (options.interrupted && options.interrupted())
      return fail(Code::kCancelled, "evaluate", "stopped after {} of {} turns", turns_generated,
                  turns_generated + waiting.size() + batch.size());
    turns_generated += batch.size();
    std::vector<std::string> texts;
    for (const model::Generation& generation : generations) texts.push_back(phrasing.answer(generation.tokens));
    auto steps = step_all(batch, std::move(texts));
    for (std::size_t i = 0; i < batch.size(); ++i) {
      if (!steps[i]) return std::move(steps[i]).error();
      if (steps[i]->side_prompt) return data_plane::side_prompt_error();
      Attempt& attempt = *batch[i];
      attempt.tokens.insert(attempt.tokens.end(), generations[i].tokens.begin(), generations[i].tokens.end());
      data_plane::add(attempt.score, steps[i]->score);
      if (!steps[i]->done) {
        ECHO_ASSIGN(const auto observation_tokens, phrasing.follow_up(attempt.tokens, steps[i]->observation));
        attempt.tokens.insert(attempt.tokens.end(), observation_tokens.begin(), observation_tokens.end());
        // The task goes on. The attempt gets another turn, or is cut here.
        if (tokens_left_for(attempt) > 0 && ++attempt.turns < data_plane::kTurnsMax) {
          waiting.push_back(&attempt);
          continue;
        }
        data_plane::add(attempt.score, attempt.episode->cut());
      }
      evaluation.correct += attempt.score.correct ? 1 : 0;
      evaluation.reward_mean += attempt.score.reward;
      for (const auto& [name, value] : attempt.score.components) evaluation.components[name] += value;
      if (has_several_tasks)
        evaluation.by_task.add(problems[attempt.problem_index].id(), attempt.score.correct, attempt.score.reward);
    }
  }
  const auto problem_count = static_cast<double>(evaluation.problems);
  evaluation.reward_mean /= problem_count;
  for (auto& [name, value] : evaluation.components) value /= problem_count;
  return evaluation;
}

}  // namespace echoline::learner

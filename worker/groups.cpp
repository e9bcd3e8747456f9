// Turns leases into sequences, and responses into submissions. The agent calls it.
#include "worker/groups.hpp"

#include <algorithm>

#include "base/log.hpp"
#include "base/random.hpp"
#include "data_plane/policy_input.hpp"
#include "data_plane/trajectory.hpp"
#include "model/response_end.hpp"

namespace echoline::worker {
namespace {

constexpr std::size_t kDetailBytesMax = 1024;  // of WorkFailed::detail
// Limit on the packed experts of all members: half of the largest message. Members beyond it go without experts, and
// the trainer routes their tokens itself.
constexpr std::size_t kSubmissionExpertBytesMax = 32u << 20;

// Logs the failure and returns the message about it.
schema::WorkFailed failure(const schema::Lease& lease, schema::WorkFailure kind, std::string detail) {
  log::warn("lease {}, problem '{}': {}", lease.id(), lease.problem().id(), detail);
  detail.resize(std::min(detail.size(), kDetailBytesMax));
  schema::WorkFailed failed;
  failed.set_lease(lease.id());
  failed.set_failure(kind);
  failed.set_detail(std::move(detail));
  return failed;
}

// The settings of a lease whose prompt a client chose.
SequenceSampling sequence_sampling(const schema::Sampling& sampling, const model::Phrasing& phrasing) {
  SequenceSampling settings{.temperature = sampling.temperature(),
                            .top_p = sampling.top_p(),
                            .top_k = sampling.top_k(),
                            .end_tokens = {sampling.end_tokens().begin(), sampling.end_tokens().end()},
                            .ends = {}};
  if (!sampling.stop().empty())
    settings.ends = [tokenizer = phrasing.tokenizer(),
                     stops = std::vector<std::string>(sampling.stop().begin(), sampling.stop().end())](
                        std::span<const model::Token> response) {
      const std::size_t tokens_checked = response.size() - 1;  // called after each token, so only the newest is new
      return model::response_end(tokenizer, response, /*ends=*/{}, stops, tokens_checked).has_value();
    };
  return settings;
}

// The environment of a group that the learner scores: a single turn without a score.
class LearnerScoredEpisode final : public data_plane::QuickEpisode {
 public:
  Result<data_plane::Step> step_now(std::string_view) override { return data_plane::Step{}; }
};

Result<std::unique_ptr<data_plane::Episode>> episode_of(const Task& task, const schema::Lease& lease,
                                                        std::uint32_t member_number) {
  if (lease.unscored()) return std::unique_ptr<data_plane::Episode>(std::make_unique<LearnerScoredEpisode>());
  if (!task.adapter)
    return fail(Code::kInvalid, "task", "the worker must score '{}', but the run sends workers no task",
                lease.problem().id());
  return task.adapter->begin(lease.problem(), data_plane::episode_seed(task.spec.seed(), lease.group(), member_number));
}

// The kind of failure for an engine's error about a sequence. If the policy caused the error, the caller uses
// WORK_FAILURE_GENERATION instead.
schema::WorkFailure failure_kind(const Error& error) {
  if (error.code == Code::kExhausted) return schema::WORK_FAILURE_MEMORY;
  return error.code == Code::kInvalid ? schema::WORK_FAILURE_PROMPT : schema::WORK_FAILURE_UNKNOWN;
}

}  // namespace

Result<Task> make_task(schema::RunSpec spec) {
  Task task;
  // kCarry: the worker need not compute the model itself, because an engine may do so.
  ECHO_ASSIGN(task.model, model::ModelConfig::from_json(spec.model_config_json(), model::ModelUse::kCarry));
  if (!spec.policy_adapter_json().empty()) {
    ECHO_ASSIGN(task.model.adapter, model::AdapterConfig::from_json(spec.policy_adapter_json()));
  }
  ECHO_ASSIGN(model::Tokenizer tokenizer, model::Tokenizer::from_json(spec.tokenizer_json()));
  ECHO_ASSIGN(task.phrasing, model::Phrasing::from_parts(std::move(tokenizer), {spec.eos().begin(), spec.eos().end()},
                                                         spec.prompt_json()));
  if (!spec.adapter_name().empty()) {
    ECHO_ASSIGN(task.adapter, data_plane::make_adapter(spec.adapter_name(), spec.adapter_config_json(), spec.seed(),
                                                       data_plane::AdapterUse::kScoring));
  }
  task.spec = std::move(spec);
  return task;
}

LeaseResult submission_or_failure(const schema::Lease& lease, schema::Submission submission, Bytes metadata_max) {
  for (const schema::Trajectory& trajectory : submission.trajectories())
    if (const Status fits = data_plane::check_metadata_size(trajectory, metadata_max); !fits)
      return failure(lease, schema::WORK_FAILURE_SIZE, fits.error().detail);
  return submission;
}

Groups::Groups(const Task& task, WorkerId worker, std::function<void()> wake)
    : task_(task), worker_(worker), answers_(std::make_shared<Answers>()) {
  answers_->wake = std::move(wake);
}

std::variant<std::vector<Sequence>, schema::WorkFailed> Groups::begin(schema::Lease lease, TimePoint now) {
  Result<std::vector<model::Token>> prompt = std::vector<model::Token>();
  if (lease.has_sampling())  // a client has chosen the prompt
    prompt->assign(lease.sampling().prompt_tokens().begin(), lease.sampling().prompt_tokens().end());
  else
    prompt = task_.phrasing->prompt(data_plane::prompt_of(lease.problem()));
  if (!prompt) return failure(lease, schema::WORK_FAILURE_PROMPT, prompt.error().message());
  Group group;
  for (std::uint32_t member_number = 0; member_number < lease.rollouts(); ++member_number) {
    auto episode = episode_of(task_, lease, member_number);
    if (!episode) return failure(lease, schema::WORK_FAILURE_SCORING, episode.error().message());
    group.members.emplace_back().episode = *std::move(episode);
  }
  group.begun = now;
  group.members_unfinished = lease.rollouts();
  group.prompt = std::move(*prompt);
  const std::uint64_t lease_id = lease.id();
  group.lease = std::move(lease);
  groups_[lease_id] = std::move(group);
  std::vector<Sequence> sequences;
  for (std::size_t member_number = 0; member_number < groups_[lease_id].members.size(); ++member_number)
    sequences.push_back(next_turn(lease_id, member_number));
  return sequences;
}

std::int64_t Groups::tokens_left(const Member& member) const {
  return std::int64_t{task_.spec.response_tokens_max()} - std::ssize(member.tokens);
}

Sequence Groups::next_turn(std::uint64_t lease_id, std::size_t member_number) {
  const Group& group = groups_.at(lease_id);
  const Member& member = group.members[member_number];
  Sequence sequence{.id = next_sequence_id_++,
                    .prompt = group.prompt,
                    .tokens_max = tokens_left(member),
                    .seed = mix64(task_.spec.seed() ^ (mix64(lease_id) + member_number))};
  // Later turns have other seeds, so that they draw other random numbers. A seed depends only on run, lease, member and
  // the number of turns and side prompts before.
  const bool is_side_prompt = !member.side_prompt.empty();  // it is counted already
  const std::size_t turns_before = member.turns + member.side_prompts - (is_side_prompt ? 1 : 0);
  if (turns_before > 0) sequence.seed = mix64(sequence.seed + turns_before);
  if (!is_side_prompt) {  // the conversation goes on
    sequence.prompt.insert(sequence.prompt.end(), member.tokens.begin(), member.tokens.end());
  } else {  // the answer is not a part of the response, so the limit is not tokens_left()
    sequence.prompt = member.side_prompt;
    sequence.tokens_max = std::min<std::int64_t>(task_.spec.response_tokens_max(),
                                                 task_.model.positions_max - std::ssize(member.side_prompt));
  }
  if (group.lease.has_sampling()) {
    const schema::Sampling& sampling = group.lease.sampling();
    sequence.tokens_max = std::min<std::int64_t>(sequence.tokens_max, sampling.tokens_max());
    sequence.seed = mix64(sampling.seed() + member_number);  // the client's choice, whatever the lease's number
    sequence.sampling = sequence_sampling(sampling, *task_.phrasing);
  } else if (task_.spec.turn_tokens_max() > 0) {  // 0: no limit
    sequence.tokens_max = std::min<std::int64_t>(sequence.tokens_max, task_.spec.turn_tokens_max());
  }
  sequences_[sequence.id] = {.lease_id = lease_id, .member_number = member_number};
  return sequence;
}

// Appends a turn that the policy generated. Adjacent spans of one version become one.
void Groups::append_turn(Member& member, const Response& turn) {
  const std::size_t tokens_before = member.tokens.size();
  for (const Span& span : turn.spans) {
    if (!member.spans.empty() && member.spans.back().version == span.version) member.spans.pop_back();
    member.spans.push_back({span.version, tokens_before + span.end});
  }
  member.tokens.insert(member.tokens.end(), turn.tokens.begin(), turn.tokens.end());
  // Rounding in the engine may give a value just above 0.
  for (const float logprob : turn.logprobs) member.logprobs.push_back(std::min(logprob, 0.0f));
  member.sampled.resize(member.tokens.size(), true);
  data_plane::extend(member.experts, turn.experts);
  member.ended_by_itself = turn.ended;
  ++member.turns;
}

void Groups::on_outcome(Outcome outcome) {
  const auto state = sequences_.find(outcome.id);
  if (state == sequences_.end()) return;  // the sequence was abandoned
  const std::uint64_t lease_id = state->second.lease_id;
  Group& group = groups_.at(lease_id);
  if (!outcome.response) {
    const Error& error = outcome.response.error();
    const schema::WorkFailure kind = outcome.caused_by_policy ? schema::WORK_FAILURE_GENERATION : failure_kind(error);
    sequences_.erase(state);
    return end_group(lease_id, failure(group.lease, kind, error.message()));
  }
  state->second.in_environment = true;
  Member& member = group.members[state->second.member_number];
  Response& turn = *outcome.response;
  std::string text = task_.phrasing->answer(turn.tokens);
  if (member.side_prompt.empty())
    append_turn(member, turn);
  else
    member.side_prompt.clear();  // the text of another player goes to the environment, and is not trained on
  const auto on_answer = [answers = answers_, id = outcome.id](Result<data_plane::Step> step) {
    bool is_first = false;
    {
      const std::lock_guard lock(answers->mutex);
      is_first = answers->steps.empty();
      answers->steps.emplace_back(id, std::move(step));
    }
    if (is_first && answers->wake) answers->wake();  // one wake is enough: advance() takes all answers
  };
  // Tasks return errors, but a library below one may throw, and that must not end the worker.
  try {
    member.episode->step(std::move(text), on_answer);
  } catch (const std::exception& error) {
    sequences_.erase(outcome.id);
    end_group(lease_id, failure(group.lease, schema::WORK_FAILURE_SCORING, error.what()));
  }
}

Groups::Advance Groups::advance() {
  std::vector<std::pair<std::uint64_t, Result<data_plane::Step>>> steps;
  {
    const std::lock_guard lock(answers_->mutex);
    steps.swap(answers_->steps);
  }
  Advance advance;
  for (auto& [id, step] : steps) {
    const auto sequence = sequences_.find(id);
    if (sequence == sequences_.end()) continue;  // its group has ended meanwhile
    const SequenceState state = sequence->second;
    sequences_.erase(sequence);
    Group& group = groups_.at(state.lease_id);
    Member& member = group.members[state.member_number];
    const Result<bool> has_next_turn =
        step ? continue_member(member, *std::move(step)) : Result<bool>(std::move(step).error());
    if (!has_next_turn)
      end_group(state.lease_id, failure(group.lease, schema::WORK_FAILURE_SCORING, has_next_turn.error().message()));
    else if (*has_next_turn)
      advance.next.push_back(next_turn(state.lease_id, state.member_number));
    else if (--group.members_unfinished == 0)
      end_group(state.lease_id, /*failed=*/std::nullopt);
  }
  advance.ended = std::exchange(ended_groups_, {});
  // Drops next turns whose group failed later in this call. The engine never got these turns, so it need not abort
  // them.
  std::erase_if(advance.next, [&](const Sequence& sequence) {
    if (sequences_.contains(sequence.id)) return false;
    for (Ended& ended : advance.ended) std::erase(ended.abandoned, sequence.id);
    return true;
  });
  return advance;
}

Result<bool> Groups::continue_member(Member& member, data_plane::Step step) const {
  data_plane::add(member.score, step.score);
  if (step.done) return false;
  // At a limit on turns or tokens, the environment scores the unfinished episode. Returns that the member has ended.
  const auto end_early = [&] {
    data_plane::add(member.score, member.episode->cut());
    member.ended_by_itself = false;
    return false;
  };
  if (step.side_prompt) {
    if (++member.side_prompts >= data_plane::kTurnsMax) return end_early();  // the limit on turns holds for these, too
    ECHO_ASSIGN(member.side_prompt, task_.phrasing->prompt(*step.side_prompt));
    if (member.side_prompt.empty() || std::ssize(member.side_prompt) >= task_.model.positions_max)
      return fail(Code::kInvalid, "task", "the side prompt has {} tokens, expected 1 to {}", member.side_prompt.size(),
                  task_.model.positions_max - 1);
    return true;
  }
  ECHO_ASSIGN(const auto observation_tokens, task_.phrasing->follow_up(member.tokens, step.observation));
  if (observation_tokens.empty()) return fail(Code::kInvalid, "task", "an observation without tokens");
  const bool leaves_no_next_turn = tokens_left(member) <= std::ssize(observation_tokens);  // not even one token
  if (leaves_no_next_turn || member.turns >= data_plane::kTurnsMax) return end_early();
  member.tokens.insert(member.tokens.end(), observation_tokens.begin(), observation_tokens.end());
  member.logprobs.resize(member.tokens.size(), 0.0f);
  member.sampled.resize(member.tokens.size(), false);
  member.spans.back().end = member.tokens.size();  // spans cover all tokens; an observation belongs to the one before
  return true;
}

void Groups::end_group(std::uint64_t lease_id, std::optional<schema::WorkFailed> failed) {
  const Group& group = groups_.at(lease_id);
  LeaseResult result =
      failed ? LeaseResult(*std::move(failed))
             : submission_or_failure(group.lease, submission(group), Bytes{task_.spec.metadata_bytes_max()});
  Ended ended{.begun = group.begun, .result = std::move(result), .abandoned = {}};
  ended.abandoned = remove_group(lease_id);  // `group` is gone from here on
  ended_groups_.push_back(std::move(ended));
}

std::vector<std::uint64_t> Groups::lease_ids() const {
  std::vector<std::uint64_t> ids;
  for (const auto& [lease_id, group] : groups_) ids.push_back(lease_id);
  return ids;
}

std::size_t Groups::rollouts() const {
  std::size_t count = 0;
  for (const auto& [lease_id, group] : groups_) count += group.members.size();
  return count;
}

std::size_t Groups::rollouts_in_environment() const {
  return static_cast<std::size_t>(std::count_if(sequences_.begin(), sequences_.end(),
                                                [](const auto& sequence) { return sequence.second.in_environment; }));
}

std::vector<std::uint64_t> Groups::drop_all() {
  std::vector<std::uint64_t> sequences_in_engine;
  for (const auto& [id, state] : sequences_)
    if (!state.in_environment) sequences_in_engine.push_back(id);
  sequences_.clear();
  groups_.clear();
  return sequences_in_engine;
}

std::vector<std::uint64_t> Groups::remove_group(std::uint64_t lease_id) {
  std::vector<std::uint64_t> sequences_in_engine;
  std::erase_if(sequences_, [&](const auto& sequence) {
    if (sequence.second.lease_id != lease_id) return false;
    if (!sequence.second.in_environment) sequences_in_engine.push_back(sequence.first);
    return true;
  });
  groups_.erase(lease_id);
  return sequences_in_engine;
}

std::string Groups::packed_experts(const Group& group, const Member& member, std::size_t bytes_max) {
  data_plane::RoutedExperts experts = member.experts;
  const std::size_t tokens = group.prompt.size() + member.tokens.size();
  if (experts.choices() == 0 || experts.tokens() == 0) return {};  // the engine reports no experts
  experts.values.resize(tokens * experts.choices(), -1);           // -1: unknown for the tokens that are missing
  if (const Status canonical = data_plane::make_canonical(experts); !canonical) {
    log::warn("lease {}: the engine's experts are left out: {}", group.lease.id(), canonical.error().message());
    return {};
  }
  std::string packed = data_plane::pack_experts(experts);
  return packed.size() <= bytes_max ? packed : std::string();  // without experts, the trainer routes the tokens itself
}

schema::Submission Groups::submission(const Group& group) const {
  const schema::Lease& lease = group.lease;
  schema::Submission submission;
  submission.set_lease(lease.id());
  std::size_t expert_bytes_left = kSubmissionExpertBytesMax;
  for (std::size_t member_number = 0; member_number < group.members.size(); ++member_number) {
    const Member& member = group.members[member_number];
    schema::Trajectory& trajectory = *submission.add_trajectories();
    trajectory.set_id(fmt::format("{}/{}", lease.id(), member_number));
    trajectory.set_problem_id(lease.problem().id());
    trajectory.set_group(lease.group());
    trajectory.set_member(static_cast<std::uint32_t>(member_number));
    for (const model::Token token : group.prompt) trajectory.add_prompt_tokens(static_cast<std::uint32_t>(token));
    for (const model::Token token : member.tokens) trajectory.add_response_tokens(static_cast<std::uint32_t>(token));
    for (const float logprob : member.logprobs) trajectory.add_logprobs(logprob);
    const bool has_observations = member.turns > 1;  // they stand between turns
    if (has_observations)                            // otherwise the mask stays empty: the policy generated every token
      for (const bool sampled : member.sampled) trajectory.add_loss_mask(sampled ? 1 : 0);
    std::size_t begin = 0;
    for (const Span& span : member.spans) {
      schema::VersionSpan& version_span = *trajectory.add_spans();
      version_span.set_begin(static_cast<std::uint32_t>(std::exchange(begin, span.end)));
      version_span.set_end(static_cast<std::uint32_t>(span.end));
      version_span.set_version(span.version.value);
    }
    std::string experts = packed_experts(group, member, expert_bytes_left);
    expert_bytes_left -= experts.size();
    trajectory.set_routed_experts(std::move(experts));
    trajectory.set_reward(member.score.reward);
    for (const auto& [name, value] : member.score.components) (*trajectory.mutable_components())[name] = value;
    trajectory.set_policy_digest(lease.policy_digest());
    trajectory.set_lease(lease.id());
    trajectory.set_worker(worker_.value);
    trajectory.set_finished(member.ended_by_itself);
    trajectory.set_text(has_observations ? task_.phrasing->tokenizer().decode(member.tokens)
                                         : task_.phrasing->answer(member.tokens));
    trajectory.set_correct(member.score.correct);
    trajectory.set_late(member.score.late);
  }
  return submission;
}

}  // namespace echoline::worker

#include "worker/groups.hpp"

#include <algorithm>

#include "base/log.hpp"
#include "base/random.hpp"

namespace echoline::worker {
namespace {

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

schema::WorkFailure kind_of(const Error& error) {
  if (error.code == Code::kExhausted) return schema::WORK_FAILURE_MEMORY;
  return error.code == Code::kInvalid ? schema::WORK_FAILURE_PROMPT : schema::WORK_FAILURE_GENERATION;
}

}  // namespace

Result<Task> make_task(schema::RunSpec spec) {
  Task task;
  ECHO_ASSIGN(task.model, model::ModelConfig::from_json(spec.model_config_json()));
  ECHO_ASSIGN(model::Tokenizer tokenizer, model::Tokenizer::from_json(spec.tokenizer_json()));
  ECHO_ASSIGN(task.phrasing, model::Phrasing::from_parts(std::move(tokenizer), {spec.eos().begin(), spec.eos().end()},
                                                         spec.prompt_json()));
  ECHO_ASSIGN(task.adapter, data_plane::make_adapter(spec.adapter_name(), spec.adapter_config_json(), spec.seed(),
                                                     data_plane::AdapterUse::kScoring));
  task.spec = std::move(spec);
  return task;
}

std::variant<std::vector<Sequence>, schema::WorkFailed> Groups::begin(schema::Lease lease, TimePoint now) {
  auto prompt = task_.phrasing->prompt(lease.problem().prompt());
  if (!prompt) return failure(lease, schema::WORK_FAILURE_PROMPT, prompt.error().message());
  const std::uint64_t id = lease.id();
  Group& group = groups_[id];
  group.begun = now;
  group.responses.resize(lease.rollouts());
  group.missing = lease.rollouts();
  std::vector<Sequence> sequences;
  for (std::uint32_t member = 0; member < lease.rollouts(); ++member) {
    const std::uint64_t seed = mix64(task_.spec.seed() ^ (mix64(id) + member));
    sequences_[next_] = {id, member};
    sequences.push_back({next_++, *prompt, task_.spec.response_tokens_max(), seed});
  }
  group.prompt = std::move(*prompt);
  group.lease = std::move(lease);
  return sequences;
}

std::optional<Groups::Ended> Groups::take(Outcome outcome) {
  const auto place = sequences_.find(outcome.id);
  if (place == sequences_.end()) return std::nullopt;
  const auto [lease, member] = place->second;
  sequences_.erase(place);
  Group& group = groups_.at(lease);
  if (outcome.response) {
    group.responses[member] = std::move(*outcome.response);
    if (--group.missing > 0) return std::nullopt;
  }
  Ended ended{group.begun,
              outcome.response ? settle(group)
                               : failure(group.lease, kind_of(outcome.response.error()), outcome.response.error().message()),
              {}};
  ended.abandoned = forget(lease);
  return ended;
}

std::vector<std::uint64_t> Groups::leases() const {
  std::vector<std::uint64_t> all;
  for (const auto& [lease, group] : groups_) all.push_back(lease);
  return all;
}

std::size_t Groups::rollouts() const {
  std::size_t all = 0;
  for (const auto& [lease, group] : groups_) all += group.responses.size();
  return all;
}

std::vector<std::uint64_t> Groups::drop() {
  std::vector<std::uint64_t> inside;
  for (const auto& [id, place] : sequences_) inside.push_back(id);
  sequences_.clear();
  groups_.clear();
  return inside;
}

std::vector<std::uint64_t> Groups::forget(std::uint64_t lease) {
  std::vector<std::uint64_t> inside;
  std::erase_if(sequences_, [&](const auto& sequence) {
    if (sequence.second.lease != lease) return false;
    inside.push_back(sequence.first);
    return true;
  });
  groups_.erase(lease);
  return inside;
}

Settled Groups::settle(const Group& group) const {
  const schema::Lease& lease = group.lease;
  schema::Submission submission;
  submission.set_lease(lease.id());
  try {
    for (std::size_t member = 0; member < group.responses.size(); ++member) {
      const Response& response = *group.responses[member];
      const std::string text = task_.phrasing->answer(response.tokens);
      const data_plane::Score score = task_.adapter->score(lease.problem(), text);
      schema::Trajectory& t = *submission.add_trajectories();
      t.set_id(fmt::format("{}/{}", lease.id(), member));
      t.set_problem_id(lease.problem().id());
      t.set_group(lease.group());
      t.set_member(static_cast<std::uint32_t>(member));
      for (const model::Token token : group.prompt) t.add_prompt_tokens(static_cast<std::uint32_t>(token));
      for (const model::Token token : response.tokens) t.add_response_tokens(static_cast<std::uint32_t>(token));
      for (const float logprob : response.logprobs) t.add_logprobs(std::min(logprob, 0.0f));
      std::size_t begin = 0;
      for (const Span& span : response.spans) {
        schema::VersionSpan& s = *t.add_spans();
        s.set_begin(static_cast<std::uint32_t>(std::exchange(begin, span.end)));
        s.set_end(static_cast<std::uint32_t>(span.end));
        s.set_version(span.version.value);
      }
      t.set_reward(score.reward);
      for (const auto& [name, value] : score.components) (*t.mutable_components())[name] = value;
      t.set_policy_digest(lease.policy_digest());
      t.set_lease(lease.id());
      t.set_worker(worker_.value);
      t.set_finished(response.ended);
      t.set_text(text);
      t.set_correct(score.correct);
    }
  } catch (const std::exception& error) {
    return failure(lease, schema::WORK_FAILURE_SCORING, error.what());
  }
  return submission;
}

}  // namespace echoline::worker

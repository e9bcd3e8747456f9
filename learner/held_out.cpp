// Scores responses to held-out problems, for `echoline evaluate`.
#include "learner/held_out.hpp"

#include <algorithm>
#include <cmath>

#include "base/random.hpp"
#include "base/text.hpp"
#include "data_plane/policy_input.hpp"

namespace echoline::learner {
namespace {

using nlohmann::json;

constexpr std::size_t kReasonBytesMax = 200, kReasonsMax = 16;  // of refusals; further reasons count as "others"
// Questions that wait for an answer. Far fewer than the client allows, because their conversations are in memory.
constexpr std::size_t kInFlightMax = TextServerClient::kPendingQuestionsMax / 64;
constexpr std::chrono::milliseconds kPoll(200);  // longest wait for an answer before `interrupted` is checked again

}  // namespace

std::vector<ChatMessage> task_messages(const model::PromptStyle& style, const schema::Problem& problem) {
  return model::conversation(data_plane::prompt_of(problem), style.text, style.system);
}

Interval wilson_interval(double share, double trials) {
  if (!(trials > 0)) return {.low = 0, .high = 1};
  constexpr double z = 1.959963984540054;  // 97.5 % quantile of the normal distribution
  const double correction = z * z / trials, middle = (share + correction / 2) / (1 + correction);
  const double half_width = z / (1 + correction) * std::sqrt(share * (1 - share) / trials + correction / (4 * trials));
  return {.low = std::max(0.0, middle - half_width), .high = std::min(1.0, middle + half_width)};
}

double pass_at(std::uint64_t n, std::uint64_t correct, std::uint64_t k) {
  ECHO_CHECK(k >= 1 && k <= n && correct <= n, "pass@{} of {} correct in {}", k, correct, n);
  double none_correct = 1;  // probability
  for (std::uint64_t i = 0; i < k; ++i) {
    if (n - correct <= i) return 1;  // fewer than k responses are wrong
    none_correct *= static_cast<double>(n - correct - i) / static_cast<double>(n - i);
  }
  return 1 - none_correct;
}

HeldOut::HeldOut(const data_plane::Adapter& adapter, const std::vector<schema::Problem>& problems,
                 std::uint32_t samples, std::uint64_t seed)
    : adapter_(adapter),
      problems_(problems),
      samples_(samples),
      seed_(seed),
      correct_by_problem_(problems.size()),
      has_several_tasks_(adapter.name() == data_plane::kSeveralTasksAdapter) {}

Result<std::optional<PolicyInput>> HeldOut::submit_turn(std::uint64_t id, std::string_view text, bool finished,
                                                        std::optional<std::int64_t> tokens) {
  Answer& answer = open_answers_[id];
  if (!answer.episode) {
    const std::uint64_t problem = id / samples_;
    ECHO_ASSIGN(answer.episode,
                adapter_.begin(problems_.at(problem),
                               data_plane::episode_seed(seed_, problem, static_cast<std::uint32_t>(id % samples_))));
  }
  answer.finished = finished;
  answer.tokens = answer.tokens && tokens ? std::optional(*answer.tokens + *tokens) : std::nullopt;
  ECHO_ASSIGN(data_plane::Step step, data_plane::step_and_wait(*answer.episode, std::string(text)));
  if (step.side_prompt) return data_plane::side_prompt_error();
  data_plane::add(answer.score, step.score);
  if (!step.done && ++answer.turns < data_plane::kTurnsMax) return std::optional(std::move(step.observation));
  if (!step.done) {
    end_early(id);
    return std::optional<PolicyInput>();
  }
  record_answer(id, answer);
  return std::optional<PolicyInput>();
}

void HeldOut::end_early(std::uint64_t id) {
  Answer& answer = open_answers_.at(id);
  data_plane::add(answer.score, answer.episode->cut());
  answer.finished = false;
  record_answer(id, answer);
}

void HeldOut::record_answer(std::uint64_t id, const Answer& answer) {
  ++answers_;
  correct_by_problem_[id / samples_] += answer.score.correct ? 1 : 0;
  reward_sum_ += answer.score.reward;
  for (const auto& [name, value] : answer.score.components) component_sums_[name] += value;
  if (has_several_tasks_) by_task_.add(problems_[id / samples_].id(), answer.score.correct, answer.score.reward);
  unfinished_ += answer.finished ? 0 : 1;
  if (answer.tokens) lengths_tokens_.push_back(static_cast<double>(*answer.tokens));
  open_answers_.erase(id);
}

void HeldOut::record_refusal(std::uint64_t id, const std::string& why) {
  ++answers_;
  if (has_several_tasks_) by_task_.add(problems_[id / samples_].id(), /*correct=*/false, /*reward=*/0);
  ++refused_[refused_.size() < kReasonsMax ? printable(why, kReasonBytesMax) : "others"];
  open_answers_.erase(id);
}

json HeldOut::result() const {
  const auto problem_count = static_cast<double>(problems_.size()), answers = static_cast<double>(answers_);
  double correct = 0;
  for (const std::uint64_t correct_of_problem : correct_by_problem_) correct += static_cast<double>(correct_of_problem);
  const double accuracy = answers_ ? correct / answers : 0;
  // Responses to one problem are correlated. The number of independent responses is the variance of one response,
  // divided by that of the mean, which follows from the spread of the problems' means.
  double squared_deviations = 0;
  for (const std::uint64_t correct_of_problem : correct_by_problem_)
    squared_deviations += std::pow(static_cast<double>(correct_of_problem) / samples_ - accuracy, 2);
  double trials = problem_count;
  if (samples_ > 1 && problem_count > 1 && squared_deviations > 0) {
    const double independent_trials =
        accuracy * (1 - accuracy) * problem_count * (problem_count - 1) / squared_deviations;
    trials = std::clamp(independent_trials, problem_count, problem_count * samples_);
  }
  const Interval interval = wilson_interval(accuracy, trials);
  json passes = json::array();
  // For k = 1, 2, 4, ... and samples_. None for one sample, because pass@1 is the accuracy.
  for (std::uint64_t k = 1; samples_ > 1; k = std::min<std::uint64_t>(2 * k, samples_)) {
    double pass_sum = 0;
    for (const std::uint64_t correct_of_problem : correct_by_problem_)
      pass_sum += pass_at(samples_, correct_of_problem, k);
    passes.push_back({{"k", k}, {"share", pass_sum / problem_count}});
    if (k == samples_) break;
  }
  std::vector<double> lengths = lengths_tokens_;
  std::sort(lengths.begin(), lengths.end());
  double tokens = 0;
  for (const double length : lengths) tokens += length;
  const auto quantile = [&](double q) {
    if (lengths.empty()) return json(nullptr);
    const auto index = static_cast<std::size_t>(q * static_cast<double>(lengths.size()));
    return json(lengths[std::min(index, lengths.size() - 1)]);
  };
  json components = json::object();
  for (const auto& [name, sum] : component_sums_) components[name] = sum / answers;
  json result{{"problems", problems_.size()},
              {"samples", samples_},
              {"accuracy", accuracy},
              {"accuracy_low", interval.low},
              {"accuracy_high", interval.high},
              {"pass_at", passes},
              {"reward_mean", answers_ ? reward_sum_ / answers : 0},
              {"components", components},
              {"response_tokens",
               {{"known", lengths.size()},
                {"mean", lengths.empty() ? json(nullptr) : json(tokens / static_cast<double>(lengths.size()))},
                {"p50", quantile(0.5)},
                {"p95", quantile(0.95)},
                {"max", lengths.empty() ? json(nullptr) : json(lengths.back())}}},
              {"truncated_fraction", answers_ ? static_cast<double>(unfinished_) / answers : 0},
              {"refused", refused_}};
  if (has_several_tasks_) result["by_task"] = by_task_.figures("answers");
  return result;
}

std::uint64_t seed_of(const HeldOutQuestions& questions, std::uint64_t id, std::size_t turn) {
  // Servers limit seeds differently; all accept 31 bits.
  return Random(questions.seed, mix64(id) + turn).next() >> 33;
}

std::pair<std::string_view, bool> up_to_stop(std::string_view text, const std::vector<std::string>& stops) {
  std::size_t end = std::string_view::npos;
  for (const std::string& stop : stops)
    if (const std::size_t begin = text.find(stop); begin != std::string_view::npos)
      end = std::min(end, begin + stop.size());
  return {text.substr(0, end), end != std::string_view::npos};
}

Status ask_server(TextServerClient& server, const RunConfig& config, const model::Phrasing* phrasing,
                  const std::vector<schema::Problem>& problems, const HeldOutQuestions& questions, HeldOut& held_out) {
  const std::uint64_t total = std::uint64_t{problems.size()} * questions.samples;
  std::map<std::uint64_t, std::vector<ChatMessage>> chats;  // messages so far, of unfinished responses
  const auto ask = [&](std::uint64_t id, std::string prompt) {
    TextQuestion question;
    question.id = id;
    question.tokens_max = questions.turn_tokens_max > 0 ? std::min(questions.turn_tokens_max, questions.tokens_max)
                                                        : questions.tokens_max;
    question.temperature = questions.temperature;
    question.top_p = questions.top_p;
    const auto chat = chats.find(id);
    if (questions.temperature > 0 && questions.sends_seeds)
      // The number of messages stands for the turn, because it is different in every turn.
      question.seed = seed_of(questions, id, chat == chats.end() ? 0 : chat->second.size());
    question.prompt = std::move(prompt);
    if (chat != chats.end()) {
      question.messages = chat->second;
      question.template_options_json = config.prompts.chat_options_json;
    }
    return server.submit(std::move(question));
  };
  std::uint64_t next_id = 0;  // of the next question to ask
  while (held_out.answers() < total) {
    if (questions.interrupted && questions.interrupted())
      return fail(Code::kCancelled, "evaluate", "stopped after {} of {} answers", held_out.answers(), total);
    for (; next_id < total && server.pending_count() < kInFlightMax; ++next_id) {
      const schema::Problem& problem = problems[next_id / questions.samples];
      if (phrasing == nullptr) {
        chats[next_id] = task_messages(config.prompts, problem);
        ECHO_TRY(ask(next_id, {}));
      } else if (auto text = phrasing->prompt_text(data_plane::prompt_of(problem))) {
        ECHO_TRY(ask(next_id, std::move(*text)));
      } else {
        held_out.record_refusal(next_id, text.error().message());
      }
    }
    for (TextServerClient::Outcome& outcome : server.poll(kPoll)) {
      if (!outcome.answer) {
        if (!outcome.concerns_only_this_question) return std::move(outcome.answer).error();
        held_out.record_refusal(outcome.id, outcome.answer.error().message());
        chats.erase(outcome.id);
        continue;
      }
      const auto [text, stopped] = up_to_stop(outcome.answer->text, config.prompts.stop);
      // The number of tokens after a cut is unknown.
      const bool is_uncut = text.size() == outcome.answer->text.size();
      ECHO_ASSIGN(std::optional<PolicyInput> next_input,
                  held_out.submit_turn(outcome.id, text, outcome.answer->finished || stopped,
                                       is_uncut ? outcome.answer->tokens : std::nullopt));
      const auto chat = chats.find(outcome.id);
      if (!next_input) {
        chats.erase(outcome.id);
        continue;
      }
      if (chat == chats.end())
        return fail(Code::kInvalid, "evaluate",
                    "the task '{}' goes on after the first answer: ask the server for chats (--api chat)",
                    config.task.adapter);
      chat->second.push_back({"assistant", std::string(text)});
      // kPromptPlace: further texts of the task stand alone. Only the first has the run's text around it.
      for (ChatMessage& message : model::conversation(*next_input, model::kPromptPlace, {}))
        chat->second.push_back(std::move(message));
      ECHO_TRY(ask(outcome.id, {}));
    }
    if (questions.progress) questions.progress(held_out.answers());
  }
  return ok();
}

}  // namespace echoline::learner

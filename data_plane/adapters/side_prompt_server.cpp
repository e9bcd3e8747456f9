// Implements SidePromptServer: a thread that passes the side prompts of many episodes to a TextServerClient. A side
// prompt asks another player of the game for its action, before the policy's next turn.
#include "data_plane/adapters/side_prompt_server.hpp"

#include <condition_variable>
#include <map>
#include <mutex>
#include <thread>

#include "base/config.hpp"
#include "base/random.hpp"
#include "base/text_server.hpp"

namespace echoline::data_plane {
namespace {

// Longest wait for answers before new questions are sent.
constexpr Duration kQuestionPollTime = std::chrono::milliseconds(5);

}  // namespace

void SidePromptServerOptions::read(ConfigSection s) {
  s.read("url", url, "URL of a server with OpenAI's interface, without /chat/completions; workers must reach it");
  s.read("model", model, "the model's name on the server");
  s.read_choice("api", chat, {{"chat", true}, {"completions", false}},
                "messages in the server's own chat template, or a text to continue");
  s.read("tokens_max", tokens_max, {.min = 1, .max = 1 << 20}, "tokens of an answer");
  s.read("temperature", temperature, {.min = 0.0, .max = 10.0}, "sampling temperature of an answer");
  s.read("deadline", deadline, {.min = std::chrono::milliseconds(1), .max = std::chrono::hours(1)},
         "the longest wait for an answer");
  s.read("tries", tries, {.min = 1, .max = 100},
         "attempts at an answer, with growing pauses; then the worker returns the rollout");
}

struct SidePromptServer::Impl {
  using AnswerHandler = std::function<void(Result<std::string>)>;

  std::mutex mutex;
  std::condition_variable wake;
  std::vector<std::pair<TextQuestion, AnswerHandler>> new_questions;  // guarded by mutex
  bool closed = false;                                                // guarded by mutex; the thread then ends
  std::uint64_t next_question_id = 0;                                 // guarded by mutex

  SidePromptServerOptions options;
  SystemClock clock;
  std::optional<TextServerClient> server;  // this member and the following ones are used by the thread only
  std::map<std::uint64_t, AnswerHandler> handlers_by_question;  // questions without an answer yet, by id
  std::thread thread;

  void ask(const PolicyInput& input, std::uint64_t seed, AnswerHandler on_answer) {
    TextQuestion question;
    question.tokens_max = options.tokens_max;
    question.temperature = options.temperature;
    question.seed = seed;
    if (!options.chat)
      question.prompt = input.text;
    else if (input.messages.empty())
      question.messages = {{"user", input.text}};
    else
      question.messages = input.messages;
    const std::lock_guard lock(mutex);
    question.id = next_question_id++;
    new_questions.emplace_back(std::move(question), std::move(on_answer));
    wake.notify_one();
  }

  // One round of the thread. False once the server is closed.
  bool run_round() {
    std::vector<std::pair<TextQuestion, AnswerHandler>> questions;
    {
      std::unique_lock lock(mutex);
      // With questions at the server, poll() below waits instead.
      if (server->pending_count() == 0) wake.wait(lock, [&] { return closed || !new_questions.empty(); });
      if (closed) return false;
      questions.swap(new_questions);
    }
    for (auto& [question, on_answer] : questions) {
      const std::uint64_t id = question.id;
      if (const Status submitted = server->submit(std::move(question)); !submitted)
        on_answer(submitted.error());
      else
        handlers_by_question.emplace(id, std::move(on_answer));
    }
    for (TextServerClient::Outcome& outcome : server->poll(kQuestionPollTime)) {
      const auto handler = handlers_by_question.extract(outcome.id);
      if (handler.empty()) continue;
      if (outcome.answer)
        handler.mapped()(std::move(outcome.answer->text));
      else
        handler.mapped()(std::move(outcome.answer).error());
    }
    return true;
  }
};

namespace {

// Wraps an episode. A step answers side prompts through the server until it is the policy's turn. The destructor waits
// while an answer is being processed. `Server` is SidePromptServer::Impl, which is private.
template <class Server>
class AnsweredEpisode final : public Episode {
 public:
  AnsweredEpisode(Server& server, std::unique_ptr<Episode> episode, std::uint64_t seed)
      : server_(server), shared_(std::make_shared<Shared>()), seed_(seed) {
    shared_->episode = std::move(episode);
  }
  ~AnsweredEpisode() override {
    const std::lock_guard lock(shared_->mutex);
    shared_->episode.reset();
  }

  void step(std::string response, StepHandler on_policy_turn) override {
    step_to_policy_turn(server_, shared_, std::move(response), std::move(on_policy_turn), seed_, Score{});
  }
  Score cut() override {
    const std::lock_guard lock(shared_->mutex);
    return shared_->episode->cut();
  }

 private:
  // Shared with pending requests, which may outlive the episode.
  struct Shared {
    std::recursive_mutex mutex;           // recursive, because an episode may report a step before step() returns
    std::unique_ptr<Episode> episode;     // null: the caller has destroyed its episode
    std::uint64_t side_prompt_count = 0;  // asked so far
  };

  // Steps the episode until the policy has to act. `score_before`: the sum of the steps' scores since the policy's
  // turn.
  static void step_to_policy_turn(Server& server, std::shared_ptr<Shared> shared, std::string response,
                                  StepHandler on_policy_turn, std::uint64_t seed, Score score_before) {
    const std::lock_guard lock(shared->mutex);
    if (!shared->episode) return;
    shared->episode->step(std::move(response), [&server, shared, on_policy_turn = std::move(on_policy_turn), seed,
                                                score_before = std::move(score_before)](Result<Step> step) {
      on_step(server, shared, std::move(step), on_policy_turn, seed, score_before);
    });
  }

  // Reports the step if the policy has to act next, otherwise asks the server for the other player's answer.
  static void on_step(Server& server, std::shared_ptr<Shared> shared, Result<Step> step, StepHandler on_policy_turn,
                      std::uint64_t seed, Score score) {
    const std::lock_guard lock(shared->mutex);
    if (!shared->episode) return;
    if (!step) return on_policy_turn(std::move(step));
    add(score, step->score);
    step->score = score;  // the policy's turn has the scores of all steps since its last one
    if (step->done || !step->side_prompt) return on_policy_turn(std::move(step));
    if (++shared->side_prompt_count > kTurnsMax)
      return on_policy_turn(
          fail(Code::kExhausted, "task", "the episode asks more than {} times for another player's answer", kTurnsMax));
    server.ask(
        *step->side_prompt, mix64(seed + shared->side_prompt_count),
        [&server, shared, on_policy_turn, seed, score](Result<std::string> answer) {
          const std::lock_guard answer_lock(shared->mutex);
          if (!shared->episode) return;
          if (!answer)
            return on_policy_turn(fail(Code::kUnavailable, "task", "the server that plays another player failed: {}",
                                       answer.error().message()));
          step_to_policy_turn(server, shared, *std::move(answer), on_policy_turn, seed, score);
        });
  }

  Server& server_;
  const std::shared_ptr<Shared> shared_;
  const std::uint64_t seed_;
};

}  // namespace

SidePromptServer::SidePromptServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Result<std::unique_ptr<SidePromptServer>> SidePromptServer::start(const SidePromptServerOptions& options) {
  auto impl = std::make_unique<Impl>();
  impl->options = options;
  TextServerOptions server_options;
  server_options.url = options.url.value_or("");
  server_options.model = options.model.value_or("");
  server_options.chat = options.chat;
  server_options.timeout = options.deadline;
  server_options.tries_max = options.tries;
  ECHO_ASSIGN(TextServerClient server, TextServerClient::make(std::move(server_options), impl->clock));
  impl->server.emplace(std::move(server));
  impl->thread = std::thread([started_impl = impl.get()] {
    while (started_impl->run_round()) {
    }
  });
  return std::unique_ptr<SidePromptServer>(new SidePromptServer(std::move(impl)));
}

SidePromptServer::~SidePromptServer() {
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->closed = true;
    impl_->wake.notify_one();
  }
  impl_->thread.join();
}

std::unique_ptr<Episode> SidePromptServer::answer_side_prompts_of(std::unique_ptr<Episode> episode,
                                                                  std::uint64_t seed) {
  return std::make_unique<AnsweredEpisode<Impl>>(*impl_, std::move(episode), seed);
}

}  // namespace echoline::data_plane

#include "data_plane/adapters/aside_server.hpp"

#include <condition_variable>
#include <map>
#include <mutex>
#include <thread>

#include "base/config.hpp"
#include "base/random.hpp"
#include "base/text_server.hpp"

namespace echoline::data_plane {
namespace {

// Pause before new questions are sent while others are in flight.
constexpr Duration kTurn = std::chrono::milliseconds(5);

}  // namespace

void AsideServerOptions::read(ConfigSection s) {
  s.read("url", url, "URL of a server with OpenAI's interface, without /chat/completions; workers must reach it");
  s.read("model", model, "the model's name on the server");
  s.read_choice("api", chat, {{"chat", true}, {"completions", false}},
                "messages in the server's own chat template, or a text to continue");
  s.read("tokens_max", tokens_max, {.min = 1, .max = 1 << 20}, "tokens of an answer");
  s.read("temperature", temperature, {.min = 0.0, .max = 10.0}, "its sampling temperature");
  s.read("deadline", deadline, {.min = std::chrono::milliseconds(1), .max = std::chrono::hours(1)}, "for an answer");
  s.read("tries", tries, {.min = 1, .max = 100},
         "attempts at an answer, with growing pauses; then the worker returns the rollout");
}

struct AsideServer::Impl {
  using Said = std::function<void(Result<std::string>)>;

  std::mutex mutex;
  std::condition_variable wake;
  std::vector<std::pair<TextQuestion, Said>> asked;
  bool closed = false;
  std::uint64_t next = 0;

  AsideServerOptions options;
  SystemClock clock;
  std::optional<TextServer> server;  // this member and the following ones are used by the thread only
  std::map<std::uint64_t, Said> waiting;
  std::thread thread;

  void ask(const Told& what, std::uint64_t seed, Said said) {
    TextQuestion question;
    question.tokens_max = options.tokens_max;
    question.temperature = options.temperature;
    question.seed = seed;
    if (!options.chat)
      question.prompt = what.text;
    else if (what.messages.empty())
      question.messages = {{"user", what.text}};
    else
      question.messages = what.messages;
    const std::lock_guard lock(mutex);
    question.id = next++;
    asked.emplace_back(std::move(question), std::move(said));
    wake.notify_one();
  }

  // One round of the thread. False once the server is closed.
  bool turn() {
    std::vector<std::pair<TextQuestion, Said>> fresh;
    {
      std::unique_lock lock(mutex);
      if (server->inside() == 0) wake.wait(lock, [&] { return closed || !asked.empty(); });
      if (closed) return false;
      fresh.swap(asked);
    }
    for (auto& [question, said] : fresh) {
      const std::uint64_t id = question.id;
      if (const Status submitted = server->submit(std::move(question)); !submitted)
        said(submitted.error());
      else
        waiting.emplace(id, std::move(said));
    }
    for (TextServer::Ended& ended : server->poll(kTurn)) {
      const auto of = waiting.extract(ended.id);
      if (of.empty()) continue;
      if (ended.answer)
        of.mapped()(std::move(ended.answer->text));
      else
        of.mapped()(std::move(ended.answer).error());
    }
    return true;
  }
};

namespace {

// Continues by itself through all asides until the policy has to act. The destructor waits while an answer is being
// processed.
template <class Server>
class Answering final : public Episode {
 public:
  Answering(Server& server, std::unique_ptr<Episode> episode, std::uint64_t seed)
      : server_(server), shared_(std::make_shared<Shared>()), seed_(seed) {
    shared_->episode = std::move(episode);
  }
  ~Answering() override {
    const std::lock_guard lock(shared_->mutex);
    shared_->episode.reset();
  }

  void step(std::string response, Done done) override {
    go_on(server_, shared_, std::move(response), std::move(done), seed_, {});
  }
  Score cut() override {
    const std::lock_guard lock(shared_->mutex);
    return shared_->episode->cut();
  }

 private:
  struct Shared {
    std::recursive_mutex mutex;
    std::unique_ptr<Episode> episode;  // null: the caller has destroyed its episode
    std::uint64_t asides = 0;
  };

  static void go_on(Server& server, std::shared_ptr<Shared> shared, std::string response, Done done, std::uint64_t seed,
                    Score before) {
    const std::lock_guard lock(shared->mutex);
    if (!shared->episode) return;
    shared->episode->step(std::move(response), [&server, shared, done = std::move(done), seed,
                                                before = std::move(before)](Result<Step> step) {
      const std::lock_guard inner(shared->mutex);
      if (!shared->episode) return;
      if (!step) return done(std::move(step));
      Score score = before;
      add(score, step->score);
      step->score = score;
      if (step->done || !step->aside) return done(std::move(step));
      if (++shared->asides > kTurnsMax)
        return done(fail(Code::kExhausted, "task", "the episode asks more than {} times for another player's answer",
                         kTurnsMax));
      server.ask(*step->aside, mix64(seed + shared->asides),
                 [&server, shared, done, seed, score](Result<std::string> said) {
                   const std::lock_guard last(shared->mutex);
                   if (!shared->episode) return;
                   if (!said)
                     return done(fail(Code::kUnavailable, "task", "the server that plays another player failed: {}",
                                      said.error().message()));
                   go_on(server, shared, *std::move(said), done, seed, score);
                 });
    });
  }

  Server& server_;
  const std::shared_ptr<Shared> shared_;
  const std::uint64_t seed_;
};

}  // namespace

AsideServer::AsideServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Result<std::unique_ptr<AsideServer>> AsideServer::start(const AsideServerOptions& options) {
  auto impl = std::make_unique<Impl>();
  impl->options = options;
  TextServerOptions text;
  text.url = options.url.value_or("");
  text.model = options.model.value_or("");
  text.chat = options.chat;
  text.timeout = options.deadline;
  text.tries_max = options.tries;
  ECHO_ASSIGN(TextServer server, TextServer::make(std::move(text), impl->clock));
  impl->server.emplace(std::move(server));
  impl->thread = std::thread([raw = impl.get()] {
    while (raw->turn()) {
    }
  });
  return std::unique_ptr<AsideServer>(new AsideServer(std::move(impl)));
}

AsideServer::~AsideServer() {
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->closed = true;
    impl_->wake.notify_one();
  }
  impl_->thread.join();
}

std::unique_ptr<Episode> AsideServer::answering(std::unique_ptr<Episode> episode, std::uint64_t seed) {
  return std::make_unique<Answering<Impl>>(*impl_, std::move(episode), seed);
}

}  // namespace echoline::data_plane

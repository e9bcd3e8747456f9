// The task "openenv": environments behind a server of OpenEnv's protocol. A problem is a seed; an episode has its own
// session.
#include <deque>
#include <future>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>

#include "base/random.hpp"
#include "data_plane/adapters/adapter_config.hpp"
#include "data_plane/adapters/openenv/client.hpp"
#include "data_plane/policy_input.hpp"

namespace echoline::data_plane {
namespace {

constexpr std::size_t kCachedProblemsMax = 4096;
constexpr std::size_t kWaitingMax = 65'536;  // episodes that wait for a session
constexpr std::size_t kSeedDigitsMax = 18;   // so that every such number fits in 64 bits
constexpr std::size_t kTextBytesShown = 120, kSeedBytesShown = 80;
constexpr Duration kRetryDelayMin = std::chrono::milliseconds(500), kRetryDelayMax = std::chrono::seconds(30);

struct Options {
  std::string url, action = "message", observation, reset_json = "{}";
  std::uint64_t problems = 100'000, evaluation_problems = 64;
  std::uint32_t sessions = 8, tries = 5;
  Duration deadline = std::chrono::seconds(60);
  double correct_at = 1;

  void read(ConfigSection s, AdapterUse) {
    s.require("url", url, "URL of the server, http or https; workers must reach it too");
    s.read("action", action,
           "the field of an action that holds the policy's response; empty: the response is the action itself, a JSON "
           "object");
    s.read("observation", observation,
           {"the part of an observation that is the policy's text; a path of keys has dots", "all of it, as JSON"});
    reset_json = s.json("reset", "arguments of a reset besides the seed");
    s.read("problems", problems, {.min = 1, .max = 1'000'000'000},
           "number of training seeds, which follow the held-out ones");
    s.read("evaluation_problems", evaluation_problems, {.min = 0, .max = 100'000},
           "number of held-out seeds, from 0 on");
    s.read("sessions", sessions, {.min = 1, .max = 1024}, "episodes that a worker has open at the server; others wait");
    s.read("tries", tries, {.min = 1, .max = 20},
           "attempts at a reset, with growing pauses; a later failure returns the rollout");
    s.read("deadline", deadline, {.min = std::chrono::milliseconds(10), .max = std::chrono::hours(1)},
           "the longest wait for an answer");
    s.read("correct_at", correct_at, "the least sum of an episode's rewards that counts as correct");
    if (!url.empty())
      if (const auto endpoint = openenv::parse_endpoint(url); !endpoint) s.error("url", endpoint.error().detail);
  }
};

// Limits the sessions that are open at the server. A caller waits in a queue for a slot, the right to open one session.
class SessionPool {
 public:
  SessionPool(const Options& task_options, openenv::Endpoint endpoint)
      : options(task_options), client({.endpoint = std::move(endpoint), .deadline = task_options.deadline}) {}

  // Calls `then` when the caller has a slot. False if too many callers wait.
  bool acquire(std::function<void()> then) {
    {
      const std::lock_guard lock(mutex_);
      if (open_sessions_ == options.sessions) {
        if (waiting_callers_.size() == kWaitingMax) return false;
        waiting_callers_.push_back(std::move(then));
        return true;
      }
      ++open_sessions_;
    }
    then();
    return true;
  }
  // Passes the slot to the caller that has waited longest.
  void release() {
    std::function<void()> next;
    {
      const std::lock_guard lock(mutex_);
      if (waiting_callers_.empty()) {
        --open_sessions_;
        return;
      }
      next = std::move(waiting_callers_.front());
      waiting_callers_.pop_front();
    }
    next();
  }

  const Options options;

 private:
  std::mutex mutex_;
  std::size_t open_sessions_ = 0;                      // guarded by mutex_
  std::deque<std::function<void()>> waiting_callers_;  // guarded by mutex_

 public:
  openenv::Client client;  // last, so that its thread ends first
};

// An environment in a session of its own, from its reset on. Each request is answered once, unless close() was called.
class EnvironmentSession : public std::enable_shared_from_this<EnvironmentSession> {
 public:
  using ObservationHandler = std::function<void(Result<openenv::Observation>)>;

  EnvironmentSession(SessionPool& pool, std::uint64_t seed) : pool_(pool), seed_(seed) {}

  void begin(ObservationHandler handler) {
    {
      const std::lock_guard lock(mutex_);
      handler_ = std::move(handler);
    }
    if (!pool_.acquire([self = shared_from_this()] { self->on_slot_acquired(); }))
      answer(fail(Code::kExhausted, "environment", "{} episodes are waiting for a session already", kWaitingMax));
  }
  void step(std::string message, ObservationHandler handler) {
    const std::lock_guard lock(mutex_);
    handler_ = std::move(handler);
    pool_.client.ask(session_, std::move(message), [self = shared_from_this()](Result<std::string> reply) {
      self->answer(self->parse(std::move(reply)));
    });
  }
  void close() {
    std::shared_ptr<openenv::Session> session;
    {
      const std::lock_guard lock(mutex_);
      handler_ = {};
      closed_ = true;
      session = std::move(session_);
      if (!std::exchange(holds_slot_, false)) return;  // closed before, or before it got a slot
    }
    if (!session) return pool_.release();  // closed between the slot and the reset
    // The server counts the session until it is closed, and has no room for the next one before that.
    pool_.client.end(session, [&pool = pool_] { pool.release(); });
  }

 private:
  Result<openenv::Observation> parse(Result<std::string> reply) const {
    if (!reply) return std::move(reply).error();
    return openenv::read_message(*reply, pool_.options.observation);
  }
  void on_slot_acquired() {
    bool needs_session = false;  // false: the caller has closed it while it waited
    {
      const std::lock_guard lock(mutex_);
      needs_session = holds_slot_ = !closed_;
    }
    if (needs_session)
      reset(/*attempt=*/1, kRetryDelayMin);
    else
      pool_.release();
  }
  // Requests the first observation. A temporary failure is retried after `delay`, in a new session.
  void reset(std::uint32_t attempt, Duration delay) {
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    session_ = pool_.client.session();
    pool_.client.ask(session_, openenv::reset_message(pool_.options.reset_json, seed_),
                     [self = shared_from_this(), attempt, delay](Result<std::string> reply) {
                       auto observation = self->parse(std::move(reply));
                       const bool may_retry = !observation && (observation.error().code == Code::kUnavailable ||
                                                               observation.error().code == Code::kExhausted ||
                                                               observation.error().code == Code::kStale);
                       if (!may_retry || attempt >= self->pool_.options.tries)
                         return self->answer(std::move(observation));
                       self->pool_.client.run_after(delay, [self, attempt, delay] {
                         self->reset(attempt + 1, std::min(delay * 2, kRetryDelayMax));
                       });
                     });
  }
  // Runs the callback under the lock, so that close() waits for it and none runs afterwards.
  void answer(Result<openenv::Observation> observation) {
    const std::lock_guard lock(mutex_);
    if (auto handler = std::exchange(handler_, {})) handler(std::move(observation));
  }

  SessionPool& pool_;
  const std::uint64_t seed_;
  std::recursive_mutex mutex_;                 // recursive, because a handler may call step() or close()
  std::shared_ptr<openenv::Session> session_;  // guarded by mutex_
  ObservationHandler handler_;                 // guarded by mutex_
  bool holds_slot_ = false, closed_ = false;   // guarded by mutex_
};

class EnvironmentEpisode final : public Episode {
 public:
  EnvironmentEpisode(SessionPool& pool, const Problem& problem, std::uint64_t seed)
      : pool_(pool), prompt_(prompt_of(problem)), session_(std::make_shared<EnvironmentSession>(pool, seed)) {}
  ~EnvironmentEpisode() override { session_->close(); }

  void step(std::string response, StepHandler on_step) override {
    auto message = openenv::step_message(pool_.options.action, response);
    if (!message) {  // the policy's mistake, so it gets a reward of zero
      const Score no_action{.reward = 0, .components = {{"no action", 1.0}}, .correct = false};
      return on_step(Step{.score = no_action, .done = true, .observation = {}});
    }
    // Holds `this`, because no handler runs after close(), which the destructor calls.
    const auto on_observation = [this, on_step](Result<openenv::Observation> observed) {
      if (!observed) return on_step(std::move(observed).error());
      reward_ += observed->reward;
      if (observed->done) session_->close();  // frees the session for the next episode
      on_step(
          Step{.score = {.reward = observed->reward, .components = {}, .correct = reward_ >= pool_.options.correct_at},
               .done = observed->done,
               .observation = std::move(observed->input)});
    };
    // The first response needs the environment's reset, which must give the prompt that the policy has answered. The
    // learner got that prompt from another reset with the same seed.
    if (std::exchange(begun_, true)) return session_->step(*std::move(message), on_observation);
    session_->begin([this, on_observation, on_step, message = *std::move(message)](Result<openenv::Observation> first) {
      if (first && first->input != prompt_)
        first =
            fail(Code::kUnavailable, "environment", "it begins with '{}' although the same seed began with '{}' before",
                 first->input.text.substr(0, kTextBytesShown), prompt_.text.substr(0, kTextBytesShown));
      if (!first) return on_step(std::move(first).error());
      session_->step(message, on_observation);
    });
  }

 private:
  SessionPool& pool_;
  const PolicyInput prompt_;
  const std::shared_ptr<EnvironmentSession> session_;
  bool begun_ = false;
  double reward_ = 0;  // sum of the steps so far
};

class OpenEnv final : public Adapter {
 public:
  OpenEnv(const Options& options, openenv::Endpoint endpoint, std::uint64_t seed)
      : pool_(std::make_unique<SessionPool>(options, std::move(endpoint))), shuffle_key_(mix64(seed)) {}

  std::string_view name() const override { return "openenv"; }

  Result<Problem> problem(std::uint64_t index) const override {
    const Options& options = pool_->options;
    const std::lock_guard lock(mutex_);
    if (const auto it = problems_.find(index); it != problems_.end()) return it->second;
    if (problems_.size() >= kCachedProblemsMax) problems_.clear();
    // The run asks for the following indices next. Resets as many environments as may be open, because it costs hardly
    // more time than one.
    std::vector<std::uint64_t> seeds;
    for (std::uint64_t i = 0; i < options.sessions; ++i)
      seeds.push_back(options.evaluation_problems + shuffled_cycle(index + i, options.problems, shuffle_key_));
    ECHO_ASSIGN(auto new_problems, reset_all(seeds));
    for (std::size_t i = 0; i < new_problems.size(); ++i) problems_[index + i] = std::move(new_problems[i]);
    return problems_.at(index);
  }
  std::vector<Problem> evaluation() const override { return evaluation_; }
  Status read_evaluation() {
    for (std::uint64_t next_seed = 0; next_seed < pool_->options.evaluation_problems;) {
      std::vector<std::uint64_t> seeds;
      while (next_seed < pool_->options.evaluation_problems && seeds.size() < pool_->options.sessions)
        seeds.push_back(next_seed++);
      ECHO_ASSIGN(auto new_problems, reset_all(seeds));
      std::move(new_problems.begin(), new_problems.end(), std::back_inserter(evaluation_));
    }
    return ok();
  }

  Result<std::unique_ptr<Episode>> begin(const Problem& problem, std::uint64_t) const override {
    const std::string& seed = problem.reference();
    if (seed.empty() || seed.size() > kSeedDigitsMax || seed.find_first_not_of("0123456789") != std::string::npos)
      return fail(Code::kInvalid, "openenv", "'{}': expected a seed, found '{}'", problem.id(),
                  seed.substr(0, kSeedBytesShown));
    return std::unique_ptr<Episode>(std::make_unique<EnvironmentEpisode>(*pool_, problem, std::stoull(seed)));
  }
  Repeatable repeatable(const Problem&) const override { return Repeatable::kNot; }
  bool has_one_response() const override { return false; }
  std::optional<std::string> demonstration(const Problem&) const override { return std::nullopt; }

 private:
  // Resets one environment per seed, at the same time. Returns a problem for each, or the last error.
  Result<std::vector<Problem>> reset_all(const std::vector<std::uint64_t>& seeds) const {
    std::vector<std::shared_ptr<EnvironmentSession>> sessions;
    std::vector<std::future<Result<openenv::Observation>>> first_observations;
    for (const std::uint64_t seed : seeds) {
      auto promise = std::make_shared<std::promise<Result<openenv::Observation>>>();
      first_observations.push_back(promise->get_future());
      sessions.push_back(std::make_shared<EnvironmentSession>(*pool_, seed));
      sessions.back()->begin(
          [promise](Result<openenv::Observation> observation) { promise->set_value(std::move(observation)); });
    }
    std::vector<Problem> problems;
    std::optional<Error> error;
    for (std::size_t i = 0; i < seeds.size(); ++i) {
      auto observation = first_observations[i].get();
      sessions[i]->close();
      if (observation && observation->done)
        observation =
            fail(Code::kInvalid, "openenv", "seed {}: the environment is done before the first action", seeds[i]);
      if (observation && observation->input.text.empty())
        observation = fail(Code::kInvalid, "openenv",
                           "seed {}: an empty observation; task.options.observation names its text", seeds[i]);
      if (!observation) {
        error = std::move(observation).error();
        continue;
      }
      Problem problem;
      problem.set_id(fmt::format("openenv/{}", seeds[i]));
      set_prompt(problem, std::move(observation->input));
      problem.set_reference(std::to_string(seeds[i]));
      problems.push_back(std::move(problem));
    }
    if (error) return *std::move(error);
    return problems;
  }

  const std::unique_ptr<SessionPool> pool_;
  const std::uint64_t shuffle_key_;
  std::vector<Problem> evaluation_;
  mutable std::mutex mutex_;
  mutable std::map<std::uint64_t, Problem> problems_;  // by index; guarded by mutex_
};

Result<std::unique_ptr<Adapter>> make(std::string_view options_json, std::uint64_t seed, AdapterUse use) {
  ECHO_ASSIGN(const Options options, options_from_json<Options>("openenv", options_json, use));
  ECHO_ASSIGN(auto endpoint, openenv::parse_endpoint(options.url));
  auto adapter = std::make_unique<OpenEnv>(options, std::move(endpoint), seed);
  if (use == AdapterUse::kProblems) {
    ECHO_TRY(adapter->read_evaluation());
  }
  return std::unique_ptr<Adapter>(std::move(adapter));
}

}  // namespace

const BuiltIn kOpenEnv{
    .name = "openenv",
    .meaning =
        "An environment behind a server that speaks OpenEnv's protocol (docs/how-to/connect-an-environment-server.md)",
    .read_options = [](ConfigSection s) { Options().read(s, AdapterUse::kProblems); },
    .make = make,
    .many_turns = true};

}  // namespace echoline::data_plane

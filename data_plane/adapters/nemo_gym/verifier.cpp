#include "data_plane/adapters/nemo_gym/verifier.hpp"

#include <algorithm>

#include "base/text.hpp"

namespace echoline::data_plane::nemo_gym {
namespace {

constexpr std::size_t kAnswerBytesMax = 4u << 20;
// How often the thread looks for new requests while it waits for answers.
constexpr Duration kSlice = std::chrono::milliseconds(5);

bool temporary(int status) { return status == 408 || status == 409 || status == 425 || status == 429 || status >= 500; }

}  // namespace

Verifier::Verifier(VerifierOptions options)
    : options_(std::move(options)),
      http_("", options_.deadline, {.answer_max = kAnswerBytesMax}),
      thread_([this] { work(); }) {}

Verifier::~Verifier() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void Verifier::ask(std::string seed_body, std::string verify_body, Done done) {
  {
    const std::lock_guard lock(mutex_);
    if (!stopping_ && inside_ < kInsideMax) {
      ++inside_;
      Asked asked;
      asked.seed_body = std::move(seed_body);
      asked.verify_body = std::move(verify_body);
      asked.done = std::move(done);
      new_.push_back(std::move(asked));
      changed_.notify_all();
      return;
    }
  }
  done(fail(Code::kExhausted, "verify", "{} responses are waiting already; lower the load or raise at_once",
            kInsideMax));
}

void Verifier::work() {
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      const auto ready = [this] { return stopping_ || !new_.empty(); };
      if (sent_.empty() && waiting_.empty())
        changed_.wait(lock, ready);
      else if (sent_.empty())
        changed_.wait_for(lock, std::chrono::milliseconds(20), ready);
      if (stopping_) break;
      std::move(new_.begin(), new_.end(), std::back_inserter(waiting_));
      new_.clear();
    }
    const TimePoint now = clock_.now();
    for (std::size_t left = waiting_.size(); left > 0 && sent_.size() < options_.at_once; --left) {
      Asked next = std::move(waiting_.front());
      waiting_.pop_front();
      if (next.not_before > now)
        waiting_.push_back(std::move(next));
      else
        send(std::move(next));
    }
    if (!sent_.empty())
      for (HttpAnswer& answer : http_.poll(kSlice)) hear(std::move(answer));
  }
  std::deque<Asked> left = std::move(waiting_);
  for (auto& [request, asked] : sent_) left.push_back(std::move(asked));
  {
    const std::lock_guard lock(mutex_);
    std::move(new_.begin(), new_.end(), std::back_inserter(left));
    new_.clear();
  }
  for (Asked& asked : left) asked.done(fail(Code::kCancelled, "verify", "the run ends"));
}

void Verifier::send(Asked asked) {
  const bool seed = options_.sessions && !asked.seeded;
  HttpRequest request;
  request.method = "POST";
  request.url = options_.url + (seed ? "/seed_session" : "/verify");
  request.body = seed ? asked.seed_body : asked.verify_body;
  request.cookies = asked.cookies;
  const std::uint64_t id = http_.send(request);
  sent_.emplace(id, std::move(asked));
}

void Verifier::hear(HttpAnswer answer) {
  auto node = sent_.extract(answer.request);
  if (node.empty()) return;
  Asked asked = std::move(node.mapped());
  const bool seed = options_.sessions && !asked.seeded;
  const std::string where = options_.url + (seed ? "/seed_session" : "/verify");
  if (answer.status == 0) return again(std::move(asked), fmt::format("{}: {}", where, answer.trouble), {});
  if (temporary(answer.status))
    return again(std::move(asked), fmt::format("{}: HTTP {}: {}", where, answer.status, printable(answer.body, 300)),
                 answer.retry_after);
  if (seed && answer.status == 200) {
    asked.seeded = true;
    asked.cookies = std::move(answer.cookies);
    return send(std::move(asked));
  }
  {
    const std::lock_guard lock(mutex_);
    --inside_;
  }
  if (answer.status != 200)
    return asked.done(fail(Code::kInvalid, "verify", "{}: expected HTTP 200, found {}: {}", where, answer.status,
                           printable(answer.body, 300)));
  asked.done(std::move(answer.body));
}

void Verifier::again(Asked asked, std::string why, Duration at_least) {
  if (++asked.tries >= options_.tries) {
    {
      const std::lock_guard lock(mutex_);
      --inside_;
    }
    return asked.done(fail(Code::kUnavailable, "verify", "{} (tried {} times)", why, asked.tries));
  }
  Duration pause = options_.pause_first;
  for (std::uint32_t i = 1; i < asked.tries && pause < options_.pause_max; ++i) pause *= 2;
  asked.seeded = false;
  asked.cookies.clear();
  asked.not_before =
      clock_.now() + std::max(std::min(pause, options_.pause_max), std::min(at_least, options_.pause_max));
  waiting_.push_back(std::move(asked));
}

}  // namespace echoline::data_plane::nemo_gym

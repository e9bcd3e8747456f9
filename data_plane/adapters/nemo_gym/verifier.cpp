// Implements Verifier for the adapter nemo_gym.
#include "data_plane/adapters/nemo_gym/verifier.hpp"

#include <algorithm>

#include "base/text.hpp"

namespace echoline::data_plane::nemo_gym {
namespace {

constexpr std::size_t kAnswerBytesMax = 4u << 20;
// Longest wait for answers before the thread looks for new requests.
constexpr Duration kPollTime = std::chrono::milliseconds(5);
constexpr Duration kRetryCheckInterval = std::chrono::milliseconds(20);
constexpr std::size_t kAnswerBytesShown = 300;

// Whether a retry may help after this HTTP status: timeout (408), conflict (409), too early (425), too many requests
// (429), an error of the server (5xx).
bool is_temporary(int status) {
  return status == 408 || status == 409 || status == 425 || status == 429 || status >= 500;
}

}  // namespace

Verifier::Verifier(VerifierOptions options)
    : options_(std::move(options)),
      http_(/*key=*/"", options_.deadline, {.answer_bytes_max = kAnswerBytesMax}),
      thread_([this] { run_thread(); }) {}

Verifier::~Verifier() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_thread_.notify_all();
  thread_.join();
}

void Verifier::verify(std::string seed_body, std::string verify_body, AnswerHandler handler) {
  {
    const std::lock_guard lock(mutex_);
    if (!stopping_ && unanswered_count_ < kUnansweredMax) {
      ++unanswered_count_;
      PendingRequest pending;
      pending.seed_body = std::move(seed_body);
      pending.verify_body = std::move(verify_body);
      pending.handler = std::move(handler);
      new_requests_.push_back(std::move(pending));
      wake_thread_.notify_all();
      return;
    }
  }
  handler(fail(Code::kExhausted, "verify", "{} responses are waiting already; lower the load or raise at_once",
               kUnansweredMax));
}

void Verifier::run_thread() {
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      // With requests in flight, http_.poll() below waits instead.
      const auto ready = [this] { return stopping_ || !new_requests_.empty(); };
      if (sent_.empty() && unsent_.empty())
        wake_thread_.wait(lock, ready);
      else if (sent_.empty())
        wake_thread_.wait_for(lock, kRetryCheckInterval, ready);
      if (stopping_) break;
      std::move(new_requests_.begin(), new_requests_.end(), std::back_inserter(unsent_));
      new_requests_.clear();
    }
    const TimePoint now = clock_.now();
    // Looks at each unsent request once. One whose pause is not over goes to the end of the queue.
    for (std::size_t unchecked_count = unsent_.size(); unchecked_count > 0 && sent_.size() < options_.in_flight_max;
         --unchecked_count) {
      PendingRequest next = std::move(unsent_.front());
      unsent_.pop_front();
      if (next.not_before > now)
        unsent_.push_back(std::move(next));
      else
        send(std::move(next));
    }
    if (!sent_.empty())
      for (HttpAnswer& answer : http_.poll(kPollTime)) on_answer(std::move(answer));
  }
  std::deque<PendingRequest> unanswered = std::move(unsent_);
  for (auto& [request, pending] : sent_) unanswered.push_back(std::move(pending));
  {
    const std::lock_guard lock(mutex_);
    std::move(new_requests_.begin(), new_requests_.end(), std::back_inserter(unanswered));
    new_requests_.clear();
  }
  for (PendingRequest& pending : unanswered) pending.handler(fail(Code::kCancelled, "verify", "the run is ending"));
}

void Verifier::send(PendingRequest pending) {
  const bool is_seed_request = options_.sessions && !pending.has_session;
  HttpRequest request;
  request.method = "POST";
  request.url = options_.url + (is_seed_request ? "/seed_session" : "/verify");
  request.body = is_seed_request ? pending.seed_body : pending.verify_body;
  request.cookies = pending.cookies;
  const std::uint64_t id = http_.send(request);
  sent_.emplace(id, std::move(pending));
}

void Verifier::on_answer(HttpAnswer answer) {
  auto node = sent_.extract(answer.request);
  if (node.empty()) return;
  PendingRequest pending = std::move(node.mapped());
  const bool is_seed_request = options_.sessions && !pending.has_session;
  const std::string url = options_.url + (is_seed_request ? "/seed_session" : "/verify");
  if (answer.status == 0)
    return retry_or_fail(std::move(pending), fmt::format("{}: {}", url, answer.trouble), /*retry_after=*/{});
  if (is_temporary(answer.status))
    return retry_or_fail(std::move(pending),
                         fmt::format("{}: HTTP {}: {}", url, answer.status, printable(answer.body, kAnswerBytesShown)),
                         answer.retry_after);
  if (is_seed_request && answer.status == 200) {
    pending.has_session = true;
    pending.cookies = std::move(answer.cookies);
    return send(std::move(pending));
  }
  {
    const std::lock_guard lock(mutex_);
    --unanswered_count_;
  }
  if (answer.status != 200)
    return pending.handler(fail(Code::kInvalid, "verify", "{}: expected HTTP 200, found {}: {}", url, answer.status,
                                printable(answer.body, kAnswerBytesShown)));
  pending.handler(std::move(answer.body));
}

void Verifier::retry_or_fail(PendingRequest pending, std::string reason, Duration retry_after) {
  if (++pending.tries >= options_.tries) {
    {
      const std::lock_guard lock(mutex_);
      --unanswered_count_;
    }
    return pending.handler(fail(Code::kUnavailable, "verify", "{} (tried {} times)", reason, pending.tries));
  }
  Duration pause = options_.pause_first;
  for (std::uint32_t i = 1; i < pending.tries && pause < options_.pause_max; ++i) pause *= 2;
  // Begins a new session, because the failed try may have ended the old one.
  pending.has_session = false;
  pending.cookies.clear();
  pending.not_before = clock_.now() + std::min(std::max(pause, retry_after), options_.pause_max);
  unsent_.push_back(std::move(pending));
}

}  // namespace echoline::data_plane::nemo_gym

// A client for servers with OpenAI's HTTP interface. Used by evaluations, and by tasks whose answers a model judges.
#include "base/text_server.hpp"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/random.hpp"
#include "base/text.hpp"

namespace echoline {
namespace {

using nlohmann::json;

constexpr std::string_view kOperation = "ask server";
constexpr std::size_t kAnswerBytesMax = 16u << 20;
constexpr std::size_t kExcerptBytesMax = 300;
constexpr int kTriesUnansweredMax = 3;                       // tries at an address that has never answered
constexpr std::int64_t kTokensMax = 1 << 30;                 // a larger count in an answer is ignored
constexpr Duration kClientTimeout = std::chrono::hours(24);  // the client's limit; each request has its own

template <class... Args>
Error unexpected_answer(fmt::format_string<Args...> format, Args&&... args) {
  return fail(Code::kCorrupt, kOperation, format, std::forward<Args>(args)...);
}

std::string excerpt(const json& value) {
  return printable(value.dump(/*indent=*/-1, ' ', /*ensure_ascii=*/false, json::error_handler_t::replace),
                   kExcerptBytesMax);
}

// The member of an object; null if there is none.
const json& member(const json& value, const char* key) {
  static const json kNone;
  if (!value.is_object()) return kNone;
  const auto it = value.find(key);
  return it == value.end() ? kNone : *it;
}

std::string text_or_empty(const json& value) { return value.is_string() ? value.get<std::string>() : std::string(); }

// The fields of an error response. Servers use one of four forms: {"error": {"message": ..., "code": ..., "type": ...,
// "param": ...}}, {"error": "text"}, {"message": "text"} or {"detail": "text"}.
struct ServerError {
  std::string message, code, type, param;
};

ServerError parse_server_error(std::string_view body) {
  const json parsed = json::parse(body, nullptr, /*allow_exceptions=*/false);
  const json& error = member(parsed, "error");
  ServerError server_error{.message = text_or_empty(member(error, "message")),
                           .code = text_or_empty(member(error, "code")),
                           .type = text_or_empty(member(error, "type")),
                           .param = text_or_empty(member(error, "param"))};
  for (const json* candidate : {&error, &member(parsed, "message"), &member(parsed, "detail")})
    if (server_error.message.empty()) server_error.message = text_or_empty(*candidate);
  // Bounds the copy; printable() then cuts it. A character has up to 4 bytes.
  if (server_error.message.empty()) server_error.message = std::string(body.substr(0, 4 * kExcerptBytesMax));
  server_error.message = printable(server_error.message, kExcerptBytesMax);
  return server_error;
}

std::string path_of(const TextServerOptions& options) { return options.chat ? "/chat/completions" : "/completions"; }

}  // namespace

std::string text_request(const TextServerOptions& options, const TextQuestion& question,
                         bool use_max_completion_tokens) {
  json body = {{"model", options.model},
               {"temperature", question.temperature},
               {"top_p", question.top_p},
               {"stream", false},
               {"n", 1}};
  body[use_max_completion_tokens ? "max_completion_tokens" : "max_tokens"] = question.tokens_max;
  if (question.seed) body["seed"] = *question.seed;
  if (options.chat) {
    body["messages"] = json::array();
    for (const ChatMessage& m : question.messages)
      body["messages"].push_back({{"role", m.role}, {"content", m.content}});
    const json template_options = json::parse(question.template_options_json, nullptr, /*allow_exceptions=*/false);
    if (template_options.is_object() && !template_options.empty()) body["chat_template_kwargs"] = template_options;
  } else {
    body["prompt"] = question.prompt;
  }
  return body.dump(/*indent=*/-1, ' ', /*ensure_ascii=*/false, json::error_handler_t::replace);
}

Result<TextAnswer> parse_text_answer(std::string_view body, bool chat) {
  const json parsed = json::parse(body, nullptr, /*allow_exceptions=*/false);
  if (!parsed.is_object())
    return unexpected_answer("expected a JSON object, found '{}'", printable(body, kExcerptBytesMax));
  const json& choices = member(parsed, "choices");
  if (!choices.is_array() || choices.size() != 1)
    return unexpected_answer("expected one choice, found {}", excerpt(parsed));
  const json& choice = choices.front();
  const json& text = chat ? member(member(choice, "message"), "content") : member(choice, "text");
  const std::string finish_reason = text_or_empty(member(choice, "finish_reason"));
  // A server that aborts or loses a request gives no reason, or one of these.
  if (finish_reason.empty() || finish_reason == "abort" || finish_reason == "error")
    return unexpected_answer("the answer is incomplete: finish_reason is {}", excerpt(member(choice, "finish_reason")));
  // A chat's content is null if the model refuses, or has used its limit of tokens for thinking.
  if (!text.is_string() && !(chat && text.is_null() && member(choice, "message").is_object()))
    return unexpected_answer("expected the text of an answer, found {}", excerpt(choice));
  TextAnswer answer{.text = text_or_empty(text), .finished = finish_reason != "length", .tokens = {}};
  if (const json& count = member(member(parsed, "usage"), "completion_tokens");
      count.is_number_integer() && count >= 0 && count <= kTokensMax)
    answer.tokens = count.get<std::int64_t>();
  return answer;
}

RequestFailure classify_failure(const TextServerOptions& options, const HttpAnswer& answer) {
  using Kind = RequestFailure::Kind;
  const std::string where = options.url + path_of(options);
  const auto failure = [&]<class... Args>(Kind kind, Code code, fmt::format_string<Args...> format, Args&&... args) {
    return RequestFailure{
        .kind = kind,
        .error = fail(code, kOperation, "{}: {}", where, fmt::format(format, std::forward<Args>(args)...)),
        .wants_max_completion_tokens = false};
  };
  // Without a response the connection failed or timed out.
  if (answer.status == 0) return failure(Kind::kRetryable, Code::kUnavailable, "{}", answer.trouble);
  const ServerError server_error = parse_server_error(answer.body);
  const int status = answer.status;  // codes of RFC 9110; 425 is Too Early, 429 Too Many Requests
  if (status == 429 && (server_error.code == "insufficient_quota" || server_error.type == "insufficient_quota"))
    return failure(Kind::kServerUnusable, Code::kExhausted, "the account has no credit left: {}", server_error.message);
  if (status == 408 || status == 409 || status == 425 || status == 429 ||
      (status >= 500 && status != 501 && status != 505))
    return failure(Kind::kRetryable, Code::kUnavailable, "HTTP {}: {}", status, server_error.message);
  if (status == 401 || status == 403)
    return failure(Kind::kServerUnusable, Code::kInvalid, "the server refuses {}: {}",
                   options.key.empty() ? "to answer without a key" : "the key", server_error.message);
  if (status == 404)
    return failure(Kind::kServerUnusable, Code::kNotFound,
                   "the server has no model '{}', or does not exist at this address; {}/models lists its models: {}",
                   printable(options.model), options.url, server_error.message);
  if (status >= 300 && status < 400)
    return failure(Kind::kServerUnusable, Code::kInvalid,
                   "the server redirects (HTTP {}), which is not followed: set the new address", status);
  const bool is_question_rejected = status == 400 || status == 413 || status == 422;
  RequestFailure refusal = failure(is_question_rejected ? Kind::kQuestionRefused : Kind::kServerUnusable,
                                   Code::kInvalid, "HTTP {}: {}", status, server_error.message);
  refusal.wants_max_completion_tokens =
      status == 400 &&
      (server_error.param == "max_tokens" || server_error.message.find("max_completion_tokens") != std::string::npos);
  return refusal;
}

Result<TextServerClient> TextServerClient::make(TextServerOptions options, const Clock& clock) {
  options.url = without_trailing_slashes(options.url);
  if (!options.url.starts_with("http://") && !options.url.starts_with("https://"))
    return fail(Code::kInvalid, kOperation, "expected an address like http://127.0.0.1:8000/v1, found '{}'",
                printable(options.url));
  if (options.model.empty())
    return fail(Code::kInvalid, kOperation, "{}: expected the name of a model; {}/models lists them", options.url,
                options.url);
  if (options.requests_in_flight_max < 1 || options.tries_max < 1 || options.timeout <= Duration{} ||
      options.first_retry_delay <= Duration{})
    return fail(Code::kInvalid, kOperation, "requests at once, tries and times must be above 0");
  return TextServerClient(std::move(options), clock);
}

TextServerClient::TextServerClient(TextServerOptions options, const Clock& clock)
    : options_(std::move(options)),
      clock_(&clock),
      http_(std::make_unique<HttpClient>(options_.key, kClientTimeout,
                                         HttpLimits{.answer_bytes_max = kAnswerBytesMax})) {}

Status TextServerClient::submit(TextQuestion question) {
  if (pending_count() >= kPendingQuestionsMax)
    return fail(Code::kExhausted, kOperation, "{} questions are in progress: wait for answers first",
                kPendingQuestionsMax);
  waiting_.push_back({.question = std::move(question)});
  return ok();
}

std::vector<TextServerClient::Outcome> TextServerClient::poll(Duration wait) {
  const TimePoint now = clock_->now();
  send_due(now);
  if (done_.empty()) {
    // Does not wait longer than until a waiting question is due.
    if (sent_.size() < options_.requests_in_flight_max)
      for (const PendingQuestion& pending : waiting_) {
        const TimePoint due_at = std::max(pending.not_before, no_request_before_);
        wait = std::min(wait, std::max(due_at - now, Duration{}));
      }
    for (const HttpAnswer& answer : http_->poll(wait)) on_response(answer, clock_->now());
    send_due(clock_->now());
  }
  return std::exchange(done_, {});
}

void TextServerClient::cancel(std::uint64_t id) {
  std::erase_if(waiting_, [&](const PendingQuestion& pending) { return pending.question.id == id; });
  std::erase_if(done_, [&](const Outcome& outcome) { return outcome.id == id; });
  for (auto it = sent_.begin(); it != sent_.end();) {
    const auto sent = it++;
    if (sent->second.question.id != id) continue;
    http_->cancel(sent->first);
    sent_.erase(sent);
  }
}

Result<TextAnswer> TextServerClient::ask(const TextQuestion& question) {
  ECHO_CHECK(pending_count() == 0, "{} questions are in progress", pending_count());
  ECHO_TRY(submit(question));
  for (;;) {
    std::vector<Outcome> outcomes = poll(std::chrono::seconds(1));
    if (!outcomes.empty()) return std::move(outcomes.front().answer);
  }
}

void TextServerClient::send_due(TimePoint now) {
  for (auto it = waiting_.begin(); it != waiting_.end();) {
    if (fatal_error_) {
      done_.push_back({.id = it->question.id, .answer = *fatal_error_});
      it = waiting_.erase(it);
    } else if (sent_.size() >= options_.requests_in_flight_max || now < no_request_before_) {
      return;
    } else if (now < it->not_before) {
      ++it;
    } else {
      const std::uint64_t request_id =
          http_->send({.method = "POST",
                       .url = options_.url + path_of(options_),
                       .body = text_request(options_, it->question, use_max_completion_tokens_),
                       .timeout = options_.timeout});
      ++it->tries;
      it->use_max_completion_tokens = use_max_completion_tokens_;
      sent_.emplace(request_id, std::move(*it));
      it = waiting_.erase(it);
    }
  }
}

void TextServerClient::on_response(const HttpAnswer& response, TimePoint now) {
  const auto it = sent_.find(response.request);
  if (it == sent_.end()) return;
  PendingQuestion pending = std::move(it->second);
  sent_.erase(it);
  any_response_ = any_response_ || response.status != 0;
  if (response.status == 200) {
    auto answer = parse_text_answer(response.body, options_.chat);
    if (answer) return done_.push_back({.id = pending.question.id, .answer = std::move(answer)});
    Error error = std::move(answer).error();
    error.detail = fmt::format("{}{}: {}", options_.url, path_of(options_), error.detail);
    return retry_or_fail(std::move(pending), response,
                         {.kind = RequestFailure::Kind::kRetryable, .error = std::move(error)}, now);
  }
  RequestFailure failure = classify_failure(options_, response);
  if (failure.wants_max_completion_tokens && !pending.use_max_completion_tokens) {
    // Sends the question again, with the name of the limit that the server accepts.
    use_max_completion_tokens_ = true;
    return waiting_.push_front(std::move(pending));
  }
  if (failure.kind == RequestFailure::Kind::kRetryable)
    return retry_or_fail(std::move(pending), response, std::move(failure), now);
  done_.push_back({.id = pending.question.id,
                   .answer = failure.error,
                   .concerns_only_this_question = failure.kind == RequestFailure::Kind::kQuestionRefused});
  if (failure.kind != RequestFailure::Kind::kServerUnusable) return;
  fatal_error_ = std::move(failure.error);
  for (const auto& [request, other] : std::exchange(sent_, {})) {
    http_->cancel(request);
    done_.push_back({.id = other.question.id, .answer = *fatal_error_});
  }
}

void TextServerClient::retry_or_fail(PendingQuestion pending, const HttpAnswer& response, RequestFailure failure,
                                     TimePoint now) {
  const int tries_max = any_response_ ? options_.tries_max : std::min(options_.tries_max, kTriesUnansweredMax);
  if (pending.tries >= tries_max) {
    failure.error.detail += fmt::format(" ({} times)", pending.tries);
    return done_.push_back({.id = pending.question.id, .answer = std::move(failure.error)});
  }
  Duration pause = options_.first_retry_delay;
  for (int i = 1; i < pending.tries && pause < options_.retry_delay_max; ++i) pause *= 2;
  pause = std::min(pause, options_.retry_delay_max);
  // Adds up to a quarter of the pause, so that questions that failed together are not retried together.
  constexpr std::uint64_t kJitterSteps = 1024;
  // Computed from the question and its try (rarely above 64), not drawn at random, so that a run is repeatable.
  const std::uint64_t jitter =
      mix64(pending.question.id * 64 + static_cast<std::uint64_t>(pending.tries)) % kJitterSteps;
  pending.not_before =
      now + pause + pause * static_cast<Duration::rep>(jitter) / static_cast<Duration::rep>(4 * kJitterSteps);
  if (response.retry_after > Duration{})
    no_request_before_ = std::max(no_request_before_, now + std::min(response.retry_after, options_.retry_delay_max));
  waiting_.push_back(std::move(pending));
}

}  // namespace echoline

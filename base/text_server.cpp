// Sends questions to servers with OpenAI's HTTP interface, for evaluations, judges of tasks and held-out questions.
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
constexpr std::size_t kAnswerMax = 16u << 20;
constexpr std::size_t kExcerpt = 300;
constexpr int kTriesUnanswered = 3;                          // most tries at an address that has never answered
constexpr Duration kClientTimeout = std::chrono::hours(24);  // the client's limit; each request has its own

template <class... Args>
Error unexpected_answer(fmt::format_string<Args...> format, Args&&... args) {
  return fail(Code::kCorrupt, kOperation, format, std::forward<Args>(args)...);
}

std::string excerpt(const json& value) {
  return printable(value.dump(-1, ' ', false, json::error_handler_t::replace), kExcerpt);
}

const json& member(const json& value, const char* key) {
  static const json kNone;
  if (!value.is_object()) return kNone;
  const auto found = value.find(key);
  return found == value.end() ? kNone : *found;
}

std::string text_or_empty(const json& value) { return value.is_string() ? value.get<std::string>() : std::string(); }

// A server's error message: {"error": {"message", "code", "type", "param"}}, {"message"}, {"detail"} or {"error":
// text}.
struct ServerError {
  std::string message, code, type, param;
};

ServerError parse_server_error(std::string_view body) {
  const json parsed = json::parse(body, nullptr, false);
  const json& error = member(parsed, "error");
  ServerError server_error{text_or_empty(member(error, "message")), text_or_empty(member(error, "code")),
                           text_or_empty(member(error, "type")), text_or_empty(member(error, "param"))};
  for (const json* other : {&error, &member(parsed, "message"), &member(parsed, "detail")})
    if (server_error.message.empty()) server_error.message = text_or_empty(*other);
  if (server_error.message.empty()) server_error.message = std::string(body.substr(0, 4 * kExcerpt));
  server_error.message = printable(server_error.message, kExcerpt);
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
    const json extra = json::parse(question.template_options_json, nullptr, false);
    if (extra.is_object() && !extra.empty()) body["chat_template_kwargs"] = extra;
  } else {
    body["prompt"] = question.prompt;
  }
  return body.dump(-1, ' ', false, json::error_handler_t::replace);
}

Result<TextAnswer> parse_text_answer(std::string_view body, bool chat) {
  const json parsed = json::parse(body, nullptr, false);
  if (!parsed.is_object()) return unexpected_answer("expected a JSON object, found '{}'", printable(body, kExcerpt));
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
  TextAnswer answer{text_or_empty(text), finish_reason != "length", {}};
  if (const json& count = member(member(parsed, "usage"), "completion_tokens");
      count.is_number_integer() && count >= 0 && count <= 1 << 30)
    answer.tokens = count.get<std::int64_t>();
  return answer;
}

TextTrouble text_trouble(const TextServerOptions& options, const HttpAnswer& answer) {
  using Kind = TextTrouble::Kind;
  const std::string where = options.url + path_of(options);
  const auto trouble = [&]<class... Args>(Kind kind, Code code, fmt::format_string<Args...> format, Args&&... args) {
    return TextTrouble{kind, fail(code, kOperation, "{}: {}", where, fmt::format(format, std::forward<Args>(args)...)),
                       false};
  };
  if (answer.status == 0) return trouble(Kind::kRetryable, Code::kUnavailable, "{}", answer.trouble);
  const ServerError server_error = parse_server_error(answer.body);
  const int status = answer.status;
  if (status == 429 && (server_error.code == "insufficient_quota" || server_error.type == "insufficient_quota"))
    return trouble(Kind::kServerUnusable, Code::kExhausted, "the account has no credit left: {}", server_error.message);
  if (status == 408 || status == 409 || status == 425 || status == 429 ||
      (status >= 500 && status != 501 && status != 505))
    return trouble(Kind::kRetryable, Code::kUnavailable, "HTTP {}: {}", status, server_error.message);
  if (status == 401 || status == 403)
    return trouble(Kind::kServerUnusable, Code::kInvalid, "the server refuses {}: {}",
                   options.key.empty() ? "to answer without a key" : "the key", server_error.message);
  if (status == 404)
    return trouble(Kind::kServerUnusable, Code::kNotFound,
                   "the server has no model '{}', or does not exist at this address; {}/models lists its models: {}",
                   printable(options.model), options.url, server_error.message);
  if (status >= 300 && status < 400)
    return trouble(Kind::kServerUnusable, Code::kInvalid,
                   "the server redirects (HTTP {}), which is not followed: set the new address", status);
  const bool is_questions_fault = status == 400 || status == 413 || status == 422;
  TextTrouble refused = trouble(is_questions_fault ? Kind::kQuestionRefused : Kind::kServerUnusable, Code::kInvalid,
                                "HTTP {}: {}", status, server_error.message);
  refused.wants_max_completion_tokens =
      status == 400 &&
      (server_error.param == "max_tokens" || server_error.message.find("max_completion_tokens") != std::string::npos);
  return refused;
}

Result<TextServerClient> TextServerClient::make(TextServerOptions options, const Clock& clock) {
  options.url = service_url(options.url);
  if (!options.url.starts_with("http://") && !options.url.starts_with("https://"))
    return fail(Code::kInvalid, kOperation, "expected an address like http://127.0.0.1:8000/v1, found '{}'",
                printable(options.url));
  if (options.model.empty())
    return fail(Code::kInvalid, kOperation, "{}: expected the name of a model; {}/models lists them", options.url,
                options.url);
  if (options.at_once < 1 || options.tries_max < 1 || options.timeout <= Duration{} ||
      options.retry_first <= Duration{})
    return fail(Code::kInvalid, kOperation, "requests at once, tries and times must be above 0");
  return TextServerClient(std::move(options), clock);
}

TextServerClient::TextServerClient(TextServerOptions options, const Clock& clock)
    : options_(std::move(options)),
      clock_(&clock),
      http_(std::make_unique<HttpClient>(options_.key, kClientTimeout, HttpLimits{.answer_max = kAnswerMax})) {}

Status TextServerClient::submit(TextQuestion question) {
  if (in_flight() >= kInFlightMax)
    return fail(Code::kExhausted, kOperation, "{} questions are in progress: wait for answers first", kInFlightMax);
  waiting_.push_back({std::move(question)});
  return ok();
}

std::vector<TextServerClient::Outcome> TextServerClient::poll(Duration wait) {
  const TimePoint now = clock_->now();
  send_due(now);
  if (done_.empty()) {
    // A waiting question may be due before the next answer.
    for (const PendingQuestion& pending : waiting_)
      if (sent_.size() < options_.at_once)
        wait = std::min(wait, std::max({pending.not_before - now, no_request_before_ - now, Duration{}}));
    for (const HttpAnswer& answer : http_->poll(wait)) on_response(answer, clock_->now());
    send_due(clock_->now());
  }
  return std::exchange(done_, {});
}

void TextServerClient::cancel(std::uint64_t id) {
  std::erase_if(waiting_, [&](const PendingQuestion& pending) { return pending.question.id == id; });
  std::erase_if(done_, [&](const Outcome& ended) { return ended.id == id; });
  for (auto it = sent_.begin(); it != sent_.end();) {
    const auto sent = it++;
    if (sent->second.question.id != id) continue;
    http_->cancel(sent->first);
    sent_.erase(sent);
  }
}

Result<TextAnswer> TextServerClient::ask(const TextQuestion& question) {
  ECHO_CHECK(in_flight() == 0, "{} questions are in progress", in_flight());
  ECHO_TRY(submit(question));
  for (;;) {
    std::vector<Outcome> ended = poll(std::chrono::seconds(1));
    if (!ended.empty()) return std::move(ended.front().answer);
  }
}

void TextServerClient::send_due(TimePoint now) {
  for (auto it = waiting_.begin(); it != waiting_.end();) {
    if (fatal_error_) {
      done_.push_back({it->question.id, *fatal_error_, false});
      it = waiting_.erase(it);
    } else if (sent_.size() >= options_.at_once || now < no_request_before_) {
      return;
    } else if (now < it->not_before) {
      ++it;
    } else {
      const std::uint64_t request =
          http_->send({"POST", options_.url + path_of(options_),
                       text_request(options_, it->question, use_max_completion_tokens_), options_.timeout});
      ++it->tries;
      it->use_max_completion_tokens = use_max_completion_tokens_;
      sent_.emplace(request, std::move(*it));
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
    if (answer) return done_.push_back({pending.question.id, std::move(answer), false});
    Error error = std::move(answer).error();
    error.detail = fmt::format("{}{}: {}", options_.url, path_of(options_), error.detail);
    return retry_or_fail(std::move(pending), response, {TextTrouble::Kind::kRetryable, std::move(error), false}, now);
  }
  TextTrouble trouble = text_trouble(options_, response);
  if (trouble.wants_max_completion_tokens && !pending.use_max_completion_tokens) {
    use_max_completion_tokens_ = true;
    return waiting_.push_front(std::move(pending));
  }
  if (trouble.kind == TextTrouble::Kind::kRetryable)
    return retry_or_fail(std::move(pending), response, std::move(trouble), now);
  done_.push_back({pending.question.id, trouble.error, trouble.kind == TextTrouble::Kind::kQuestionRefused});
  if (trouble.kind != TextTrouble::Kind::kServerUnusable) return;
  fatal_error_ = std::move(trouble.error);
  for (const auto& [request, other] : std::exchange(sent_, {})) {
    http_->cancel(request);
    done_.push_back({other.question.id, *fatal_error_, false});
  }
}

void TextServerClient::retry_or_fail(PendingQuestion pending, const HttpAnswer& response, TextTrouble trouble,
                                     TimePoint now) {
  if (pending.tries >= (any_response_ ? options_.tries_max : std::min(options_.tries_max, kTriesUnanswered))) {
    trouble.error.detail += fmt::format(" ({} times)", pending.tries);
    return done_.push_back({pending.question.id, std::move(trouble.error), false});
  }
  Duration pause = options_.retry_first;
  for (int i = 1; i < pending.tries && pause < options_.retry_max; ++i) pause *= 2;
  pause = std::min(pause, options_.retry_max);
  // Adds up to a quarter of the pause, so that questions that failed together are not retried together.
  const std::uint64_t jitter = mix64(pending.question.id * 64 + static_cast<std::uint64_t>(pending.tries)) % 1024;
  pending.not_before = now + pause + pause * static_cast<Duration::rep>(jitter) / 4096;
  if (response.retry_after > Duration{})
    no_request_before_ = std::max(no_request_before_, now + std::min(response.retry_after, options_.retry_max));
  waiting_.push_back(std::move(pending));
}

}  // namespace echoline

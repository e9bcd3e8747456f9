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
constexpr int kTriesUnheard = 3;                       // for an address that has never answered
constexpr Duration kForever = std::chrono::hours(24);  // the client's limit; each request has its own

template <class... Args>
Error odd(fmt::format_string<Args...> format, Args&&... args) {
  return fail(Code::kCorrupt, kOperation, format, std::forward<Args>(args)...);
}

std::string excerpt(const json& value) {
  return printable(value.dump(-1, ' ', false, json::error_handler_t::replace), kExcerpt);
}

const json& at(const json& value, const char* key) {
  static const json kNone;
  if (!value.is_object()) return kNone;
  const auto found = value.find(key);
  return found == value.end() ? kNone : *found;
}

std::string word(const json& value) { return value.is_string() ? value.get<std::string>() : std::string(); }

// A server's error message: {"error": {"message", "code", "type", "param"}}, {"message"}, {"detail"} or {"error":
// text}.
struct Complaint {
  std::string message, code, type, param;
};

Complaint complaint(std::string_view body) {
  const json parsed = json::parse(body, nullptr, false);
  const json& error = at(parsed, "error");
  Complaint c{word(at(error, "message")), word(at(error, "code")), word(at(error, "type")), word(at(error, "param"))};
  for (const json* other : {&error, &at(parsed, "message"), &at(parsed, "detail")})
    if (c.message.empty()) c.message = word(*other);
  if (c.message.empty()) c.message = std::string(body.substr(0, 4 * kExcerpt));
  c.message = printable(c.message, kExcerpt);
  return c;
}

std::string path_of(const TextServerOptions& options) { return options.chat ? "/chat/completions" : "/completions"; }

}  // namespace

std::string text_request(const TextServerOptions& options, const TextQuestion& question, bool completion_tokens) {
  json body = {{"model", options.model},
               {"temperature", question.temperature},
               {"top_p", question.top_p},
               {"stream", false},
               {"n", 1}};
  body[completion_tokens ? "max_completion_tokens" : "max_tokens"] = question.tokens_max;
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
  if (!parsed.is_object()) return odd("expected a JSON object, found '{}'", printable(body, kExcerpt));
  const json& choices = at(parsed, "choices");
  if (!choices.is_array() || choices.size() != 1) return odd("expected one choice, found {}", excerpt(parsed));
  const json& choice = choices.front();
  const json& text = chat ? at(at(choice, "message"), "content") : at(choice, "text");
  const std::string why = word(at(choice, "finish_reason"));
  // A server that aborts or loses a request gives no reason, or one of these.
  if (why.empty() || why == "abort" || why == "error")
    return odd("the answer is incomplete: finish_reason is {}", excerpt(at(choice, "finish_reason")));
  // Null: the model refuses, or has used the limit for thinking.
  if (!text.is_string() && !(chat && text.is_null() && at(choice, "message").is_object()))
    return odd("expected the text of an answer, found {}", excerpt(choice));
  TextAnswer answer{word(text), why != "length", {}};
  if (const json& count = at(at(parsed, "usage"), "completion_tokens");
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
  if (answer.status == 0) return trouble(Kind::kAgain, Code::kUnavailable, "{}", answer.trouble);
  const Complaint said = complaint(answer.body);
  const int status = answer.status;
  if (status == 429 && (said.code == "insufficient_quota" || said.type == "insufficient_quota"))
    return trouble(Kind::kServer, Code::kExhausted, "the account has no credit left: {}", said.message);
  if (status == 408 || status == 409 || status == 425 || status == 429 ||
      (status >= 500 && status != 501 && status != 505))
    return trouble(Kind::kAgain, Code::kUnavailable, "HTTP {}: {}", status, said.message);
  if (status == 401 || status == 403)
    return trouble(Kind::kServer, Code::kInvalid, "the server refuses {}: {}",
                   options.key.empty() ? "to answer without a key" : "the key", said.message);
  if (status == 404)
    return trouble(Kind::kServer, Code::kNotFound,
                   "the server has no model '{}', or does not exist at this address; {}/models lists its models: {}",
                   printable(options.model), options.url, said.message);
  if (status >= 300 && status < 400)
    return trouble(Kind::kServer, Code::kInvalid,
                   "the server redirects (HTTP {}), which is not followed: set the new address", status);
  const bool of_question = status == 400 || status == 413 || status == 422;
  TextTrouble refused =
      trouble(of_question ? Kind::kQuestion : Kind::kServer, Code::kInvalid, "HTTP {}: {}", status, said.message);
  refused.says_completion_tokens =
      status == 400 && (said.param == "max_tokens" || said.message.find("max_completion_tokens") != std::string::npos);
  return refused;
}

Result<TextServer> TextServer::make(TextServerOptions options, const Clock& clock) {
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
  return TextServer(std::move(options), clock);
}

TextServer::TextServer(TextServerOptions options, const Clock& clock)
    : options_(std::move(options)),
      clock_(&clock),
      http_(std::make_unique<HttpClient>(options_.key, kForever, HttpLimits{.answer_max = kAnswerMax})) {}

Status TextServer::submit(TextQuestion question) {
  if (inside() >= kInsideMax)
    return fail(Code::kExhausted, kOperation, "{} questions are in progress: wait for answers first", kInsideMax);
  waiting_.push_back({std::move(question)});
  return ok();
}

std::vector<TextServer::Ended> TextServer::poll(Duration wait) {
  const TimePoint now = clock_->now();
  send_due(now);
  if (done_.empty()) {
    for (const Asked& asked : waiting_)  // a waiting question may be due before the next answer
      if (sent_.size() < options_.at_once)
        wait = std::min(wait, std::max({asked.not_before - now, quiet_until_ - now, Duration{}}));
    for (const HttpAnswer& answer : http_->poll(wait)) hear(answer, clock_->now());
    send_due(clock_->now());
  }
  return std::exchange(done_, {});
}

void TextServer::cancel(std::uint64_t id) {
  std::erase_if(waiting_, [&](const Asked& asked) { return asked.question.id == id; });
  std::erase_if(done_, [&](const Ended& ended) { return ended.id == id; });
  for (auto it = sent_.begin(); it != sent_.end();) {
    const auto here = it++;
    if (here->second.question.id != id) continue;
    http_->cancel(here->first);
    sent_.erase(here);
  }
}

Result<TextAnswer> TextServer::ask(const TextQuestion& question) {
  ECHO_CHECK(inside() == 0, "{} questions are inside", inside());
  ECHO_TRY(submit(question));
  for (;;) {
    std::vector<Ended> ended = poll(std::chrono::seconds(1));
    if (!ended.empty()) return std::move(ended.front().answer);
  }
}

void TextServer::send_due(TimePoint now) {
  for (auto it = waiting_.begin(); it != waiting_.end();) {
    if (broken_) {
      done_.push_back({it->question.id, *broken_, false});
      it = waiting_.erase(it);
    } else if (sent_.size() >= options_.at_once || now < quiet_until_) {
      return;
    } else if (now < it->not_before) {
      ++it;
    } else {
      const std::uint64_t request =
          http_->send({"POST", options_.url + path_of(options_),
                       text_request(options_, it->question, completion_tokens_), options_.timeout});
      ++it->tries;
      it->completion_tokens = completion_tokens_;
      sent_.emplace(request, std::move(*it));
      it = waiting_.erase(it);
    }
  }
}

void TextServer::hear(const HttpAnswer& heard, TimePoint now) {
  const auto it = sent_.find(heard.request);
  if (it == sent_.end()) return;
  Asked asked = std::move(it->second);
  sent_.erase(it);
  heard_ = heard_ || heard.status != 0;
  if (heard.status == 200) {
    auto answer = parse_text_answer(heard.body, options_.chat);
    if (answer) return done_.push_back({asked.question.id, std::move(answer), false});
    Error error = std::move(answer).error();
    error.detail = fmt::format("{}{}: {}", options_.url, path_of(options_), error.detail);
    return again(std::move(asked), heard, {TextTrouble::Kind::kAgain, std::move(error), false}, now);
  }
  TextTrouble trouble = text_trouble(options_, heard);
  if (trouble.says_completion_tokens && !asked.completion_tokens) {
    completion_tokens_ = true;
    return waiting_.push_front(std::move(asked));
  }
  if (trouble.kind == TextTrouble::Kind::kAgain) return again(std::move(asked), heard, std::move(trouble), now);
  done_.push_back({asked.question.id, trouble.error, trouble.kind == TextTrouble::Kind::kQuestion});
  if (trouble.kind != TextTrouble::Kind::kServer) return;
  broken_ = std::move(trouble.error);
  for (const auto& [request, other] : std::exchange(sent_, {})) {
    http_->cancel(request);
    done_.push_back({other.question.id, *broken_, false});
  }
}

void TextServer::again(Asked asked, const HttpAnswer& heard, TextTrouble trouble, TimePoint now) {
  if (asked.tries >= (heard_ ? options_.tries_max : std::min(options_.tries_max, kTriesUnheard))) {
    trouble.error.detail += fmt::format(" ({} times)", asked.tries);
    return done_.push_back({asked.question.id, std::move(trouble.error), false});
  }
  Duration pause = options_.retry_first;
  for (int i = 1; i < asked.tries && pause < options_.retry_max; ++i) pause *= 2;
  pause = std::min(pause, options_.retry_max);
  // Adds up to a quarter, so that questions that failed together are not retried together.
  const std::uint64_t draw = mix64(asked.question.id * 64 + static_cast<std::uint64_t>(asked.tries)) % 1024;
  asked.not_before = now + pause + pause * static_cast<Duration::rep>(draw) / 4096;
  if (heard.retry_after > Duration{})
    quiet_until_ = std::max(quiet_until_, now + std::min(heard.retry_after, options_.retry_max));
  waiting_.push_back(std::move(asked));
}

}  // namespace echoline

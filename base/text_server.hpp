// A client for servers with OpenAI's HTTP interface (chat completions or completions), such as vLLM, SGLang, llama.cpp,
// Ollama or a hosted service. Sends many questions concurrently, with retries. Reference:
// platform.openai.com/docs/api-reference.
#pragma once
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.hpp"
#include "base/http.hpp"
#include "base/policy_input.hpp"
#include "base/result.hpp"

namespace echoline {

struct TextServerOptions {
  std::string url;    // the base address, without /chat/completions: "http://127.0.0.1:8000/v1"
  std::string model;  // the model's name on the server
  std::string key;    // the API key; empty: none is sent
  bool chat = true;   // messages to /chat/completions; false: a text to /completions
  std::size_t requests_in_flight_max = 16;
  Duration timeout = std::chrono::minutes(10);  // time-out of each request
  int tries_max = 8;                            // requests per question, at most
  // Pause before the first retry; doubles with each further retry.
  Duration first_retry_delay = std::chrono::seconds(1);
  Duration retry_delay_max = std::chrono::minutes(1);
};

struct TextQuestion {
  std::uint64_t id = 0;
  std::vector<ChatMessage> messages;  // the conversation, with `chat`
  std::string prompt;                 // the text to continue, without `chat`
  // With `chat`: chat_template_kwargs of vLLM and SGLang; empty: not sent.
  std::string template_options_json;
  std::int64_t tokens_max = 64;
  double temperature = 1, top_p = 1;
  std::optional<std::uint64_t> seed;
};

struct TextAnswer {
  std::string text;
  bool finished = false;               // the model ended it; false: tokens_max cut it off
  std::optional<std::int64_t> tokens;  // length of the text, by the server's count
};

// Why a request has no usable answer, and whether to retry it.
struct RequestFailure {
  enum class Kind {
    kRetryable,        // a retry may help
    kQuestionRefused,  // the server refuses this question; others may succeed
    kServerUnusable,   // every question would fail
  };
  Kind kind = Kind::kRetryable;
  Error error;
  bool wants_max_completion_tokens = false;  // the server requires max_completion_tokens instead of max_tokens
};

// The body of a request. `use_max_completion_tokens`: names the limit max_completion_tokens instead of max_tokens.
// Pure.
std::string text_request(const TextServerOptions& options, const TextQuestion& question,
                         bool use_max_completion_tokens);
// `body`: of a response with status 200. kCorrupt if it holds no valid answer. Pure.
Result<TextAnswer> parse_text_answer(std::string_view body, bool chat);
// The failure that a response with another status means, or the lack of a response. Pure.
RequestFailure classify_failure(const TextServerOptions& options, const HttpAnswer& answer);

// Retries temporary errors (no connection, 408, 409, 425, 429, 5xx, an invalid or incomplete answer) with growing
// pauses, and not before the server's Retry-After. An error that concerns all questions (a refused key, an unknown
// model, a redirect) becomes the answer to every question. Use from one thread.
class TextServerClient {
 public:
  static constexpr std::size_t kPendingQuestionsMax = 65'536;

  struct Outcome {
    std::uint64_t id = 0;
    // kInvalid: the server refuses the question or the key; kNotFound: unknown model; kUnavailable, kCorrupt: all tries
    // failed; kExhausted: the account has no credit.
    Result<TextAnswer> answer;
    bool concerns_only_this_question = false;  // for an error: the server refuses this question, others may succeed
  };

  // `clock` must outlive the client. kInvalid: no url or model, or an invalid limit.
  static Result<TextServerClient> make(TextServerOptions options, const Clock& clock);
  // kExhausted if kPendingQuestionsMax questions are in progress. The caller chooses ids, unique among those in
  // progress.
  Status submit(TextQuestion question);
  // The questions that ended since the last call. If there are none, waits up to about `wait` for one.
  std::vector<Outcome> poll(Duration wait);
  // Drops a question in progress, which poll() then does not report. No effect on other ids.
  void cancel(std::uint64_t id);
  // Questions that wait or were sent.
  std::size_t pending_count() const { return waiting_.size() + sent_.size(); }
  // Asks one question and waits for its answer. Requires pending_count() == 0 (checked).
  Result<TextAnswer> ask(const TextQuestion& question);

 private:
  struct PendingQuestion {
    TextQuestion question;
    int tries = 0;
    bool use_max_completion_tokens = false;  // the last request used it
    TimePoint not_before{};                  // time of the next try
  };
  TextServerClient(TextServerOptions options, const Clock& clock);
  void send_due(TimePoint now);
  void on_response(const HttpAnswer& response, TimePoint now);
  void retry_or_fail(PendingQuestion pending, const HttpAnswer& response, RequestFailure failure, TimePoint now);

  TextServerOptions options_;
  const Clock* clock_;
  std::unique_ptr<HttpClient> http_;
  std::deque<PendingQuestion> waiting_;            // including delayed retries
  std::map<std::uint64_t, PendingQuestion> sent_;  // questions by the id of their request
  std::vector<Outcome> done_;
  std::optional<Error> fatal_error_;  // the answer to every question, once the server is unusable
  TimePoint no_request_before_{};     // set by the server's Retry-After
  bool use_max_completion_tokens_ = false;
  bool any_response_ = false;  // a response of any status came, so the address is right
};

}  // namespace echoline

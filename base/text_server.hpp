// A client of a text server with OpenAI's interface, chat completions or completions: vLLM, SGLang, llama.cpp, Ollama,
// or a service. Sends many questions concurrently, with retries. Reference: platform.openai.com/docs/api-reference.
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
#include "base/result.hpp"
#include "base/told.hpp"

namespace echoline {

struct TextServerOptions {
  std::string url;                                 // without /chat/completions: "http://127.0.0.1:8000/v1"
  std::string model;                               // the model's name on the server
  std::string key;                                 // empty: no key is sent
  bool chat = true;                                // messages to /chat/completions; false: a text to /completions
  std::size_t at_once = 16;                        // requests in flight
  Duration timeout = std::chrono::minutes(10);     // per request
  int tries_max = 8;                               // per question
  Duration retry_first = std::chrono::seconds(1);  // doubles with each attempt
  Duration retry_max = std::chrono::minutes(1);
};

struct TextQuestion {
  std::uint64_t id = 0;
  std::vector<ChatMessage> messages;  // with `chat`
  std::string prompt;                 // without `chat`: the text to continue
  // With `chat`: chat_template_kwargs of vLLM and SGLang; empty: not sent.
  std::string template_options_json;
  std::int64_t tokens_max = 64;
  double temperature = 1, top_p = 1;
  std::optional<std::uint64_t> seed;
};

struct TextAnswer {
  std::string text;
  bool finished = false;               // ended by itself, not by the limit
  std::optional<std::int64_t> tokens;  // by the server's count
};

// An error in an answer: whether it concerns only this question, and whether a retry may help.
struct TextTrouble {
  enum class Kind { kAgain, kQuestion, kServer };
  Kind kind = Kind::kAgain;
  Error error;
  bool says_completion_tokens = false;  // the server requires max_completion_tokens instead of max_tokens
};

// Pure functions: the body of a request, and the answer or error in a response.
std::string text_request(const TextServerOptions& options, const TextQuestion& question, bool completion_tokens);
Result<TextAnswer> parse_text_answer(std::string_view body, bool chat);                // of status 200; kCorrupt
TextTrouble text_trouble(const TextServerOptions& options, const HttpAnswer& answer);  // any other status, or no answer

// Retries temporary errors (no connection, 408, 409, 425, 429, 5xx, an invalid or incomplete answer) with growing
// pauses, and not before the server's Retry-After. An error that concerns all questions (a refused key, an unknown
// model, a redirect) is the answer to all from then on. Use from one thread.
class TextServer {
 public:
  static constexpr std::size_t kInsideMax = 65'536;

  struct Ended {
    std::uint64_t id = 0;
    // kInvalid: the server refuses the question or the key; kNotFound: unknown model; kUnavailable, kCorrupt: all tries
    // failed; kExhausted: the account has no credit.
    Result<TextAnswer> answer;
    bool single = false;  // the error concerns only this question
  };

  // kInvalid: no url or model, or an invalid limit.
  static Result<TextServer> make(TextServerOptions options, const Clock& clock);
  // kExhausted if kInsideMax questions are in progress. The caller chooses ids, unique among those in progress.
  Status submit(TextQuestion question);
  // The questions that ended; if there are none, waits about this long for one.
  std::vector<Ended> poll(Duration wait);
  // Drops a question.
  void cancel(std::uint64_t id);
  std::size_t inside() const { return waiting_.size() + sent_.size(); }
  // Asks a single question, without others in progress, and waits for the answer.
  Result<TextAnswer> ask(const TextQuestion& question);

 private:
  struct Asked {
    TextQuestion question;
    int tries = 0;
    bool completion_tokens = false;  // the parameter that was sent
    TimePoint not_before{};
  };
  TextServer(TextServerOptions options, const Clock& clock);
  void send_due(TimePoint now);
  void hear(const HttpAnswer& answer, TimePoint now);
  void again(Asked asked, const HttpAnswer& answer, TextTrouble trouble, TimePoint now);

  TextServerOptions options_;
  const Clock* clock_;
  std::unique_ptr<HttpClient> http_;
  std::deque<Asked> waiting_;            // including delayed retries
  std::map<std::uint64_t, Asked> sent_;  // by request id
  std::vector<Ended> done_;
  std::optional<Error> broken_;  // the answer to every question
  TimePoint quiet_until_{};      // the server asked for no requests before
  bool completion_tokens_ = false, heard_ = false;
};

}  // namespace echoline

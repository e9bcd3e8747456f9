// Texts from a server that speaks OpenAI's interface, chat completions or completions: vLLM, SGLang, llama.cpp, Ollama,
// or a service. Many questions at a time, patiently. Reference: platform.openai.com/docs/api-reference.
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
  std::string url;           // up to what stands before /chat/completions: "http://127.0.0.1:8000/v1"
  std::string model;         // as the server calls it
  std::string key;           // empty: none is sent
  bool chat = true;          // messages to /chat/completions; otherwise a text to /completions
  std::size_t at_once = 16;  // requests under way
  Duration timeout = std::chrono::minutes(10);     // of one request
  int tries_max = 8;                               // of one question
  Duration retry_first = std::chrono::seconds(1);  // doubled from one attempt to the next
  Duration retry_max = std::chrono::minutes(1);
};

struct TextQuestion {
  std::uint64_t id = 0;
  std::vector<ChatMessage> messages;  // with `chat`
  std::string prompt;                 // otherwise: the text to continue
  std::string
      template_options_json;  // with `chat`: chat_template_kwargs, as vLLM and SGLang take them; empty: not sent
  std::int64_t tokens_max = 64;
  double temperature = 1, top_p = 1;
  std::optional<std::uint64_t> seed;
};

struct TextAnswer {
  std::string text;
  bool finished = false;               // by itself, not by the limit
  std::optional<std::int64_t> tokens;  // as the server counts them
};

// What is wrong with an answer: whether it concerns this question only, and whether asking again may help.
struct TextTrouble {
  enum class Kind { kAgain, kQuestion, kServer };
  Kind kind = Kind::kAgain;
  Error error;
  bool says_completion_tokens = false;  // the server wants max_completion_tokens instead of max_tokens
};

// Pure. The body that asks, and what an answer says: an answer, or what is wrong.
std::string text_request(const TextServerOptions& options, const TextQuestion& question, bool completion_tokens);
Result<TextAnswer> parse_text_answer(std::string_view body, bool chat);                // of status 200; kCorrupt
TextTrouble text_trouble(const TextServerOptions& options, const HttpAnswer& answer);  // of any other, or none

// What is temporary (no connection, 408, 409, 425, 429, 5xx, a body that is no answer, half an answer) is asked again,
// later every time and not before the server has said so (Retry-After). What concerns all questions (a key that is
// refused, an unknown model, a redirect) is the answer to all, from then on. From one thread.
class TextServer {
 public:
  static constexpr std::size_t kInsideMax = 65'536;

  struct Ended {
    std::uint64_t id = 0;
    // kInvalid: the server refuses the question, or the key; kNotFound: the model; kUnavailable, kCorrupt: after all
    // tries; kExhausted: the account has no money left.
    Result<TextAnswer> answer;
    bool single = false;  // the error is this question's alone
  };

  // kInvalid: no url or model, or a limit that is none.
  static Result<TextServer> make(TextServerOptions options, const Clock& clock);
  // kExhausted: kInsideMax are inside. Ids are the asker's own, none twice at a time.
  Status submit(TextQuestion question);
  // What has ended; where nothing has, waits about so long for it.
  std::vector<Ended> poll(Duration wait);
  // Nothing comes of it any more.
  void cancel(std::uint64_t id);
  std::size_t inside() const { return waiting_.size() + sent_.size(); }
  // One question, nothing else inside: waits for its answer.
  Result<TextAnswer> ask(const TextQuestion& question);

 private:
  struct Asked {
    TextQuestion question;
    int tries = 0;
    bool completion_tokens = false;  // as it was sent
    TimePoint not_before{};
  };
  TextServer(TextServerOptions options, const Clock& clock);
  void send_due(TimePoint now);
  void hear(const HttpAnswer& answer, TimePoint now);
  void again(Asked asked, const HttpAnswer& answer, TextTrouble trouble, TimePoint now);

  TextServerOptions options_;
  const Clock* clock_;
  std::unique_ptr<HttpClient> http_;
  std::deque<Asked> waiting_;            // some until later
  std::map<std::uint64_t, Asked> sent_;  // by request
  std::vector<Ended> done_;
  std::optional<Error> broken_;  // the answer to everything
  TimePoint quiet_until_{};      // the server wants to hear nothing before
  bool completion_tokens_ = false, heard_ = false;
};

}  // namespace echoline

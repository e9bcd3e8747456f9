// A server on loopback with OpenAI's documented interface (chat completions, completions, models, errors) that
// misbehaves on request like real ones.
#pragma once
#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

namespace echoline {

struct OpenAiServerOptions {
  std::string model = "tiny", key = {};  // an empty key: none is required
  bool wants_completion_tokens = false;  // refuses max_tokens, as newer models of OpenAI do
  std::size_t context_max = 4096;        // characters of a prompt
  // The model's answer to the text, or to the last message. A token is a character.
  std::function<std::string(const std::string& text, const nlohmann::json& body)> says = {};
};

// A fault that replaces an answer.
struct OpenAiFault {
  // "status": answers `status`
  // "html": 200, a proxy's page
  // "disconnect": in the middle of the body
  // "half": JSON that breaks off
  // "null_reason": no finish_reason
  // "no_choices"
  // "error": 200, with an error in it
  // "hang": waits for `hangs`, then answers
  std::string what;
  int times = 1;  // number of requests with this fault
  int status = 503;
  int retry_after_s = 0;  // in the header Retry-After; 0: no header
  std::string body = {};  // of "status"; empty: an error as OpenAI has it
  std::chrono::milliseconds hangs{0};
};

class OpenAiServer {
 public:
  explicit OpenAiServer(OpenAiServerOptions options);
  ~OpenAiServer();
  std::string url() const;  // with /v1
  void fault(OpenAiFault fault);
  int requests() const;
  int requests_at_once_max() const;
  nlohmann::json last() const;  // body of the last request

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace echoline

// Reads any bytes as the answer of a server with OpenAI's interface. libFuzzer calls it when ECHOLINE_FUZZ is on;
// text_server_test calls it on mutated answers in every ordinary test run.
#include <cstdint>
#include <string_view>

#include "base/text.hpp"
#include "base/text_server.hpp"

using namespace echoline;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view body(reinterpret_cast<const char*>(data), size);
  for (const bool chat : {true, false}) {
    const auto answer = parse_text_answer(body, chat);
    if (answer) {
      ECHO_CHECK(answer->text.size() <= body.size(), "a text longer than the answer");
      ECHO_CHECK(!answer->tokens || *answer->tokens >= 0, "less than no tokens");
    } else {
      ECHO_CHECK(answer.error().code == Code::kCorrupt && is_printable(answer.error().detail) &&
                     answer.error().detail.size() < 2000,
                 "an error fit for a log: {}", answer.error().detail);
    }
  }
  HttpAnswer response;
  response.body = body;
  for (const int status : {0, 204, 302, 400, 401, 404, 418, 429, 500, 501}) {
    response.status = status;
    const RequestFailure failure = classify_failure({.url = "http://x/v1", .model = "m", .key = {}}, response);
    ECHO_CHECK(is_printable(failure.error.detail) && failure.error.detail.size() < 2000, "an error fit for a log: {}",
               failure.error.detail);
  }
  return 0;
}

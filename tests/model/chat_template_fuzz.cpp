// Reads any bytes as a chat template, and renders the valid ones. libFuzzer calls it when ECHOLINE_FUZZ is on;
// chat_template_test calls it on mutated templates in every ordinary test run.
#include <cstdint>
#include <string_view>

#include "model/chat_template.hpp"

using namespace echoline;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto parsed = model::ChatTemplate::parse({reinterpret_cast<const char*>(data), size});
  if (!parsed) {
    ECHO_CHECK(parsed.error().code == Code::kInvalid, "{}", parsed.error().message());
    return 0;
  }
  const std::vector<ChatMessage> messages = {{"system", "s"}, {"user", "u\n"}};
  const auto first = parsed->render(messages, true, R"({"x": {"a": [1, "b"]}, "bos_token": "<s>"})");
  const auto second = parsed->render(messages, true, R"({"x": {"a": [1, "b"]}, "bos_token": "<s>"})");
  ECHO_CHECK(first.has_value() == second.has_value() && (!first || *first == *second), "two renderings differ");
  return 0;
}

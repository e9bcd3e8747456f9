// Renders the chat templates of its input, for tests/real/templates.
//
//   render_chats < lines > results
//
// A line is {"template", "messages", "variables"}. The line of the result is {"text"} or {"error"}.
#include <cstdio>
#include <iostream>
#include <nlohmann/json.hpp>

#include "model/chat_template.hpp"

using echoline::ChatMessage;
using echoline::model::ChatTemplate;
using nlohmann::json;

namespace {

echoline::Result<std::string> render(const json& line) {
  ECHO_ASSIGN(const ChatTemplate chat_template, ChatTemplate::parse(line.at("template").get_ref<const std::string&>()));
  std::vector<ChatMessage> messages;
  for (const json& message : line.at("messages"))
    messages.push_back({message.at("role").get<std::string>(), message.at("content").get<std::string>()});
  return chat_template.render(messages, /*add_generation_prompt=*/true, line.at("variables").dump());
}

}  // namespace

int main() {
  std::string line;
  while (std::getline(std::cin, line)) {
    const auto text = render(json::parse(line));
    const json result = text ? json{{"text", *text}} : json{{"error", text.error().message()}};
    std::printf("%s\n", result.dump(-1, ' ', /*ensure_ascii=*/true, json::error_handler_t::replace).c_str());
  }
  return 0;
}

#include "data_plane/policy_input.hpp"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>

namespace echoline::data_plane {
namespace {

using nlohmann::json;

constexpr std::array<std::string_view, 4> kRoles{"system", "user", "assistant", "tool"};

template <class... Args>
Error bad(fmt::format_string<Args...> format, Args&&... args) {
  return fail(Code::kInvalid, "", format, std::forward<Args>(args)...);
}

std::string shown(const json& value) {
  return value.dump(-1, ' ', false, json::error_handler_t::replace).substr(0, 120);
}

Result<std::string> read_content(const json& message) {
  const auto content = message.find("content");
  if (content != message.end() && content->is_string()) return content->get<std::string>();
  if (content == message.end() || !content->is_array())
    return bad("expected the 'content' of a message, a text or a list of texts, found {}", shown(message));
  std::string text;
  for (const json& part : *content) {
    const auto words = part.is_object() ? part.find("text") : part.end();
    if (words == part.end() || !words->is_string())
      return bad("expected a content of texts only, found a part {}", shown(part));
    text += words->get_ref<const std::string&>();
  }
  return text;
}

Result<ChatMessage> read_message(const json& message) {
  const auto role = message.is_object() ? message.find("role") : message.end();
  if (role == message.end() || !role->is_string() ||
      std::find(kRoles.begin(), kRoles.end(), role->get_ref<const std::string&>()) == kRoles.end())
    return bad("expected a message with the 'role' {}, found {}", fmt::join(kRoles, ", "), shown(message));
  if (const auto calls = message.find("tool_calls"); calls != message.end() && !calls->empty())
    return bad("a message with 'tool_calls' cannot be given to a policy: write the call into its content, found {}",
               shown(message));
  ECHO_ASSIGN(std::string content, read_content(message));
  return ChatMessage{role->get<std::string>(), std::move(content)};
}

}  // namespace

PolicyInput prompt_of(const Problem& problem) {
  if (problem.messages().empty()) return problem.prompt();
  std::vector<ChatMessage> messages;
  for (const schema::Message& m : problem.messages()) messages.push_back({m.role(), m.content()});
  return PolicyInput(std::move(messages));
}

void set_prompt(Problem& problem, PolicyInput input) {
  problem.set_prompt(std::move(input.text));
  problem.clear_messages();
  for (ChatMessage& message : input.messages) {
    schema::Message& m = *problem.add_messages();
    m.set_role(std::move(message.role));
    m.set_content(std::move(message.content));
  }
}

Result<PolicyInput> read_policy_input(const json& value, std::size_t bytes_max) {
  PolicyInput input;
  if (value.is_string()) {
    input.text = value.get<std::string>();
  } else {
    if (!value.is_array() || value.empty() || value.size() > kMessagesMax)
      return bad("expected a text or a list of 1 to {} messages, found {}", kMessagesMax, shown(value));
    std::vector<ChatMessage> messages;
    for (const json& each : value) {
      ECHO_ASSIGN(ChatMessage message, read_message(each));
      messages.push_back(std::move(message));
    }
    if (const std::string& last = messages.back().role; last != "user" && last != "tool")
      return bad("the last message has the role '{}', expected a user's or a tool's", last);
    input = PolicyInput(std::move(messages));
  }
  if (input.text.size() > bytes_max) return bad("{} bytes, at most {} are allowed", input.text.size(), bytes_max);
  return input;
}

json to_json(const PolicyInput& input) {
  if (input.messages.empty()) return input.text;
  json all = json::array();
  for (const ChatMessage& message : input.messages)
    all.push_back({{"role", message.role}, {"content", message.content}});
  return all;
}

}  // namespace echoline::data_plane

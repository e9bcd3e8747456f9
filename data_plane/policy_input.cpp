// Converts prompts and observations between the policy's input, protobuf and JSON.
#include "data_plane/policy_input.hpp"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>

namespace echoline::data_plane {
namespace {

using nlohmann::json;

constexpr std::size_t kExcerptBytesMax = 120;
constexpr std::array<std::string_view, 4> kRoles{"system", "user", "assistant", "tool"};

// An error without an operation's name, which the caller knows.
template <class... Args>
Error input_error(fmt::format_string<Args...> format, Args&&... args) {
  return fail(Code::kInvalid, "", format, std::forward<Args>(args)...);
}

std::string excerpt(const json& value) {
  return value.dump(-1, ' ', /*ensure_ascii=*/false, json::error_handler_t::replace).substr(0, kExcerptBytesMax);
}

Result<std::string> read_content(const json& message) {
  const auto content = message.find("content");
  if (content != message.end() && content->is_string()) return content->get<std::string>();
  if (content == message.end() || !content->is_array())
    return input_error(
        "message {}: expected a 'content' that is a text or a list of objects with a 'text', found {}; correct that "
        "message",
        excerpt(message), content == message.end() ? "none" : excerpt(*content));
  std::string text;
  for (const json& part : *content) {
    const auto text_member = part.is_object() ? part.find("text") : part.end();
    if (text_member == part.end() || !text_member->is_string())
      return input_error("expected a content of texts only, found a part {}", excerpt(part));
    text += text_member->get_ref<const std::string&>();
  }
  return text;
}

Result<ChatMessage> read_message(const json& message) {
  const auto role = message.is_object() ? message.find("role") : message.end();
  if (role == message.end() || !role->is_string() ||
      std::find(kRoles.begin(), kRoles.end(), role->get_ref<const std::string&>()) == kRoles.end())
    return input_error("expected a message with the 'role' {}, found {}", fmt::join(kRoles, ", "), excerpt(message));
  if (const auto calls = message.find("tool_calls"); calls != message.end() && !calls->empty())
    return input_error(
        "a message with 'tool_calls' cannot be given to a policy: write the call into its content, found {}",
        excerpt(message));
  ECHO_ASSIGN(std::string content, read_content(message));
  return ChatMessage{.role = role->get<std::string>(), .content = std::move(content)};
}

}  // namespace

PolicyInput prompt_of(const Problem& problem) {
  if (problem.messages().empty()) return problem.prompt();
  std::vector<ChatMessage> messages;
  for (const schema::Message& message : problem.messages())
    messages.push_back({.role = message.role(), .content = message.content()});
  return PolicyInput(std::move(messages));
}

void set_prompt(Problem& problem, PolicyInput input) {
  problem.set_prompt(std::move(input.text));
  problem.clear_messages();
  for (ChatMessage& message : input.messages) {
    schema::Message& added = *problem.add_messages();
    added.set_role(std::move(message.role));
    added.set_content(std::move(message.content));
  }
}

Result<PolicyInput> read_policy_input(const json& value, std::size_t bytes_max) {
  PolicyInput input;
  if (value.is_string()) {
    input.text = value.get<std::string>();
  } else {
    if (!value.is_array() || value.empty() || value.size() > kMessagesMax)
      return input_error("expected a text or a list of 1 to {} messages, found {}", kMessagesMax, excerpt(value));
    std::vector<ChatMessage> messages;
    for (const json& item : value) {
      ECHO_ASSIGN(ChatMessage message, read_message(item));
      messages.push_back(std::move(message));
    }
    if (const std::string& last_role = messages.back().role; last_role != "user" && last_role != "tool")
      return input_error("the last message has the role '{}', expected a user's or a tool's", last_role);
    input = PolicyInput(std::move(messages));
  }
  if (input.text.size() > bytes_max)
    return input_error("{} bytes, at most {} are allowed", input.text.size(), bytes_max);
  return input;
}

json to_json(const PolicyInput& input) {
  if (input.messages.empty()) return input.text;
  json list = json::array();
  for (const ChatMessage& message : input.messages)
    list.push_back({{"role", message.role}, {"content", message.content}});
  return list;
}

}  // namespace echoline::data_plane

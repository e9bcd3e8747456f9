// The text that a task gives to the policy, or messages of a conversation.
#pragma once
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace echoline {

struct ChatMessage {
  std::string role;  // system, user, assistant or tool
  std::string content;
  friend bool operator==(const ChatMessage&, const ChatMessage&) = default;
};

struct Told {
  std::string text;                   // with messages: their contents, one after the other
  std::vector<ChatMessage> messages;  // empty: `text` is everything, as a user's message where roles exist

  Told() = default;
  Told(std::string what) : text(std::move(what)) {}  // NOLINT: most tasks use plain texts
  Told(std::string_view what) : text(what) {}        // NOLINT
  Told(const char* what) : text(what) {}             // NOLINT
  explicit Told(std::vector<ChatMessage> what) : messages(std::move(what)) {
    for (const ChatMessage& message : messages) text += (text.empty() ? "" : "\n\n") + message.content;
  }
  friend bool operator==(const Told&, const Told&) = default;
};

}  // namespace echoline

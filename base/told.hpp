// What a policy is told by its task: a text, or messages of a conversation.
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
  std::string text;                   // where there are messages, what they say, one after the other
  std::vector<ChatMessage> messages;  // none: the text is all of it, and a user's where there are roles

  Told() = default;
  Told(std::string what) : text(std::move(what)) {}  // NOLINT: most tasks speak in texts, and need not know of this
  Told(std::string_view what) : text(what) {}        // NOLINT
  Told(const char* what) : text(what) {}             // NOLINT
  explicit Told(std::vector<ChatMessage> what) : messages(std::move(what)) {
    for (const ChatMessage& message : messages) text += (text.empty() ? "" : "\n\n") + message.content;
  }
  friend bool operator==(const Told&, const Told&) = default;
};

}  // namespace echoline

// The input of the policy (the model that is trained) from a task: a text, or the messages of a conversation.
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

struct PolicyInput {
  std::string text;                   // the prompt; with messages: their contents, joined by empty lines
  std::vector<ChatMessage> messages;  // empty: `text` is all; a chat model gets it as a user's message

  PolicyInput() = default;
  PolicyInput(std::string plain_text) : text(std::move(plain_text)) {}  // NOLINT: most tasks use plain texts
  PolicyInput(std::string_view plain_text) : text(plain_text) {}        // NOLINT
  PolicyInput(const char* plain_text) : text(plain_text) {}             // NOLINT
  explicit PolicyInput(std::vector<ChatMessage> chat) : messages(std::move(chat)) {
    for (const ChatMessage& message : messages) text += (text.empty() ? "" : "\n\n") + message.content;
  }
  friend bool operator==(const PolicyInput&, const PolicyInput&) = default;
};

}  // namespace echoline
